"""Dense MLA on GPUs that share its cache, over NCCL: eager, compiled, and captured in one CUDA
graph a rank that is replayed with other requests."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist

import dsv4_ops as ops
from dsv4_ops.attention import (
    ContextParallel,
    MlaCache,
    MlaInputs,
    MlaSpec,
    MlaWeights,
    build_mla_step,
    mla_layer,
)
from dsv4_ops.ops.context_parallel import COMBINES
from dsv4_ops.ops.mla import split_kv_b_proj
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu

HEADS, TOKENS, REQUESTS, COLUMNS = 32, 12, 5, 8
STEPS = (  # query lengths of the requests, and the lengths of their contexts
    ([1, 2, 1, 7, 0], [700, 63, 0, 190, 0]),
    ([2, 1, 1, 0, 5], [1, 400, 65, 0, 129]),
)


def whole_spec(**changed):
    settings = {"context": "chunked", "max_decode_tokens": 4, "next_n": 2, "max_chunks": 2}
    settings |= {"num_heads": HEADS, "workspace_rows": 512, **changed}
    return MlaSpec.deepseek_v3(**settings)


class Model:
    """One layer with the heads of a rank, its cache filled with contexts."""

    def __init__(self, spec, heads):
        self.spec, self.heads = spec, heads
        made = torch.Generator("cuda").manual_seed(0)

        def some(*shape, scale=1.0):
            values = torch.randn(*shape, generator=made, device="cuda") * scale
            return values.bfloat16().to(spec.dtype)

        w_kv_b = some(HEADS, 256, 512, scale=0.04)[heads].flatten(0, 1)
        dims = {"qk_nope_head_dim": 128, "v_head_dim": 128}
        angles = torch.arange(1024.0, device="cuda")[:, None] * 0.1 ** torch.arange(32.0).cuda()
        rope = torch.cat((angles.cos(), angles.sin()), 1)
        halves = split_kv_b_proj(w_kv_b, num_heads=spec.num_heads, **dims)
        self.weights = MlaWeights(rope, *halves, w_kv_b)
        self.cached = some(REQUESTS, 1024, 512), some(REQUESTS, 1024, 64)
        self.q = some(TOKENS, HEADS, 192)[:, heads].contiguous()
        self.new = some(TOKENS, 512), some(TOKENS, 64)
        self.table = torch.arange(REQUESTS * COLUMNS * 2, dtype=torch.int32, device="cuda")
        self.table = self.table.view(REQUESTS, -1)
        self.cache = MlaCache.allocate(spec, REQUESTS * COLUMNS * 2, "cuda")
        self.cache.kv.fill_(torch.nan)
        self.rank = None if spec.ranks is None else spec.ranks.rank("cuda")

    def fill(self, contexts):
        """Store the contexts' rows of this rank."""
        starts = ints([0, *contexts]).cumsum(0).int()
        lens, total = ints(contexts), sum(contexts)
        settings = {"cp_rank": self.rank, "num_tokens": total}
        spec = dataclasses.replace(self.spec, context="absorbed")
        step = build_mla_step(spec, starts, lens, self.table, **settings)
        latents, ropes = (
            torch.cat([rows[request, :length] for request, length in enumerate(contexts)])
            for rows in self.cached
        )
        ropes = ops.apply_rope(ropes, step.positions, self.weights.cos_sin_cache)
        size = spec.block_size
        ops.mla_insert_kv(latents, ropes, self.cache.kv, step.slot_mapping, block_size=size)

    def run(self, starts, lens):
        rank, inputs = self.rank, MlaInputs(self.q, *self.new)
        step = build_mla_step(self.spec, starts, lens, self.table, cp_rank=rank, num_tokens=TOKENS)
        return mla_layer(self.spec, inputs, self.weights, self.cache, step)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def batch(queries, contexts):
    lens = [q + c if q else 0 for q, c in zip(queries, contexts, strict=True)]
    return ints([0, *queries]).cumsum(0).int(), ints(lens)


@torch.no_grad()
def rank_layer(rank, world):
    spec = whole_spec()
    exact = dataclasses.replace(spec, dtype=torch.float32, impl="reference")
    own = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    began = time.monotonic()

    def say(what):
        if rank == 0:
            print(f"{time.monotonic() - began:6.1f} s: {what}", flush=True)

    say("ranks have met")
    wanted, bounds = [], []
    for queries, contexts in STEPS:
        results = []
        for each in (exact, spec):
            one = Model(each, slice(None))
            one.fill(contexts)
            out = one.run(*batch(queries, contexts)).float()
            results.append(out.unflatten(1, (HEADS, -1))[:, own].flatten(1))
        wanted.append(results[0])
        bounds.append(1.5 * float((results[1] - results[0]).square().mean().sqrt()))
    say("one GPU's layer")
    shown = {}

    def check(name, found, step):
        error = float((found.float() - wanted[step]).square().mean().sqrt())
        shown[name] = max(shown.get(name, 0.0), error / bounds[step] * 1.5)
        say(f"{name}, step {step}: error {shown[name]:.2f} times that of one GPU")
        assert error <= bounds[step], (name, step, error, bounds)

    for via in COMBINES:
        parallel = ContextParallel.of(interleave=16, via=via, shards_heads=True)
        sharded = whole_spec(num_heads=HEADS // world, parallel=parallel)
        compiled = Model.run
        if via != "all_to_all":  # its graph is tested with gloo; a compiled layer takes 20 s
            compiled = torch.compile(
                lambda model, starts, lens: model.run(starts, lens), fullgraph=True, dynamic=False
            )
        models = []
        for step, (queries, contexts) in enumerate(STEPS):
            model = Model(sharded, own)
            model.fill(contexts)
            check(f"{via} eager", model.run(*batch(queries, contexts)), step)
            if compiled is not Model.run:
                check(f"{via} compiled", compiled(model, *batch(queries, contexts)), step)
            models.append(model)
        given = batch(*STEPS[0])
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compiled(models[0], *given)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            out = compiled(models[0], *given)
        for step in (1, 0, 1):
            models[0].cache.kv.copy_(models[step].cache.kv)
            for mine, new in zip(given, batch(*STEPS[step]), strict=True):
                mine.copy_(new)
            if step == 0:
                models[0].fill(STEPS[0][1])
            graph.replay()
            check(f"{via} captured", out, step)
        torch.cuda.synchronize()
    return "done"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_gpus_share_a_cache(tmp_path):
    assert run_ranks(2, rank_layer, tmp_path, 2, backend="nccl", seconds=120) == ["done"] * 2

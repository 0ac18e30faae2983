"""Attention on GPUs that share its cache, over NCCL: dense MLA in one CUDA graph per rank, replayed
with other requests for 1,000 steps; layers of V4. ``test_split_model.py`` compiles models. Ranks
print how far they are (``-s``)."""

import collections
import dataclasses
import random
import time

import pytest
import torch
import torch.distributed as dist

from dsv4_ops import attention
from dsv4_ops.attention import ContextParallel, MlaInputs, MlaWeights, build_mla_step, mla_layer
from dsv4_ops.ops.context_parallel import COMBINES
from dsv4_ops.ops.mla import split_kv_b_proj
from tests.attention.test_sharded_layers import rank_quantised
from tests.support.ranks import gpu_ranks, run_ranks

HEADS, TOKENS, REQUESTS, COLUMNS = 32, 12, 5, 8


def whole_spec(**changed):
    settings = {"context": "chunked", "max_decode_tokens": 4, "next_n": 2, "max_chunks": 2}
    settings |= {"num_heads": HEADS, "workspace_rows": 512, **changed}
    return attention.MlaSpec.deepseek_v3(**settings)


class Progress:
    """Prints progress on rank 0, with the seconds so far."""

    def __init__(self, rank):
        self.rank, self.began = rank, time.monotonic()
        self.say("ranks have met")

    def say(self, what):
        if self.rank == 0:
            print(f"{time.monotonic() - self.began:6.1f} s: {what}", flush=True)


class Model:
    """One layer with a rank's heads."""

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
        self.q = some(TOKENS, HEADS, 192)[:, heads].contiguous()
        self.new = some(TOKENS, 512), some(TOKENS, 64)
        self.table = torch.arange(REQUESTS * COLUMNS * 2, dtype=torch.int32, device="cuda")
        self.table = self.table.view(REQUESTS, -1)
        self.cache = attention.MlaCache.allocate(spec, REQUESTS * COLUMNS * 2, "cuda")
        self.cache.kv.fill_(torch.nan)
        self.rank = None if spec.ranks is None else spec.ranks.rank("cuda")

    def run(self, starts, lens):
        rank, inputs = self.rank, MlaInputs(self.q, *self.new)
        step = build_mla_step(self.spec, starts, lens, self.table, cp_rank=rank, num_tokens=TOKENS)
        return mla_layer(self.spec, inputs, self.weights, self.cache, step)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def batch(queries, contexts):
    lens = [q + c if q else 0 for q, c in zip(queries, contexts, strict=True)]
    return ints([0, *queries]).cumsum(0).int(), ints(lens)


class Requests:
    """Requests over many steps: they arrive, are cancelled, or are preempted and start again.
    Reused blocks hold NaN where nothing was stored since."""

    def __init__(self, models, seed=3):
        self.models, self.rng = models, random.Random(seed)
        self.free = [list(range(REQUESTS * COLUMNS * 2)) for _ in models]
        self.held = [[[] for _ in range(REQUESTS)] for _ in models]
        self.done, self.target = [0] * REQUESTS, [0] * REQUESTS
        self.events = collections.Counter()

    def release(self, request):
        self.done[request] = 0
        for model, free, held in zip(self.models, self.free, self.held, strict=True):
            rows = model.cache.kv.view(-1, model.spec.block_size, model.cache.kv.shape[-1])
            for block in held[request]:
                rows[block] = torch.nan
            free += held[request]
            self.rng.shuffle(free)
            held[request] = []

    def step(self):
        """Return new and earlier tokens per request, decodes first, and the requests' order."""
        for request in range(REQUESTS):
            chance = self.rng.random()
            if not self.target[request]:
                if chance < 0.2:
                    self.target[request] = self.rng.randint(1, 190)
                    self.events["arrivals"] += 1
            elif self.done[request] >= self.target[request] or chance < 0.01:
                self.events["ends" if chance >= 0.01 else "cancellations"] += 1
                self.release(request)
                self.target[request] = 0
            elif chance < 0.02:
                self.events["preemptions"] += 1
                self.release(request)
        running = [each for each in range(REQUESTS) if self.target[each]]
        chunked = [each for each in running if self.target[each] - self.done[each] > 40]
        decoding = [each for each in running if each not in chunked][:2]
        counts = {each: self.rng.choice((1, 2)) for each in decoding}
        if chunked:
            counts[chunked[0]] = self.rng.randint(3, TOKENS - 4)
        order = [*counts, *(each for each in range(REQUESTS) if each not in counts)]
        queries = [counts.get(each, 0) for each in order]
        contexts = [self.done[each] for each in order]
        for request, count in counts.items():
            self.done[request] += count
            for model, free, held in zip(self.models, self.free, self.held, strict=True):
                ranks = 1 if model.spec.ranks is None else model.spec.ranks.world_size
                blocks = -(-self.done[request] // (model.spec.block_size * ranks))
                while len(held[request]) < blocks:
                    held[request].append(free.pop())
        for model, held in zip(self.models, self.held, strict=True):
            rows = [held[each] + [0] * (model.table.shape[1] - len(held[each])) for each in order]
            model.table.copy_(ints(rows))
        return queries, contexts


@torch.no_grad()
def rank_soaks(rank, world, steps):
    """Replay captured steps; every 25 steps, compare with float32 attention over the same rows."""
    say, own = Progress(rank).say, slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    parallel = ContextParallel.of(interleave=16, via="symmetric_memory", shards_heads=True)
    whole = whole_spec()
    exact = Model(dataclasses.replace(whole, dtype=torch.float32, impl="reference"), slice(None))
    one = Model(whole, slice(None))
    part = Model(whole_spec(num_heads=HEADS // world, parallel=parallel), own)
    starts, lens = batch([1, 0, 0, 0, 0], [0] * REQUESTS)
    graphs, outs = [], []
    for model in (one, part):
        model.run(starts, lens)
        torch.cuda.synchronize()
        dist.barrier()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(model.run(starts, lens))
        model.cache.kv.fill_(torch.nan)
    say("captured")
    requests, made, worst = Requests((one, part)), torch.Generator("cuda").manual_seed(7), 0.0
    for step in range(steps):
        queries, contexts = requests.step()
        count = sum(queries)
        for held, new in zip((starts, lens), batch(queries, contexts), strict=True):
            held.copy_(new)
        for mine, wide in zip((one.q, *one.new), (exact.q, *exact.new), strict=True):
            mine.normal_(generator=made)
            wide.copy_(mine)
        part.q.copy_(one.q[:, own])
        for mine, its in zip(part.new, one.new, strict=True):
            mine.copy_(its)
        for graph in graphs:
            graph.replay()
        if step % 25 == 24 and count:
            exact.cache.kv.copy_(one.cache.kv)
            exact.table.copy_(one.table)
            want = exact.run(starts, lens).unflatten(1, (HEADS, -1))[:count, own].flatten(1)
            plain = outs[0].float().unflatten(1, (HEADS, -1))[:count, own].flatten(1)
            found = outs[1][:count].float(), plain
            error, bound = (float((each - want).square().mean().sqrt()) for each in found)
            worst = max(worst, error / bound)
            assert error <= 1.5 * bound, (step, queries, contexts, error, bound)
        if step % 250 == 249:
            say(f"step {step + 1}: up to {worst:.2f} times one GPU's, {dict(requests.events)}")
    torch.cuda.synchronize()
    return dict(requests.events)


def rank_v4(rank, world):
    say = Progress(rank).say
    for via in COMBINES:
        rank_quantised(rank, world, via, "cuda")
        say(f"V4's layers by {via}")
    rank_quantised(rank, world, "symmetric_memory", "cuda", shards_heads=False)
    say("V4's layers with all heads on each rank, gathered by symmetric memory")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_gpus_share_the_rows_of_v4(tmp_path):
    world = gpu_ranks()
    run_ranks(world, rank_v4, tmp_path, world, backend="nccl", seconds=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_thousand_captured_steps(tmp_path):
    world = gpu_ranks()
    found = run_ranks(world, rank_soaks, tmp_path, world, 1000, backend="nccl", seconds=120)
    assert found == found[:1] * world
    assert all(found[0][each] > 10 for each in ("arrivals", "cancellations", "preemptions"))

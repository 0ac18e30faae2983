"""Benchmark context parallelism: the collectives by each way, and the layers' attention on N GPUs.

It starts a process per GPU (two of gloo on a CPU, which checks and times small cases only). Before
anything is timed, each variant of the combine is compared with float64: eager, compiled, and
captured in a CUDA graph that is replayed with other inputs. Gathers are compared byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

import dsv4_ops as ops
from benchmarks.baselines.stock_model import flash_shaped
from benchmarks.harness.options import chosen_device, size
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.timing import Capture, device_activities, wall_us
from benchmarks.mla_model import v3_shaped
from benchmarks.run import BenchError
from dsv4_ops.attention import (
    ContextParallel,
    LayerCaches,
    LayerInputs,
    LayerSpec,
    LayerWeights,
    MlaCache,
    MlaSpec,
    MlaWeights,
    StateTables,
    attention_layer,
    build_attention_step,
    build_mla_step,
)
from dsv4_ops.attention.metadata import BlockTables
from dsv4_ops.attention.mla_layer import attend_absorbed
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.ops.context_parallel import GATHERS
from dsv4_ops.testing.models import head_plan, small_mla_model, small_model
from dsv4_ops.testing.released_model import keep_float32

CASES = ("combine", "gather", "layer", "v4_layer", "v4_model", "v3_model")
RANK, ONE_GPU, TENSOR, CONTEXT = 512, "one GPU", "tensor parallel", "context parallel"
SPLIT = "heads and experts split, rows shared"
CUDA_VARIANTS = ("reduce_scatter", "all_to_all", "symmetric_memory")
CPU_VARIANTS = CUDA_VARIANTS[:2]

_HEADS, _TOKENS = (64, 128), (1, 4, 16, 32, 64, 128, 256)
_CONTEXTS, _BATCHES = (131072, 1048576), (1, 8, 32)
_MODEL_CONTEXTS, _MODEL_STEPS, _MOST_ERROR = (4096, 131072), 6, 0.1
"""Maximum error of logits in bfloat16: sums have another order, and near ties of routers fall
differently."""
_SMALL_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
_CALLS = 16
"""Calls per graph, so that its launch does not count."""
_SAMPLES = 7
_V4_HEADS = 64
_CANDIDATES = 512
"""Candidates per token that a rank's indexer selects in V4."""
_INTERLEAVE = 64
"""Consecutive positions on one rank: a block."""


@dataclass
class Row:
    """Device time in microseconds, the same on all ranks, because they wait for each other.

    Args:
        group: "combine", "gather", "layer" for the attention of a V3 layer between its projections,
            "v4_layer" for a C4 or C128 layer of DeepSeek-V4, "v4_model" or "v3_model" for the
            decode step of a patched model of 4 layers and 16 experts.
        ranks: Processes, with a GPU each.
        variant: The collective of a combine; the gathered tensors and the collective of a gather;
            the kind of a V4 layer, and what the layers share.
        heads: Query heads of all ranks; 0 for candidates, which have none.
        tokens: Tokens of the step, one per request.
        context: Rows that each token sees; 0 for a combine or a gather.
        us: Median of replays of a CUDA graph; on a CPU, wall time.
        kernels: Kernels per layer in a model's step.
        cache_gb: Caches of a model on a rank.
        error: The error, if the case failed.
    """

    group: str
    ranks: int
    variant: str
    heads: int
    tokens: int
    context: int = 0
    us: float | None = None
    kernels: float | None = None
    cache_gb: float | None = None
    error: str | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    parser.add_argument("--ranks", type=size, metavar="N", help="default: all GPUs; 2 on a CPU")


def partials(
    seed: int, world: int, tokens: int, heads: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sample outputs in bfloat16 and log-sum-exps of all ranks. One rank has no keys for the first
    token."""
    made = torch.Generator(device).manual_seed(seed)
    outs = torch.randn(world, tokens, heads, RANK, generator=made, device=device).bfloat16()
    lses = torch.randn(world, tokens, heads, generator=made, device=device) * 3
    outs[0, 0], lses[0, 0] = torch.nan, torch.nan
    return outs, lses


def gathered_parts(seed: int, world: int, tokens: int, heads: int, device: torch.device) -> Tensor:
    """Sample queries of all ranks in bfloat16; with 0 heads, scores and rows of 512 candidates."""
    made = torch.Generator(device).manual_seed(seed)
    if heads == 0:
        shape = (world, tokens, 2, _CANDIDATES)
        return torch.randint(2**30, shape, dtype=torch.int32, generator=made, device=device)
    return torch.randn(
        world, tokens, heads // world, RANK, generator=made, device=device
    ).bfloat16()


def check(combine: Callable[..., Any], world: int, rank: int, device: torch.device) -> float:
    """Return the largest error, relative to the bound that the roundings of the shares and of their
    sum allow."""
    worst = 0.0

    def error(found: Tensor, outs: Tensor, lses: Tensor) -> float:
        live = torch.where(lses.isfinite(), lses.double(), -torch.inf)
        weights = live.softmax(0)[..., None]
        exact = torch.where(weights > 0, outs.double() * weights, 0).sum(0)
        own = exact.chunk(world, 1)[rank]
        bound = 2 * world * torch.finfo(outs.dtype).eps * outs.nan_to_num().abs().amax().double()
        return float(((found.double() - own).abs() / bound).nan_to_num(torch.inf).amax())

    sets = [partials(seed, world, 32, 8 * world, device) for seed in range(2)]
    for outs, lses in sets:
        worst = max(worst, error(combine(outs[rank], lses[rank]).out, outs, lses))
    if device.type == "cuda":
        out, lse = (each[rank].clone() for each in sets[0])
        capture = Capture([lambda: combine(out, lse)])
        for outs, lses in (sets[1], sets[0]):
            out.copy_(outs[rank])
            lse.copy_(lses[rank])
            capture.graph.replay()
            worst = max(worst, error(capture.outputs[0].out, outs, lses))
    return worst


def time_us(calls: Sequence[Callable[[], Any]], device: torch.device, replays: int) -> float:
    """Time a call. Every rank takes the same number of replays per sample, because ranks wait for
    each other."""
    if device.type != "cuda":
        return float(wall_us(calls[0], device, budget_s=0).median)
    return replays_us(Capture(calls).graph, replays) / len(calls)


def replays_us(graph: Any, replays: int) -> float:
    """Time a replay. Every rank takes the same number of replays per sample."""
    samples = []
    for _ in range(_SAMPLES + 1):  # the first sample raises clocks, and is dropped
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # synchronises the ranks
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / replays)
    return float(statistics.median(samples[1:]))


class Ranks:
    """The measurements of a process; rank 0 writes the rows."""

    def __init__(
        self, rank: int, world: int, device: torch.device, smoke: bool, folder: str, output: Report
    ) -> None:
        self.rank, self.world, self.device, self.smoke = rank, world, device, smoke
        self.group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        variants = CUDA_VARIANTS if device.type == "cuda" else CPU_VARIANTS
        compiled = device.type == "cuda"  # tests compile it on a CPU
        self.eager = {
            via: functools.partial(ops.cp_combine, group=self.group, via=via) for via in variants
        }
        self.variants: dict[str, Callable[..., Any]] = {
            via: _compiled(call) if compiled else call for via, call in self.eager.items()
        }
        self.folder, self.output = folder, output

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def keep(self, row: Row, measure: Callable[[], float]) -> None:
        """Measure a row on all ranks; rank 0 prints and writes it, even if the measurement
        fails."""
        try:
            row.us = measure()
        except Exception as error:
            row.error = one_line(error)
        self.say(str(row))
        if self.rank == 0:
            self.output.add(row)

    def combine(self) -> None:
        """Check all variants, then time them."""
        for via in self.variants:
            found = {"eager": check(self.eager[via], self.world, self.rank, self.device)}
            if self.variants[via] is not self.eager[via]:
                found["compiled"] = check(self.variants[via], self.world, self.rank, self.device)
            self.say(f"{via}: errors over their bound {found}")
            if not max(found.values()) <= 1:
                raise BenchError(f"context_parallel: {via} differs from float64, {found}")
        for heads in _HEADS:
            for tokens in _TOKENS[:2] if self.smoke else _TOKENS:
                sets = [partials(s, self.world, tokens, heads, self.device) for s in range(4)]
                given = [(outs[self.rank].clone(), lses[self.rank].clone()) for outs, lses in sets]
                for via, call in self.variants.items():
                    calls = [
                        functools.partial(call, *given[number % 4]) for number in range(_CALLS)
                    ]
                    row = Row("combine", self.world, via, heads, tokens)
                    self.keep(row, functools.partial(time_us, calls, self.device, 8))

    def gather(self) -> None:
        """Check each gather, of the queries of all heads and of the indexer's candidates, then time
        it."""
        cuda = self.device.type == "cuda"
        tokens = _TOKENS[:2] if self.smoke else _TOKENS
        cases = [("queries", heads, count) for heads in _HEADS for count in tokens]
        cases += [("candidates", 0, count) for count in tokens]
        calls = {
            (what, via): functools.partial(gather, group=self.group, via=via)
            for what, gather in (
                ("queries", ops.cp_gather_heads),
                ("candidates", ops.cp_gather_rows),
            )
            for via in (GATHERS if cuda else GATHERS[:1])
        }
        compiled = {key: _compiled(call) if cuda else call for key, call in calls.items()}
        for what, heads, count in cases:
            sets = [gathered_parts(s, self.world, count, heads, self.device) for s in range(4)]
            given = [parts[self.rank].clone() for parts in sets]
            for (name, via), call in compiled.items():
                if name != what:
                    continue
                for each, parts in zip(given, sets, strict=True):
                    if not torch.equal(call(each), torch.cat(list(parts), int(heads > 0))):
                        raise BenchError(f"context_parallel: {via} differs from the parts of ranks")
                timed = [functools.partial(call, given[number % 4]) for number in range(_CALLS)]
                row = Row("gather", self.world, f"{what}, {via}", heads, count)
                self.keep(row, functools.partial(time_us, timed, self.device, 8))

    def layer(self) -> None:
        """Time V3's attention: on one GPU, with shared heads, and with shared heads and rows."""
        whole = MlaSpec.deepseek_v3()
        contexts, batches = (_CONTEXTS, _BATCHES) if not self.smoke else ((300,), (1, 3))
        if self.smoke:
            whole = replace(whole, num_heads=2 * self.world)
        blocks = max(contexts) * max(batches) // whole.block_size + max(batches)
        cache = MlaCache.allocate(whole, blocks, self.device)
        cache.kv.normal_(generator=torch.Generator(self.device).manual_seed(self.rank))
        for context in contexts:
            for batch in batches:
                for variant, spec in self.specs(whole):
                    row = Row("layer", self.world, variant, whole.num_heads, batch, context)
                    self.keep(row, functools.partial(self.attend, spec, cache, batch, context))

    def specs(self, whole: MlaSpec) -> Iterator[tuple[str, MlaSpec]]:
        """Yield the variants of the layer."""
        own = replace(whole, num_heads=whole.num_heads // self.world)
        yield ONE_GPU, whole
        yield TENSOR, own
        for via in self.variants:
            settings = {"interleave": _INTERLEAVE, "via": via, "shards_heads": True}
            yield f"{CONTEXT}, {via}", replace(own, parallel=ContextParallel.of(**settings))

    def attend(self, spec: MlaSpec, cache: MlaCache, batch: int, context: int) -> float:
        """Time the absorbed queries, the attention, its combine and the values."""
        made = torch.Generator(self.device).manual_seed(1)
        columns = -(-context // spec.block_tokens)
        order = torch.randperm(batch * columns, generator=made, device=self.device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        lens = torch.full((batch,), context, dtype=torch.int32, device=self.device)
        rank = None if spec.ranks is None else spec.ranks.rank(self.device)
        table = order.int().view(batch, columns)
        step = build_mla_step(spec, starts, lens, table, cp_rank=rank, num_tokens=batch)

        def some(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=made, device=self.device)
            return values.to(spec.dtype)

        heads = spec.num_heads
        q = [some(batch, heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim) for _ in range(2)]
        w_uk_t = some(heads, spec.qk_nope_head_dim, spec.kv_lora_rank) / 20
        w_uv = some(heads, spec.kv_lora_rank, spec.v_head_dim) / 20
        weights = MlaWeights(torch.empty(0, device=self.device), w_uk_t, w_uv)
        call = functools.partial(attend_absorbed, spec, weights=weights, cache=cache, step=step)
        via = None if spec.ranks is None else self.variants[spec.ranks.via]
        with _combining(via):
            calls = [functools.partial(call, q=q[number % 2]) for number in range(4)]
            return time_us(calls, self.device, 1)

    def v4_layer(self) -> None:
        """Time compiled decode layers of DeepSeek-V4-Flash, in the variants of ``layer``."""
        contexts, batches = (_CONTEXTS, _BATCHES) if not self.smoke else ((700,), (2,))
        whole = LayerSpec.deepseek_v4_flash()
        own = replace(whole, num_groups=whole.num_groups // self.world)
        via = list(self.variants)[-1]  # the fastest
        shared = replace(own, parallel=ContextParallel.of(via=via, shards_heads=True))
        variants = {ONE_GPU: whole, TENSOR: own, f"{CONTEXT}, {via}": shared}
        for kind in ("c4", "c128"):
            for variant, spec in variants.items():
                call: Any = functools.partial(attention_layer, spec, kind, state_rings=False)
                if self.device.type == "cuda":
                    call = torch.compile(call, fullgraph=True, dynamic=True)
                for context, batch in itertools.product(contexts, batches):
                    row = Row(
                        "v4_layer", self.world, f"{kind}, {variant}", _V4_HEADS, batch, context
                    )
                    measured = functools.partial(self.attend_v4, call, spec, kind, batch, context)
                    self.keep(row, measured)

    def attend_v4(
        self, call: Callable[..., Any], spec: LayerSpec, kind: str, batch: int, context: int
    ) -> float:
        """Time a decode step in which every request completes a C128 row."""
        made = torch.Generator(self.device).manual_seed(1)
        ranks, attention = spec.ranks, spec.attention
        share = 1 if ranks is None else self.world
        heads = _V4_HEADS * spec.num_groups // LayerSpec.deepseek_v4_flash().num_groups
        context = -(-context // spec.ratio("c128")) * spec.ratio("c128")

        def table(positions: int, kept: int = context) -> Tensor:
            """Make a table that repeats as many blocks per request as the last ``kept`` positions
            need."""
            columns, ring = -(-context // positions), min(kept, context) // positions + 1
            column = torch.arange(columns, dtype=torch.int32, device=self.device)
            return torch.stack([request * ring + column % ring for request in range(batch)])

        def some(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made, device=self.device)

        rows = table(attention.block_tokens * share)
        swa = table(attention.swa_block_size, attention.window_size)
        states = {each: table(spec.state_block_size(each), 256) for each in ("c4", "c128")}
        last = torch.full((batch,), context - 1, device=self.device)
        size = attention.swa_block_size
        step = build_attention_step(
            spec,
            torch.arange(batch + 1, dtype=torch.int32, device=self.device),
            (last + 1).int(),
            swa[:, -1] * size + last % size,
            BlockTables(swa=swa, c4=rows, c128=rows),
            StateTables(**states),
            cp_rank=None if ranks is None else ranks.rank(self.device),
        )
        caches = LayerCaches.allocate(
            spec,
            kind,
            swa_blocks=int(swa.amax()) + 1,
            compressed_blocks=int(rows.amax()) + 1,
            state_blocks=int(states[kind].amax()) + 1,
            device=self.device,
        )
        for cache in (caches.swa, caches.compressed, caches.indexer):
            if cache is not None:
                cache.random_(0x20, 0x40, generator=made)  # codes of small numbers in each format
        width = spec.compressor_width(kind, spec.head_dim)
        given: dict[str, Tensor] = {
            "q": some(batch, heads, spec.head_dim).bfloat16(),
            "kv": some(batch, spec.head_dim).bfloat16(),
            "kv_score": some(batch, 2 * width),
        }
        held = {"ape": some(spec.ratio(kind), width), "norm_weight": some(spec.head_dim)}
        if kind == "c4":
            dim = IndexerLayout.head_dim
            width = spec.compressor_width(kind, dim)
            given["indexer_q"] = some(batch, 64, dim).bfloat16()
            given["indexer_weights"] = some(batch, 64)
            given["indexer_kv_score"] = some(batch, 2 * width)
            held |= {"indexer_ape": some(4, width), "indexer_norm_weight": some(dim)}
        weights = LayerWeights(some(context, spec.rope_dim), some(heads), **held)
        one = functools.partial(call, LayerInputs(**given), weights, caches, step)
        return time_us([one] * 4, self.device, 1)

    def v4_model(self) -> None:
        """DeepSeek-V4-Flash."""
        cpu = self.device.type == "cpu"
        self.model(
            "v4_model",
            functools.partial(small_model, compress_rates=_SMALL_RATES) if cpu else flash,
        )

    def v3_model(self) -> None:
        """DeepSeek-V3."""
        self.model("v3_model", small_mla_model if self.device.type == "cpu" else v3_shaped)

    def model(self, group: str, make: Callable[..., Any]) -> None:
        """Time decode steps of a patched model, whole on every GPU and split over all GPUs. Hugging
        Face's plans split heads and experts; the ranks share the rows of the caches."""
        folder = Path(self.folder, group)
        if self.rank == 0:
            make(device=self.device).save_pretrained(folder)
        dist.barrier()
        try:
            logits = {}
            for variant in (ONE_GPU, SPLIT):
                model = self.loaded(group, folder, split=variant == SPLIT)
                logits[variant] = self.steps(group, variant, model)
                del model
                torch._dynamo.reset()
            one, other = logits[ONE_GPU], logits[SPLIT]
            error = float((one - other).norm() / one.norm())
            same = float((one.argmax(-1) == other.argmax(-1)).double().mean())
            self.say(
                f"{group}: split logits differ by {error:.1e} of their norm, "
                f"{same:.0%} of {len(one)} tokens are equal"
            )
            if not error < _MOST_ERROR:
                raise BenchError(f"context_parallel: {group}'s logits differ by {error:.2e}")
        finally:
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(folder)

    def loaded(self, group: str, folder: Path, *, split: bool) -> Any:
        """Load the model with Hugging Face, whole or this rank's part, and patch it."""
        import transformers
        from transformers.distributed import DistributedConfig

        from dsv4_ops.integrations import transformers as hf

        family = group.partition("_")[0]
        kind = getattr(transformers, f"Deepseek{family.upper()}ForCausalLM")
        settings: dict[str, Any] = {}
        if split:
            os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank))
            os.environ["WORLD_SIZE"] = str(self.world)
            config = DistributedConfig(
                tp_size=self.world, tp_plan=head_plan(family), ep_size=self.world
            )
            settings["distributed_config"] = config
        model = kind.from_pretrained(folder, dtype=torch.bfloat16, **settings).eval()
        model = model.to(self.device).requires_grad_(False)
        via, interleave = list(self.variants)[-1], 1 if family == "v4" else _INTERLEAVE
        parallel = ContextParallel.of(via=via, interleave=interleave) if split else None
        return hf.patch(model, kv="bf16" if family == "v3" else "fp8", parallel=parallel)

    def steps(self, group: str, variant: str, model: Any) -> Tensor:
        """Return logits of a few steps from empty caches, and time steps from full ones."""
        from dsv4_ops.integrations import transformers as hf

        cuda = self.device.type == "cuda"
        contexts, batches = (_MODEL_CONTEXTS, (8,)) if not self.smoke else ((64,), (2,))
        step = (
            torch.compile(hf.decode_step, fullgraph=True, dynamic=False) if cuda else hf.decode_step
        )
        found = None
        for batch in batches:
            cache = hf.PagedCache.for_model(
                model, max_batch_size=batch, max_cache_len=max(contexts) + 128
            )
            rows = torch.arange(batch, dtype=torch.int32, device=self.device)
            starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
            made = hf.StepBatch(rows.long(), starts, torch.zeros_like(rows), rows)
            ids = torch.randint(
                0, 128, (_MODEL_STEPS, batch), generator=torch.Generator().manual_seed(1)
            )
            logits = []
            for number, tokens in enumerate(ids.to(self.device)):
                made.tokens.copy_(tokens)
                made.seq_lens.fill_(number + 1)
                logits.append(step(model, made, cache.tensors).float())
            found = torch.cat(logits) if found is None else found
            self.say(f"{group}, {variant}: {_MODEL_STEPS} steps of {batch} requests from nothing")
            for each in tree_leaves(cache.tensors.layers):
                if each.dtype == torch.uint8:
                    each.random_(0x20, 0x40)
                elif each.is_floating_point():
                    each.normal_()
            held = sum(each.nbytes for each in tree_leaves(cache.tensors.layers))
            call = functools.partial(step, model, made, cache.tensors)
            for context in contexts:
                made.seq_lens.fill_(context + 1)
                cache.seq_lens.fill_(context)
                row = Row(
                    group, self.world, variant, model.config.num_attention_heads, batch, context
                )
                row.cache_gb = held / 1e9
                if cuda:
                    row.kernels = len(device_activities(call)) / len(model.model.layers)
                self.keep(row, functools.partial(time_us, [call], self.device, 8))
        return cast(Tensor, found)


def flash(device: torch.device) -> Any:
    """Build 4 layers and 16 experts of DeepSeek-V4-Flash's sizes."""
    return keep_float32(flash_shaped(num_experts=16, device=device))


def _compiled(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a collective as in a model's graph: heads are constants, tokens any number above
    1."""
    call = torch.compile(collective, fullgraph=True)

    def run(*given: Tensor) -> Any:
        if len(given[0]) > 1:
            for each in given:
                torch._dynamo.mark_dynamic(each, 0)
        return call(*given)

    return run


@contextlib.contextmanager
def _combining(combine: Callable[..., Any] | None) -> Iterator[None]:
    """Let the layer call the compiled combine, as a graph does. The other stages are kernels
    anyway."""
    layer = importlib.import_module("dsv4_ops.attention.mla_layer")
    before = layer.cp_combine
    if combine is not None:
        vars(layer)["cp_combine"] = lambda out, lse, group, via: combine(out, lse)
    try:
        yield
    finally:
        vars(layer)["cp_combine"] = before


def _process(rank: int, world: int, kind: str, groups: Sequence[str], *settings: Any) -> None:
    smoke, folder, output = settings
    if kind == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    torch._dynamo.config.recompile_limit = 64  # calls of all variants share a frame
    with torch.no_grad():
        ranks = Ranks(rank, world, device, smoke, folder, output)
        for group in groups:
            getattr(ranks, group)()
    dist.barrier()
    os._exit(0)  # a captured collective may outlive its group


def run(options: argparse.Namespace) -> None:
    """Time the cases of the command line; rows and table go to ``options.out``."""
    device = chosen_device(options)
    on_cpu = device.type == "cpu"
    world = options.ranks or (2 if on_cpu else torch.cuda.device_count())
    if world < 2 or (not on_cpu and world > torch.cuda.device_count()):
        raise BenchError(f"context_parallel: it takes 2 ranks or more with a GPU each, got {world}")
    groups = options.cases or CASES
    output = Report(options, device)
    output.stamp["device"] = f"{world} x {output.stamp['device']}"
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # holds the weights of models
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        settings = (groups, options.smoke or on_cpu, folder, output)
        start: Any = importlib.import_module("torch.multiprocessing").spawn
        start(_process, (world, device.type, *settings), nprocs=world)
    output.read()
    output.finish("Ranks that share a cache, microseconds of all ranks")
    failed = [row["error"] for row in output.rows if row["error"]]
    if failed:
        raise BenchError(f"{len(failed)} cases failed, {failed[0]}")

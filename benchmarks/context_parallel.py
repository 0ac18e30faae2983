"""Benchmark context parallelism: variants of the collectives, and the layers' attention on N GPUs.

The benchmark starts a process per GPU (two gloo processes on a CPU, for small cases only). First,
it compares each variant of the combine with float64: eager, compiled, and captured in a CUDA graph
that is replayed with other inputs. Gathers must give equal bytes. Then it times all variants.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

import dsv4_ops as ops
from benchmarks.baselines.stock_model import flash_shaped
from benchmarks.cases.layer_cases import LayerDraw, Model
from benchmarks.harness.draw import Draw
from benchmarks.harness.options import chosen_device, size
from benchmarks.harness.ranks import Ranks, replays_us, run_ranks
from benchmarks.harness.steps import fill, step_batch
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
    attention_layer,
    build_mla_step,
)
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
"""``_MOST_ERROR`` limits the logits' error: at near ties, rounding may select other experts."""
_SMALL_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
_CALLS = 16
"""Calls per graph: enough that the graph's launch does not matter."""
_V4_HEADS = 64
_CANDIDATES = 512
"""Candidates per token that a rank's indexer selects in V4."""
_INTERLEAVE = 64
"""Number of consecutive positions on one rank: a block."""


@dataclass
class Row:
    """Device time in microseconds; it is equal on all ranks, which wait for each other.

    ``group`` is one of ``CASES``. "layer" is the attention of a V3 layer between its projections;
    "v4_layer" is the attention of a C4 or C128 layer of V4. Models have 4 layers and 16 experts.
    """

    group: str
    ranks: int  # processes, with a GPU each
    variant: str  # the collective and its data, or the kind of layer and what ranks share
    heads: int  # heads of all ranks; 0 for candidates, which have none
    tokens: int  # one per request
    context: int = 0  # rows that a token sees; 0 for a combine or a gather
    us: float | None = None  # median of replays of a CUDA graph; on a CPU, wall time
    kernels: float | None = None  # kernels per layer in a model's step
    cache_gb: float | None = None  # caches of a model on a rank
    error: str | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=size, metavar="N", help="default: all GPUs; 2 on a CPU")


def partials(
    seed: int, world: int, tokens: int, heads: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sample bf16 outputs and log-sum-exps of all ranks; one rank has no keys for token 0."""
    draw = Draw(device, seed)
    outs = draw.normal(world, tokens, heads, RANK).bfloat16()
    lses = draw.normal(world, tokens, heads) * 3
    outs[0, 0], lses[0, 0] = torch.nan, torch.nan
    return outs, lses


def gathered_parts(seed: int, world: int, tokens: int, heads: int, device: torch.device) -> Tensor:
    """Sample queries of all ranks in bfloat16; with 0 heads, scores and rows of 512 candidates."""
    draw = Draw(device, seed)
    if heads == 0:
        return draw.uniform(world, tokens, 2, _CANDIDATES).mul_(2**30).int()
    return draw.normal(world, tokens, heads // world, RANK).bfloat16()


def check(combine: Callable[..., Any], world: int, rank: int, device: torch.device) -> float:
    """Return the largest error, relative to the bound that follows from the roundings."""
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
    """Return the microseconds of a call; all ranks make the same number of replays per sample."""
    if device.type != "cuda":
        return float(wall_us(calls[0], device, budget_s=0).median)
    return replays_us(Capture(calls).graph, replays) / len(calls)


class CollectiveRanks(Ranks):
    """The measurements in one process."""

    title = "Ranks that share a cache, microseconds of all ranks"
    least = 2

    def run(self) -> None:
        torch._dynamo.config.recompile_limit = 64  # calls of all variants share a frame
        self.is_small = self.options.smoke or not self.cuda
        self.group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        variants = CUDA_VARIANTS if self.cuda else CPU_VARIANTS
        self.eager = {
            via: functools.partial(ops.cp_combine, group=self.group, via=via) for via in variants
        }
        self.variants = {via: self.compiled(call) for via, call in self.eager.items()}
        for group in self.options.cases or CASES:
            getattr(self, group)()

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a collective for a GPU. (Tests compile collectives on a CPU.)"""
        return _compiled(call) if self.cuda else call

    def time(self, row: Row, calls: Sequence[Callable[[], Any]], replays: int) -> None:
        """Time a call on all ranks."""
        with self.measured(row):
            row.us = time_us(calls, self.device, replays)

    def combine(self) -> None:
        """Check all variants, then time them."""
        for via in self.variants:
            found = {"eager": check(self.eager[via], self.world, self.rank, self.device)}
            if self.variants[via] is not self.eager[via]:
                found["compiled"] = check(self.variants[via], self.world, self.rank, self.device)
            self.say(f"{via}: errors over their bound {found}")
            if not max(found.values()) <= 1:
                raise BenchError(f"context_parallel: {via} differs from float64, {found}")
        for heads, tokens in itertools.product(_HEADS, _TOKENS[:2] if self.is_small else _TOKENS):
            sets = [partials(s, self.world, tokens, heads, self.device) for s in range(4)]
            given = [(outs[self.rank].clone(), lses[self.rank].clone()) for outs, lses in sets]
            for via, call in self.variants.items():
                calls = [functools.partial(call, *given[number % 4]) for number in range(_CALLS)]
                self.time(Row("combine", self.world, via, heads, tokens), calls, 8)

    def gather(self) -> None:
        """Check and time gathers of the queries of all heads and of the indexer's candidates."""
        tokens = _TOKENS[:2] if self.is_small else _TOKENS
        cases = [("queries", heads, count) for heads in _HEADS for count in tokens]
        cases += [("candidates", 0, count) for count in tokens]
        gathers = {"queries": ops.cp_gather_heads, "candidates": ops.cp_gather_rows}
        calls = {
            (what, via): self.compiled(functools.partial(gather, group=self.group, via=via))
            for what, gather in gathers.items()
            for via in (GATHERS if self.cuda else GATHERS[:1])
        }
        for what, heads, count in cases:
            sets = [gathered_parts(s, self.world, count, heads, self.device) for s in range(4)]
            given = [parts[self.rank].clone() for parts in sets]
            for (name, via), call in calls.items():
                if name != what:
                    continue
                for each, parts in zip(given, sets, strict=True):
                    if not torch.equal(call(each), torch.cat(list(parts), int(heads > 0))):
                        raise BenchError(f"context_parallel: {via} differs from the parts of ranks")
                timed = [functools.partial(call, given[number % 4]) for number in range(_CALLS)]
                self.time(Row("gather", self.world, f"{what}, {via}", heads, count), timed, 8)

    def layer(self) -> None:
        """Time V3's attention on one GPU, with heads split, or with heads split and rows shared."""
        whole = MlaSpec.deepseek_v3()
        contexts, batches = (_CONTEXTS, _BATCHES) if not self.is_small else ((300,), (1, 3))
        if self.is_small:
            whole = replace(whole, num_heads=2 * self.world)
        blocks = max(contexts) * max(batches) // whole.block_size + max(batches)
        cache = MlaCache.allocate(whole, blocks, self.device)
        cache.kv.normal_(generator=torch.Generator(self.device).manual_seed(self.rank))
        for context, batch in itertools.product(contexts, batches):
            for variant, spec in self.specs(whole):
                row = Row("layer", self.world, variant, whole.num_heads, batch, context)
                with self.measured(row):
                    row.us = self.attend(spec, cache, batch, context)

    def specs(self, whole: MlaSpec) -> Iterator[tuple[str, MlaSpec]]:
        """Yield the variants of the layer."""
        own = replace(whole, num_heads=whole.num_heads // self.world)
        yield ONE_GPU, whole
        yield TENSOR, own
        for via in self.variants:
            settings = {"interleave": _INTERLEAVE, "via": via, "shards_heads": True}
            yield f"{CONTEXT}, {via}", replace(own, parallel=ContextParallel.of(**settings))

    def attend(self, spec: MlaSpec, cache: MlaCache, batch: int, context: int) -> float:
        """Time the absorption of queries, attention, combine, and the up-projection of values."""
        draw, columns = Draw(self.device, 1), -(-context // spec.block_tokens)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        lens = torch.full((batch,), context, dtype=torch.int32, device=self.device)
        rank = None if spec.ranks is None else spec.ranks.rank(self.device)
        table = draw.order(batch * columns).view(batch, columns)
        step = build_mla_step(spec, starts, lens, table, cp_rank=rank, num_tokens=batch)

        def some(*shape: int) -> Tensor:
            return draw.normal(*shape).to(spec.dtype)

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
        contexts, batches = (_CONTEXTS, _BATCHES) if not self.is_small else ((700,), (2,))
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
                    name = f"{kind}, {variant}"
                    row = Row("v4_layer", self.world, name, _V4_HEADS, batch, context)
                    with self.measured(row):
                        row.us = self.attend_v4(call, spec, kind, batch, context)

    def attend_v4(
        self, call: Callable[..., Any], spec: LayerSpec, kind: str, batch: int, context: int
    ) -> float:
        """Time a decode step in which every request completes a C128 row."""
        heads = _V4_HEADS * spec.num_groups // LayerSpec.deepseek_v4_flash().num_groups
        context = -(-context // spec.ratio("c128")) * spec.ratio("c128")
        draw = LayerDraw(kind, Model("Flash", heads, spec), batch, context, self.device)
        step = draw.step()
        group = step.c4 if kind == "c4" else step.c128
        caches = LayerCaches.allocate(
            spec, kind, device=self.device,
            swa_blocks=int(step.swa_indices.amax()) // spec.attention.swa_block_size + 1,
            compressed_blocks=int(group.block_table.amax()) + 1,
            state_blocks=int(group.state_block_table.amax()) + 1,
        )  # fmt: skip
        for cache in (caches.swa, caches.compressed, caches.indexer):
            if cache is not None:
                cache.random_(0x20, 0x40)  # codes of small numbers in each format
        weights = LayerWeights(*draw.weights())
        inputs = LayerInputs(*draw.inputs(draw.normal(batch, IndexerLayout.head_dim)))
        one = functools.partial(call, inputs, weights, caches, step)
        return time_us([one] * 4, self.device, 1)

    def v4_model(self) -> None:
        small = functools.partial(small_model, compress_rates=_SMALL_RATES)
        self.model("v4_model", flash if self.cuda else small)

    def v3_model(self) -> None:
        self.model("v3_model", v3_shaped if self.cuda else small_mla_model)

    def model(self, group: str, make: Callable[..., Any]) -> None:
        """Time decode steps of a patched model, whole on every GPU or split over all GPUs. Hugging
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
        """Load the model, or this rank's part of it, with Hugging Face, and patch it."""
        import transformers
        from transformers.distributed import DistributedConfig

        from dsv4_ops.integrations import transformers as hf

        family = group.partition("_")[0]
        kind = getattr(transformers, f"Deepseek{family.upper()}ForCausalLM")
        settings: dict[str, Any] = {}
        if split:
            sizes = {"tp_size": self.world, "ep_size": self.world}
            settings["distributed_config"] = DistributedConfig(tp_plan=head_plan(family), **sizes)
        model = kind.from_pretrained(folder, dtype=torch.bfloat16, **settings).eval()
        model = model.to(self.device).requires_grad_(False)
        via, interleave = list(self.variants)[-1], 1 if family == "v4" else _INTERLEAVE
        parallel = ContextParallel.of(via=via, interleave=interleave) if split else None
        return hf.patch(model, kv="bf16" if family == "v3" else "fp8", parallel=parallel)

    def steps(self, group: str, variant: str, model: Any) -> Tensor:
        """Return the logits of a few steps from empty caches; time steps from full caches."""
        from dsv4_ops.integrations import transformers as hf

        contexts, batch = ((64,), 2) if self.is_small else (_MODEL_CONTEXTS, 8)
        step: Callable[..., Any] = hf.decode_step
        if self.cuda:
            step = torch.compile(step, fullgraph=True, dynamic=False)
        cache = hf.PagedCache.for_model(
            model, max_batch_size=batch, max_cache_len=max(contexts) + 128
        )
        made = step_batch([1] * batch, [0] * batch, self.device)
        shape, generator = (_MODEL_STEPS, batch), torch.Generator().manual_seed(1)
        logits = []
        for number, tokens in enumerate(torch.randint(0, 128, shape, generator=generator)):
            made.tokens.copy_(tokens)
            made.seq_lens.fill_(number + 1)
            logits.append(step(model, made, cache.tensors).float())
        self.say(f"{group}, {variant}: {_MODEL_STEPS} steps of {batch} requests from nothing")
        fill(cache)
        held = sum(each.nbytes for each in tree_leaves(cache.tensors.layers))
        call = functools.partial(step, model, made, cache.tensors)
        for context in contexts:
            made.seq_lens.fill_(context + 1)
            cache.seq_lens.fill_(context)
            heads = model.config.num_attention_heads
            row = Row(group, self.world, variant, heads, batch, context, cache_gb=held / 1e9)
            if self.cuda:
                row.kernels = len(device_activities(call)) / len(model.model.layers)
            self.time(row, [call], 8)
        return torch.cat(logits)


def flash(device: torch.device) -> Any:
    """Build a model of 4 layers and 16 experts with DeepSeek-V4-Flash's sizes."""
    return keep_float32(flash_shaped(num_experts=16, device=device))


def _compiled(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a collective as in a model: heads are constant, tokens are any number above 1."""
    call = torch.compile(collective, fullgraph=True)

    def run(*given: Tensor) -> Any:
        if len(given[0]) > 1:
            for each in given:
                torch._dynamo.mark_dynamic(each, 0)
        return call(*given)

    return run


def _combining(combine: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """Let the layer call the compiled combine, as it does in a graph."""
    if combine is None:
        return contextlib.nullcontext()
    layer = importlib.import_module("dsv4_ops.attention.mla_layer")
    return mock.patch.object(layer, "cp_combine", lambda out, lse, group, via: combine(out, lse))


def run(options: argparse.Namespace) -> None:
    run_ranks(CollectiveRanks, options, chosen_device(options), options.ranks)

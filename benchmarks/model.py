"""Benchmark decode steps of a whole model: Hugging Face's model and the patched model."""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.baselines.stock_model import filled_cache, flash_shaped, same_again
from benchmarks.harness import report
from benchmarks.harness.options import chosen_device, size, sizes
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.steps import SMALL, cuda_graphs, fill, step_batch
from benchmarks.harness.timing import device_activities, step_ms
from benchmarks.memory import config_of
from benchmarks.run import BenchError
from dsv4_ops.testing.released_model import keep_float32, released_model

_CONTEXTS = (4096, 32768, 131072)
_POINTS = dict.fromkeys((1, 8, 32, 128), _CONTEXTS)
_BYTES_PER_US = 4.3e6
_STEPS, _WARM = 30, 4
_STOCK_STEPS = 5


@dataclass(kw_only=True)
class ModelRow:
    """A step of a model. ``*_ms`` without a comment is the time from one call to the next."""

    batch: int
    context: int
    layers: int
    weights_gb: float
    stock_ms: float | None = None
    stock_busy_ms: float | None = None  # sum of all kernels' times, as busy_ms
    stock_kernels: int | None = None
    stock_error: str | None = None
    stock_compiled_ms: float | None = None
    eager_ms: float | None = None
    step_ms: float | None = None
    busy_ms: float | None = None  # sum of all kernels' times
    kernels: int | None = None
    kernels_per_layer: float | None = None
    metadata_us: float | None = None  # metadata of all layers, in a CUDA graph of its own
    metadata_pct: float | None = None
    roofline_ms: float | None = None  # time to read all weights but the embeddings
    compile_s: float | None = None
    max_diff: float | None = None
    error: str | None = None
    stages: dict[str, float] = field(default_factory=dict)  # microseconds of parts of a step
    activities: list[list[Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.batch} x {self.context} tokens"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batches", type=sizes, metavar="A,B,..", help="default: 1,8,32,128")
    add("--experts", type=size, default=16, help="default: %(default)s")
    add("--contexts", type=sizes, metavar="A,B,..", help="default: 4k, 32k, 128k")
    text = "also compile Hugging Face's step, one graph per point: most of a minute each"
    add("--stock-compiled", action="store_true", help=text)
    text = "released: FP8 linears and FP4 experts, without Hugging Face's step"
    add("--precision", choices=("bf16", "released"), default="bf16", help=text)
    add("--max-seconds", type=size, metavar="N", help="start no batch later")


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    from dsv4_ops.integrations import transformers as v4

    device, released = chosen_device(options), options.precision == "released"
    if released:
        options.bench = "model_released"
    output = Report(options, device)
    cpu = device.type == "cpu"
    changed: dict[str, Any] = SMALL if cpu else {}
    if released:
        model = released_model(config_of(options.experts, **changed), device=device)
    else:
        model = flash_shaped(num_experts=options.experts, device=device, **changed)
    points = {2: (512,)} if cpu else _POINTS
    chosen = options.batches or tuple(points)
    rows = [
        _row(model, batch, context)
        for batch in chosen
        for context in options.contexts or points.get(batch, _CONTEXTS)
    ]
    for row in report.progress([] if released else rows, "Hugging Face's own"):
        _measure_stock(row, model, compiled=options.stock_compiled)
    v4.patch(keep_float32(model))
    start = time.perf_counter()
    for batch in report.progress(chosen, "patched, requests"):
        of_batch = [row for row in rows if row.batch == batch]
        try:
            if options.max_seconds and time.perf_counter() - start > options.max_seconds:
                raise BenchError("not started: --max-seconds")
            _measure_patched(of_batch, model)
        except Exception as error:  # the row gets the failure, and the run continues
            for row in of_batch:
                row.error = one_line(error)
        for row in of_batch:
            output.add(row)
    output.finish("A decode step of a model with 4 layers of DeepSeek-V4-Flash's sizes", _NOTES)


def _row(model: Any, batch: int, context: int) -> ModelRow:
    weights = sum(weight.nbytes for weight in model.parameters())
    embeddings = model.get_input_embeddings().weight.nbytes
    return ModelRow(
        batch=batch, context=context, layers=len(model.model.layers), weights_gb=weights / 1e9,
        roofline_ms=(weights - embeddings) / _BYTES_PER_US / 1e3,
    )  # fmt: skip


def _measure_stock(row: ModelRow, model: Any, *, compiled: bool = False) -> None:
    """Time decode steps over a full cache.

    Eager steps extend the cache, as in generation. The compiled step repeats from the same cache:
    with a growing cache, it would compile ten graphs or more.
    """
    try:
        cache = filled_cache(model, batch=row.batch, context=row.context)
        ids = torch.arange(row.batch, device=model.device)[:, None]

        def step() -> Any:  # positional, because the name of the cache's argument varies
            return model(ids, None, None, cache, use_cache=True).logits

        row.stock_ms = step_ms(step, model.device, _STOCK_STEPS)
        if model.device.type == "cuda":
            activities = device_activities(step)
            row.stock_kernels = len(activities)
            row.stock_busy_ms = sum(activity.us for activity in activities) / 1e3
        if compiled:
            torch._dynamo.reset()
            whole: Callable[..., Any] = torch.compile(model, dynamic=False)

            def compiled_step() -> Any:
                return whole(ids, None, None, same_again(cache), use_cache=True).logits

            row.stock_compiled_ms = step_ms(compiled_step, model.device, _STOCK_STEPS)
    except RuntimeError as error:  # out of memory: the message's end is about other processes
        row.stock_error = one_line(error).partition(" GPU ")[0]
    finally:
        cache = None
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_patched(rows: Sequence[ModelRow], model: Any) -> None:
    """Time steps of one batch size; all contexts share a cache and a compiled step."""
    from dsv4_ops.integrations import transformers as v4

    batch, longest = rows[0].batch, max(row.context for row in rows)
    cuda = model.device.type == "cuda"
    cache = v4.PagedCache.for_model(
        model, max_batch_size=batch, max_cache_len=longest + 256, max_chunk=256
    )
    fill(cache)
    torch._dynamo.reset()
    options = cuda_graphs(model.device)
    compiled, metadata = (
        torch.compile(each, fullgraph=True, dynamic=False, options=options)
        for each in (v4.decode_step, _metadata)
    )
    for row in rows:
        step = step_batch([1] * batch, [row.context + 1] * batch, model.device)
        cache.seq_lens.fill_(row.context)
        eager, call = (
            functools.partial(run, model, step, cache.tensors, state_rings=False)
            for run in (v4.decode_step, compiled)
        )
        row.eager_ms, expected = step_ms(eager, model.device, 3), eager()
        start = time.perf_counter()
        for _ in range(_WARM):
            out = call()
            metadata(model, step, cache.tensors)
        row.compile_s = time.perf_counter() - start
        row.max_diff = float((out - expected).abs().max())
        if cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
        row.step_ms = step_ms(call, model.device, _STEPS)
        shared = functools.partial(metadata, model, step, cache.tensors)
        row.metadata_us = 1e3 * step_ms(shared, model.device, _STEPS)
        if cuda:
            _profile_kernels(row, call)
            row.metadata_us = sum(activity.us for activity in device_activities(shared))
        row.metadata_pct = 100 * row.metadata_us / 1e3 / row.step_ms


def _metadata(model: Any, batch: Any, cache: Any) -> Any:
    """Compute the metadata that all layers share, as the compiled step does."""
    from dsv4_ops.integrations.transformers.steps.step import build_step

    return build_step(model.dsv4_ops_spec, batch, cache, "decode", model.config.vocab_size)


def _profile_kernels(row: ModelRow, call: Callable[[], Any]) -> None:
    activities = device_activities(call)
    row.kernels, row.busy_ms = len(activities), sum(a.us for a in activities) / 1e3
    row.kernels_per_layer = row.kernels / row.layers
    spent: dict[str, float] = defaultdict(float)
    for activity in activities:
        spent[stage_of(activity.name)] += activity.us
    row.stages = dict(sorted(spent.items(), key=lambda item: -item[1]))
    row.activities = [list(activity) for activity in activities]


_STAGES = {
    "experts": (
        "cutlass13device_kernel", "grouped_gemm", "grouped_mm", "gate_up_", "down_kernel",
        "down_by_blocks_kernel", "expert_plan_kernel", "quantize_ordered_kernel", "order_scales_",
        "expert_counts_kernel", "round_rows_kernel", "combine_experts",
    ),
    "attention": ("split_keys", "combine_splits", "combine_listed", "prefill_keys"),
    "indexer": ("select_ke", "score_keys", "keep_keys", "indexer", "merge_groups", "merge_parts",
                "quantize_query"),
    "compressor": ("compress_and_insert", "compressor_states", "pool_windows", "insert_pooled"),
    "insert": ("qnorm_rope", "insert"),
    "projections": ("nvjet", "cublas", "gemm", "gemv", "splitKreduce", "bmm", "cutlass",
                    "fp8_linear", "reorder_kernel"),
}  # fmt: skip


def stage_of(name: str) -> str:
    """Return the part of a step that a kernel belongs to, by its name."""
    found = (stage for stage, parts in _STAGES.items() if any(part in name for part in parts))
    return next(found, "norms, routers, streams, metadata")


_NOTES = (
    "stock_ms: Hugging Face's eager model on a DynamicCache of that many tokens. "
    "stock_compiled_ms: compiled, again and again from one state of its cache. "
    "eager_ms: patched, not compiled. "
    "step_ms: patched, compiled, one CUDA graph, metadata included, no host sync.\n"
    "Caches hold random keys; one compiled step serves all contexts of a batch. max_diff: compiled "
    "and eager logits; near ties of routers and selections fall differently. The rows have stages "
    "and activities: microseconds of a step by its parts, and by kernel."
)

"""Benchmark decode steps of a whole model: of Hugging Face's model, and of the patched one."""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.baselines.stock_model import filled_cache, flash_shaped, same_again
from benchmarks.harness import report
from benchmarks.harness.options import chosen_device, size, sizes
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.rows import ModelRow
from benchmarks.harness.timing import device_activities, step_ms
from benchmarks.memory import SMALL, config_of
from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.testing.released_model import keep_float32, released_model

_CONTEXTS = (4096, 32768, 131072)
_POINTS = dict.fromkeys((1, 8, 32, 128), _CONTEXTS)
_BYTES_PER_US = 4.3e6
_STEPS, _WARM = 30, 4
_STOCK_STEPS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    parser.add_argument("--batches", type=sizes, metavar="A,B,..", help="default: 1,8,32,128")
    parser.add_argument("--experts", type=size, default=16, help="default: %(default)s")
    parser.add_argument("--contexts", type=sizes, metavar="A,B,..", help="default: 4k, 32k, 128k")
    parser.add_argument(
        "--stock-compiled",
        action="store_true",
        help="also compile Hugging Face's step, one graph per point: most of a minute each",
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "released"),
        default="bf16",
        help="released: FP8 linears and FP4 experts, without Hugging Face's step",
    )
    parser.add_argument("--max-seconds", type=size, metavar="N", help="start no batch later")


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Time every point; rows and the table go to ``options.out``."""
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
        if options.max_seconds and time.perf_counter() - start > options.max_seconds:
            for row in of_batch:
                row.error = "not started: --max-seconds"
        else:
            try:
                _measure_patched(of_batch, model)
            except Exception as error:  # a failure becomes a row and does not end the run
                for row in of_batch:
                    row.error = row.error or one_line(error)
        for row in of_batch:
            output.add(row)
    output.finish("A decode step of a model with 4 layers of DeepSeek-V4-Flash's sizes", _NOTES)


def _row(model: Any, batch: int, context: int) -> ModelRow:
    weights = sum(weight.nbytes for weight in model.parameters())
    embeddings = model.get_input_embeddings().weight.nbytes
    return ModelRow(
        batch=batch,
        context=context,
        layers=len(model.model.layers),
        weights_gb=weights / 1e9,
        roofline_ms=(weights - embeddings) / _BYTES_PER_US / 1e3,
    )


def _measure_stock(row: ModelRow, model: Any, *, compiled: bool = False) -> None:
    """Time steps from a full cache.

    Eager steps extend the cache, as in use. Compiled, the same step is repeated from the same
    cache: in use, it would compile ten graphs or more.
    """
    try:
        cache = filled_cache(model, batch=row.batch, context=row.context)
        ids = torch.arange(row.batch, device=model.device)[:, None]

        def step() -> Any:  # positional: the cache's name depends on transformers
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
    # only the size of the request; the rest is about other processes
    except torch.OutOfMemoryError as error:
        row.stock_error = one_line(error).partition(" GPU ")[0]
    except RuntimeError as error:
        row.stock_error = one_line(error)
    finally:
        cache = None
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_patched(rows: Sequence[ModelRow], model: Any) -> None:
    """Time steps of a batch with one cache and one compiled step for all contexts."""
    from dsv4_ops.integrations import transformers as v4

    batch, longest = rows[0].batch, max(row.context for row in rows)
    cuda = model.device.type == "cuda"
    cache = v4.PagedCache.for_model(
        model, max_batch_size=batch, max_cache_len=longest + 256, max_chunk=256
    )
    fill(cache)
    torch._dynamo.reset()
    options: dict[str, Any] = {}
    if cuda:
        options = {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}
    compiled = torch.compile(v4.decode_step, fullgraph=True, dynamic=False, options=options)
    metadata = torch.compile(_metadata, fullgraph=True, dynamic=False, options=options)
    for row in rows:
        step = _batch(model, batch, row.context)
        cache.seq_lens.fill_(row.context)
        eager = v4.decode_step(model, step, cache.tensors, state_rings=False)
        eager_call = functools.partial(
            v4.decode_step, model, step, cache.tensors, state_rings=False
        )
        row.eager_ms = step_ms(eager_call, model.device, 3)
        start = time.perf_counter()
        for _ in range(_WARM):
            out = compiled(model, step, cache.tensors, state_rings=False)
            metadata(model, step, cache.tensors)
        row.compile_s = time.perf_counter() - start
        row.max_diff = float((out - eager).abs().max())
        if cuda:
            torch.cuda.set_sync_debug_mode("error")
        call = functools.partial(compiled, model, step, cache.tensors, state_rings=False)
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
    """Time the metadata that all layers share, as the compiled step computes it."""
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
        *("cutlass13device_kernel", "grouped_gemm", "grouped_mm"),
        *("gate_up_kernel", "down_kernel", "expert_plan_kernel", "quantize_ordered_kernel"),
        *("expert_counts_kernel", "round_rows_kernel", "order_scales_kernel"),
        *("gate_up_by_blocks_kernel", "down_by_blocks_kernel"),
    ),
    "attention": ("split_keys", "join_splits", "prefill_keys"),
    "indexer": ("select_keys", "indexer", "merge_groups", "merge_parts", "quantize_query"),
    "compressor": ("compress_and_insert", "compressor_states", "pool_windows", "insert_pooled"),
    "insert": ("qnorm_rope", "insert"),
    "projections": (
        *("nvjet", "cublas", "gemm", "gemv", "splitKreduce", "bmm", "cutlass", "fp8_linear"),
    ),
}


def stage_of(name: str) -> str:
    """Return the part of a step that a kernel belongs to, by its name."""
    found = (stage for stage, parts in _STAGES.items() if any(part in name for part in parts))
    return next(found, "norms, routers, streams, metadata")


def _batch(model: Any, batch: int, context: int) -> Any:
    """Make the next token of requests with ``context`` tokens."""
    from dsv4_ops.integrations import transformers as v4

    rows = torch.arange(batch, dtype=torch.int32, device=model.device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=model.device)
    return v4.StepBatch(rows.long(), starts, torch.full_like(rows, context + 1), rows)


def fill(cache: Any) -> None:
    """Fill every row of every block with random keys, and the states with random values."""
    from dsv4_ops import quantize_and_insert_indexer_k, quantize_and_insert_k_cache

    spec, attention = cache.spec.layers, cache.spec.layers.attention
    for kind, layer in zip(cache.spec.kinds, cache.tensors.layers, strict=True):
        size = {"swa": attention.swa_block_size}
        if kind != "window":
            size |= {"compressed": spec.block_size(kind), "indexer": spec.block_size(kind)}
        for name, rows in size.items():
            pages = getattr(layer, name)
            if pages is None:
                continue
            index = name == "indexer"
            insert = quantize_and_insert_indexer_k if index else quantize_and_insert_k_cache
            dim = IndexerLayout.head_dim if index else MainLayout.head_dim
            total = pages.shape[0] * rows
            some = min(total, 2**16)
            keys = torch.randn(some, dim, dtype=torch.bfloat16, device=cache.device)
            for first in range(0, total, some):
                slots = torch.arange(first, first + some, device=cache.device)
                insert(keys, pages, slots, block_size=rows)
        for states in (layer.states, layer.indexer_states):
            if states is not None:
                states.normal_()


_NOTES = (
    "stock_ms: Hugging Face's eager model on a DynamicCache of that many tokens. "
    "stock_compiled_ms: compiled, again and again from one state of its cache. "
    "eager_ms: patched, not compiled. "
    "step_ms: patched, compiled, one CUDA graph, metadata included, no host sync.\n"
    "Caches hold random keys; one compiled step serves all contexts of a batch. max_diff: compiled "
    "and eager logits; near ties of routers and selections fall differently. The rows have stages "
    "and activities: microseconds of a step by its parts, and by kernel."
)

"""Benchmark decode steps of DeepSeek-V3 and V3.2, ours and Hugging Face's; V3's prefill memory; and
prefills of requests without contexts."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.baselines.stock_model import in_bfloat16
from benchmarks.harness.options import chosen_device, sizes
from benchmarks.harness.report import Report
from benchmarks.harness.steps import cuda_graphs, fill, step_batch
from benchmarks.harness.timing import Call, Capture, step_ms
from dsv4_ops.attention import MlaCache, MlaInputs, MlaSpec, MlaWeights, build_mla_step, mla_layer
from dsv4_ops.ops.mla import split_kv_b_proj
from dsv4_ops.ops.mla_context import max_context_chunks

CASES = ("memory", "decode", "selected", "first")

_STEPS, _STOCK_STEPS = 30, 5
_FIRST_TOKENS = (128, 256, 512, 1024, 2048)
_CHUNK_ROWS, _NEW = 16384, 512
_NOTE = "first: prefills of two dense layers without contexts; context_ms is with "
_NOTE += "has_context=True, step_ms with False, and error how much their logits differ."
_CONTEXTS = (16384, 32768, 65536, 131072)
_SMALL = {"num_heads": 2, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_SMALL |= {"kv_lora_rank": 64}


@dataclass
class Row:
    """A step of the model, or the memory of a prefill."""

    case: str  # "decode" (V3), "selected" (V3.2), "memory" or "first"
    context: int  # tokens before the step
    batch: int = 1
    stock_ms: float | None = None  # compiled for V3, eager for V3.2; None if out of memory
    step_ms: float | None = None  # time of the patched model, with one CUDA graph for all contexts
    graphs: int | None = None  # graphs compiled for all contexts
    chunk_rows: int | None = None  # rows of the workspace for an expanded chunk
    peak_gib: float | None = None  # peak memory of one layer
    whole_gib: float | None = None  # peak memory with the context as one chunk
    model: str | None = None  # family and rows of the cache, for "first"
    tokens: int | None = None  # tokens of all requests of a prefill
    context_ms: float | None = None  # prefill that could read contexts; step_ms is without
    error: float | None = None  # norm of the logits' difference over their norm


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=sizes, default=(8,), metavar="A,B,..", help="default: 8")
    parser.add_argument("--contexts", type=sizes, metavar="A,B,..", help="default: 4k, 32k")


def v3_shaped(device: torch.device) -> Any:
    """Build a random model: 4 layers of V3's sizes with 16 experts; on a CPU, 2 small layers."""
    return _shaped("DeepseekV3", device)


def _shaped(family: str, device: torch.device, **changed: Any) -> Any:
    import transformers

    from dsv4_ops.testing.models import MLA_YARN, small_dsa_config, small_mla_config

    config: Any
    if device.type == "cpu":
        small = small_mla_config if family == "DeepseekV3" else small_dsa_config
        config = small(num_hidden_layers=2, attn_implementation="sdpa")
    else:
        given: dict[str, Any] = {"num_hidden_layers": 4, "first_k_dense_replace": 1, **changed}
        config = getattr(transformers, f"{family}Config")(
            n_routed_experts=16, rope_parameters=dict(MLA_YARN), max_position_embeddings=163840,
            attn_implementation="sdpa", **given,
        )  # fmt: skip
    model = in_bfloat16(getattr(transformers, f"{family}ForCausalLM"), config, device)
    rotary = model.model.rotary_emb  # bfloat16 here; ``from_pretrained`` makes it float32
    model.model.rotary_emb = type(rotary)(config).to(device)
    for name, weight in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        weight.data.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else weight.shape[-1] ** -0.5)
    return model


def _stock_step(model: Any, batch: int, context: int, compiles: bool) -> Call:
    """Make Hugging Face's step over a StaticCache; it attends to all rows of the cache."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    ids = torch.arange(batch, device=model.device)[:, None]
    # positional, because the argument's name depends on the release of transformers
    model(ids, None, None, cache, use_cache=True)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    step: Callable[..., Any] = torch.compile(model, dynamic=False) if compiles else model
    return lambda: step(ids, None, None, cache, use_cache=True).logits


def decode(
    case: str, device: torch.device, batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[Row]:
    """Time Hugging Face's steps, then ours; one graph of ours serves all contexts of a batch."""
    from dsv4_ops.integrations import transformers as hf

    selects = case == "selected"
    model = _shaped("DeepseekV32" if selects else "DeepseekV3", device)
    stock: dict[tuple[int, int], float] = {}
    for batch in batches:
        for context in contexts:
            torch._dynamo.reset()
            try:
                # no variable keeps the call alive, because its cache takes 86 GB at 8 x 32k
                stock[batch, context] = step_ms(
                    _stock_step(model, batch, context, not selects), device, _STOCK_STEPS
                )
            except torch.OutOfMemoryError:
                print(f"Hugging Face, {batch} x {context}: out of memory", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    hf.patch(model, kv="fp8" if selects and device.type == "cuda" else "bf16")
    for batch in batches:
        cache = hf.PagedCache.for_model(
            model, max_batch_size=batch, max_cache_len=max(contexts) + 64
        )
        fill(cache)
        step = step_batch([1] * batch, [0] * batch, device)
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(
            hf.decode_step, fullgraph=True, dynamic=False, options=cuda_graphs(device)
        )
        call = functools.partial(compiled, model, step, cache.tensors)
        for context in contexts:
            step.seq_lens.fill_(context)
            cache.seq_lens.fill_(context)
            for _ in range(3):
                call()
            ms, graphs = step_ms(call, device, _STEPS), counters["stats"]["unique_graphs"]
            old = stock.get((batch, context))
            yield Row(case, context, batch, stock_ms=old, step_ms=ms, graphs=graphs)


def prefill(device: torch.device, cached: int, rows: int) -> Call:
    """Make a call of a V3 layer: ``_NEW`` tokens over a context, in chunks of ``rows``."""
    chunks = max_context_chunks(num_reqs=1, max_model_len=cached, workspace_rows=rows)
    settings: dict[str, Any] = {"workspace_rows": rows, "max_chunks": chunks}
    settings |= _SMALL if device.type == "cpu" else {}
    spec = MlaSpec.deepseek_v3(context="chunked", **settings)
    made = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    width = spec.qk_nope_head_dim + spec.v_head_dim
    w_kv_b = made(spec.num_heads * width, spec.kv_lora_rank) * spec.kv_lora_rank**-0.5
    sizes_of = ("num_heads", "qk_nope_head_dim", "v_head_dim")
    split = split_kv_b_proj(w_kv_b, **{name: getattr(spec, name) for name in sizes_of})
    angles = torch.rand(cached + _NEW, spec.qk_rope_head_dim, device=device)
    columns = -(-(cached + _NEW) // spec.block_size)
    cache = MlaCache.allocate(spec, columns, device=device)
    cache.kv.normal_()
    q = made(_NEW, spec.num_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    inputs = MlaInputs(q, made(_NEW, spec.kv_lora_rank), made(_NEW, spec.qk_rope_head_dim))
    starts = torch.tensor([0, _NEW], dtype=torch.int32, device=device)
    lens = torch.tensor([cached + _NEW], dtype=torch.int32, device=device)
    table = torch.arange(columns, dtype=torch.int32, device=device)[None]
    step = build_mla_step(spec, starts, lens, table, num_tokens=_NEW)
    weights = MlaWeights(angles, *split, w_kv_b)
    return functools.partial(mla_layer, spec, inputs, weights, cache, step)


def memory(device: torch.device) -> Iterator[Row]:
    """Measure a layer's peak memory for several contexts, chunked and whole, on a GPU only."""
    cuda = device.type == "cuda"
    for context in _CONTEXTS if cuda else (256,):
        peaks: list[float | None] = []
        for size in (_CHUNK_ROWS if cuda else 128, context):
            call = prefill(device, context, size)
            if not cuda:
                call()
                peaks.append(None)
                continue
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                call()
                peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
            except torch.OutOfMemoryError:
                peaks.append(None)
            del call
            torch.cuda.empty_cache()
        chunked, whole = peaks
        yield Row("memory", context, chunk_rows=_CHUNK_ROWS, peak_gib=chunked, whole_gib=whole)


def first(device: torch.device) -> Iterator[Row]:
    """Time prefills of requests without contexts, with and without ``has_context=False``."""
    from dsv4_ops.integrations import transformers as hf

    cuda = device.type == "cuda"
    sizes_of = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "vocab_size": 2048}
    models = [("DeepseekV32", "fp8"), ("DeepseekV32", "bf16"), ("DeepseekV3", "bf16")]
    for family, kv in models if cuda else models[1:]:  # the small sizes have no FP8 rows
        model = hf.patch(_shaped(family, device, **sizes_of), kv=kv)
        step = hf.compile_step(model, hf.prefill_step, mode="regional", dynamic=True)
        most = {"max_cache_len": 8192, "max_chunk": 2048} if cuda else {"max_cache_len": 128}
        cache = hf.PagedCache.for_model(model, max_batch_size=4, **most)
        rows = [cache.add(number, num_tokens=cache.max_cache_len) for number in range(4)]
        for requests, tokens in itertools.product((1, 4), _FIRST_TOKENS if cuda else (16,)):
            counts = [tokens // requests] * requests
            batch = step_batch(counts, counts, device, rows[:requests])
            times, logits = list[float](), list[torch.Tensor]()
            for has_context in (True, False):
                cache.seq_lens.zero_()
                call = functools.partial(step, batch, cache.tensors, has_context=has_context)
                logits.append(call().float())
                us = Capture([call]).device_us().median if cuda else step_ms(call, device, 1) * 1e3
                times.append(us / 1e3)
            error = float((logits[1] - logits[0]).norm() / logits[0].norm())
            yield Row(
                "first", 0, requests, model=f"{family} {kv}", tokens=tokens, context_ms=times[0],
                step_ms=times[1], error=error,
            )  # fmt: skip


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    device = chosen_device(options)
    small = device.type == "cpu" or options.smoke
    contexts = options.contexts or ((128, 256) if small else (4096, 32768))
    output = Report(options, device)
    for group in options.cases or CASES:
        found = {"memory": memory, "first": first}.get(group)
        for row in found(device) if found else decode(group, device, options.batches, contexts):
            output.add(row)
    output.finish("DeepSeek-V3 and V3.2: stock_ms is Hugging Face's step", _NOTE)

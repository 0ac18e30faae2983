"""Report the registers, spills and shared memory of every kernel, without a GPU.

The module runs each launcher with meta tensors of typical sizes, and records the arguments of every
kernel that the launcher launches. Triton then compiles the kernel for these arguments and the
requested architecture, and Triton's ptxas reports the resources.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.cli.show import columns
from dsv4_ops.core.layout import IndexerLayout, MainLayout, StateLayout
from dsv4_ops.core.registry import OPS, TRITON
from dsv4_ops.core.target import HOPPER, target_of
from dsv4_ops.dispatch.limits import HOPPER_ONLY
from dsv4_ops.kernels.aot import compile
from dsv4_ops.kernels.aot.compile import Argument
from dsv4_ops.kernels.common.triton_compat import ptxas, version
from dsv4_ops.kernels.launcher import Launcher, dependent

SPILLS = {
    "hopper_gathered_keys_kernel": 100,
    "hopper_mla_decode_kernel": 520,
    "hopper_prefill_keys_kernel": 8,
    "hopper_split_keys_kernel": 16,
    "merge_parts_kernel": 48,
    "prefill_keys_kernel": 64,
    "select_kept_kernel": 16,
}
"""Allowed spill bytes on Hopper. These kernels fill all registers with accumulators and tiles in
flight, and spill a few addresses that they reload once per block of keys."""

SPILLS_OF = {
    (3, 6): {},
    (3, 7): {"select_kept_kernel": 320},
    (3, 8): {
        "hopper_mla_decode_kernel": 564,
        "hopper_prefill_keys_kernel": 48,
        "prefill_keys_kernel": 388,
    },
    (3, 9): {"select_logits_kernel": 16, "hopper_mla_decode_kernel": 584},
}
"""Allowed spill bytes on Hopper that depend on the release of Triton. An entry is valid from its
release on, up to the next entry."""

OTHER_SPILLS = 64
"""Allowed spill bytes on other GPUs, on which no kernel was measured. The compiler spilled at most
40 bytes, with Triton 3.9."""

TENSOR_MEMORY = 512
"""Columns of Blackwell's tensor memory."""

_SPILLED = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
_USAGE = re.compile(_SPILLED + r".*?Used (\d+) registers", re.S)


@dataclass(frozen=True)
class KernelReport:
    """The resources that a kernel needs.

    Args:
        op: Name in ``examples`` of the call that launches the kernel.
        kernel: Name of the kernel.
        warps: Warps per program.
        registers: Registers per thread.
        spills: Bytes of spill stores and spill loads per thread.
        shared: Bytes of shared memory per program.
        tensor_memory: Columns of Blackwell's tensor memory per program.
    """

    op: str
    kernel: str
    warps: int
    registers: int
    spills: int
    shared: int
    tensor_memory: int = 0


@dataclass(frozen=True)
class _Launch:
    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_C4_LAYOUTS = (MainLayout, MainLayout, IndexerLayout)
"""Layouts of the window cache, the compressed cache and the indexer's keys."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of an op."""


def _tensor(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_halves = functools.partial(_tensor, dtype=torch.bfloat16)
_floats = functools.partial(_tensor, dtype=torch.float32)
_longs = functools.partial(_tensor, dtype=torch.int64)
_bytes = functools.partial(_tensor, dtype=torch.uint8)
_codes = functools.partial(_tensor, dtype=torch.float8_e4m3fn)


def _insert(width: int, cache: Tensor, **settings: Any) -> Call:
    return (_halves(128, width), cache, _longs(128)), settings


def _gather(*first: Tensor, whole: bool = False, **settings: Any) -> Call:
    """Return arguments of a gather; ``whole`` omits the gather lengths, so all rows are read."""
    return (*first, _tensor(4), None if whole else _tensor(4), _tensor(4, 160)), settings


def _qnorm(cache: Tensor, layout: str) -> Call:
    slots = _longs(128)
    tensors = (_halves(128, 64, 512), _halves(128, 512), cache, slots, slots, _floats(2**20, 64))
    return tensors, {"eps": 1e-6, "block_size": 64, "layout": layout}


def _output(**settings: Any) -> Call:
    """Return arguments of the ops that apply inverse RoPE to the attention output."""
    return (_halves(128, 64, 512), _longs(128), _floats(2**20, 64)), {"num_groups": 8, **settings}


def _compress(cache: Tensor, overlap: bool, **settings: Any) -> Call:
    """Return arguments of ``compress_and_insert``, for C4 if ``overlap``, else for C128."""
    head_dim = IndexerLayout.head_dim if settings["layout"] == IndexerLayout.tag else 512
    ratio, rows, width = (4, 4, 2 * head_dim) if overlap else (128, 8, head_dim)
    states, slots = StateLayout(rows, 2 * width).allocate(1024, "meta"), _longs(128)
    tensors = (_floats(128, 2 * width), _floats(ratio, width), states, _tensor(4, 160), slots)
    rest = (_tensor(128), _floats(head_dim), _floats(2**20, 64), cache, slots)
    settings |= {"compress_ratio": ratio, "overlap": overlap, "state_block_size": rows}
    return (*tensors, *rest), {**settings, "eps": 1e-6}


def _step(cache: Tensor, overlap: bool, **settings: Any) -> Call:
    """Return arguments of ``save_and_compress``, for C4 if ``overlap``, else for C128."""
    tensors, settings = _compress(cache, overlap, **settings)
    return (*tensors[:4], tensors[-1], *tensors[4:]), settings


def _c4_step(**order: bool) -> Call:
    """Return arguments of ``insert_c4_step``."""
    window, main, keys = (kind(64).allocate(1024, "meta") for kind in _C4_LAYOUTS)
    (q, kv, _, slots, positions, table), _ = _qnorm(window, MainLayout.tag)
    of_main, settings = _step(main, True, block_size=64, layout=MainLayout.tag)
    of_indexer, _ = _step(keys, True, block_size=64, layout=IndexerLayout.tag)
    kv_score, ape, states, state_table, _, _, req_indices, weight, *_ = of_main
    indexer_score, indexer_ape, indexer_states, _, _, _, _, indexer_weight, *_ = of_indexer
    queries = _halves(128, 64, 128), _halves(128, 64)
    of_window = (window, slots, ape, weight, states, main)
    written = (*of_window, indexer_ape, indexer_weight, indexer_states, keys)
    tokens = (state_table, slots, slots, positions, req_indices, table)
    del settings["overlap"], settings["layout"]
    sizes = {"softmax_scale": 0.01, "swa_block_size": 64}
    return (q, kv, kv_score, *queries, indexer_score, *written, *tokens), settings | sizes | order


def _save() -> Call:
    """Return arguments of ``save_compressor_states`` for C4."""
    states, slots = StateLayout(4, 2048).allocate(1024, "meta"), _longs(128)
    tensors = (_floats(128, 2048), _floats(4, 1024), states, slots, slots)
    return tensors, {"compress_ratio": 4, "block_size": 4}


def _attention(
    paged: bool,
    cache: Tensor,
    *,
    planned: bool = False,
    inverse_rope: bool = False,
    count: int = 8,
    **settings: Any,
) -> Call:
    """Return arguments of ``sparse_mla_decode``, or of ``sparse_mla_decode_paged`` if ``paged``.
    The ``count`` tokens attend to a window and to rows of another cache."""
    tokens, size = _tensor(count), settings["extra_block_size"]
    queries = (_halves(count, 64, 512), cache, _tensor(count, 128), tokens)
    extra = MainLayout(size).allocate(1024, "meta") if cache.dim() == 2 else cache
    rows = (tokens, tokens, _tensor(4, 256)) if paged else (_tensor(count, 512), tokens)
    chosen: dict[str, Any] = {"softmax_scale": 512**-0.5, "num_splits": 0, "batch_invariant": False}
    plan = _tensor(count + 132, 4) if planned else None
    rotation = (_longs(count), _floats(2**20, 64)) if inverse_rope else (None, None)
    rest = (_floats(64), plan, *rotation)
    return (*queries, extra, *rows, *rest), settings | chosen


def _prefill(
    cache: Tensor,
    topk: Tensor | None,
    *,
    count: int = 2048,
    window: int | None = None,
    **settings: Any,
) -> Call:
    """Return arguments of ``sparse_mla_prefill`` for 4 requests. If ``window`` is given, the layer
    has only a window of this size."""
    extra = MainLayout(settings["extra_block_size"]).allocate(1024, "meta")
    table = _tensor(4, 256)
    rows = (extra, table, topk) if window is None else (None, None, None)
    settings |= {"softmax_scale": 512**-0.5, "window_size": window or 128, "compress_ratio": 4}
    tokens = (_longs(count), _tensor(count), table)
    return (_halves(count, 64, 512), cache, *tokens, *rows, _floats(64)), settings


def _dense(
    row_bytes: int = 0,
    *,
    heads: int = 16,
    count: int = 32,
    hint: bool = False,
    planned: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> Call:
    """Return arguments of ``mla_decode`` for 8 requests, over FP8 rows if ``row_bytes`` is not
    0."""
    q, tokens = _tensor(count, heads, 576, dtype=dtype), _tensor(count)
    cache = _tensor(1024, 64, row_bytes or 576, dtype=torch.uint8 if row_bytes else dtype)
    starts = _tensor(9) if hint else None
    plan = _tensor(count + 132, 4) if planned else None
    scale = _floats(1) if row_bytes == 576 else None
    chosen: dict[str, Any] = {"softmax_scale": 192**-0.5, "block_size": 64, "kv_lora_rank": 512}
    chosen |= {"num_splits": 0, "batch_invariant": False}
    rows = (cache, tokens, tokens, _tensor(8, 512), starts, plan, None, scale)
    return (q, *rows), {"layout": "plain"} | chosen | settings


def _selected(row_bytes: int = 0, *, heads: int = 128, count: int = 32, **settings: Any) -> Call:
    """Return arguments of ``mla_sparse`` with 2048 selected rows for every token."""
    tensors, chosen = _dense(row_bytes, heads=heads, count=count, **settings)
    return (*tensors[:2], _tensor(count, 2048), _tensor(count)), chosen


def _insert_dense(layout: str, row_bytes: int = 0) -> Call:
    """Return arguments of ``mla_insert_kv`` for 128 tokens."""
    cache = _bytes(1024, 64, row_bytes) if row_bytes else _halves(1024, 64, 576)
    scale = _floats(1) if row_bytes == 576 else None
    settings = {"block_size": 64, "layout": layout, "scale_format": "float32"}
    return (_halves(128, 512), _halves(128, 64), cache, _longs(128), scale), settings


def _listed() -> Call:
    """Return arguments of ``sparse_mla_gathered``."""
    lists = (_tensor(2048, 640), _tensor(2048), None)
    return (_halves(2048, 64, 512), _halves(8192, 512), *lists), {"softmax_scale": 512**-0.5}


def _context(causal: bool) -> Call:
    """Return arguments of ``mla_prefill`` for 2048 tokens of 4 requests, 16 heads, 8192 keys."""
    kv = _halves(8192, 16, 256)
    tensors = (_halves(2048, 16, 192), kv[..., :128], _halves(8192, 64), kv[..., 128:])
    return (*tensors, _tensor(5), _tensor(5)), {"softmax_scale": 192**-0.5, "causal": causal}


def _indexer(*between: Tensor, **settings: Any) -> Call:
    """Return arguments of the indexer's ops: FP8 queries, weights of heads, then ``between``."""
    return (_codes(8, 64, 128), _floats(8, 64), *between), settings


def _linear(num_groups: int = 0, *, count: int = 8, quantized: bool = False) -> Call:
    """Return arguments of ``fp8_linear``, or of ``fp8_grouped_linear`` if ``num_groups`` is not 0.
    The weight is 4096 x 4096."""
    lead = (count, num_groups) if num_groups else (count,)
    lead = lead[::-1] if quantized else lead  # groups are first if x is quantised
    x = _codes(*lead, 4096) if quantized else _halves(*lead, 4096)
    x_scale = _floats(*lead, 32) if quantized else None
    tensors = (x, _codes(4096, 4096), _floats(32, 32), x_scale)
    return tensors, {"activations": "bf16", "out_dtype": torch.bfloat16}


def _route(count: int = 8, *, hashed: bool = False) -> Call:
    """Return arguments of ``route`` with the sizes of DeepSeek-V4-Flash."""
    chosen = (None, _longs(129280, 6), _longs(count)) if hashed else (_floats(256), None, None)
    return (_halves(count, 4096), _halves(256, 4096), *chosen), {"top_k": 6, "scale": 1.5}


def _streams(mixed: bool, count: int = 8, streams: int = 4) -> Call:
    """Return arguments of ``hyper_connection`` with the sizes of DeepSeek-V4-Flash."""
    rows = streams * (streams + 2)
    weights = (_floats(rows, streams * 4096), _floats(rows), _floats(3), _floats(4096))
    tensors = (_halves(count, streams, 4096), *weights)
    block = (_halves(count, 4096), _floats(count, streams), _floats(count, streams, streams))
    settings = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}
    return (*tensors, *(block if mixed else ())), settings


def _candidates(ranks: int) -> Call:
    """Return arguments of ``cp_topk`` with the sizes of DeepSeek-V4-Flash."""
    shape = (ranks, 8, 512)
    tensors = _floats(*shape), _tensor(*shape)
    return tensors, {"topk": 512, "cp_interleave": 64}


def _experts(
    count: int = 8, *, fp8: bool = False, bf16: bool = False, activations: str = "bf16"
) -> Call:
    """Return arguments of ``experts`` for 32 experts of DeepSeek-V4-Flash."""
    settings = {"swiglu_limit": 10.0, "activations": activations}
    routed = (_halves(count, 4096), _floats(count, 6), _tensor(count, 6))
    if bf16:
        up, down = _halves(32, 4096, 4096), _halves(32, 4096, 2048)
        return (*routed, up, None, down, None), settings
    codes, scales = (_codes, _floats) if fp8 else (_bytes, _bytes)
    rows, columns, packed = (128, 128, 1) if fp8 else (1, 32, 2)
    weights = []
    for size, width in ((4096, 4096), (4096, 2048)):
        weights.append(codes(32, size, width // packed))
        weights.append(scales(32, size // rows, width // columns))
    return (*routed, *weights), settings


def examples() -> dict[str, Call]:
    """Return the arguments of typical calls, by name, for every op with a kernel. A name is the
    op's name, or has the form "op, variant"."""
    main = MainLayout(64).allocate(1024, "meta")
    indexer = IndexerLayout(64).allocate(1024, "meta")
    pages_of_2 = MainLayout(2).allocate(1024, "meta")
    plain, out, kv_b = _halves(1024, 64, 512), _halves(4, 8192, 512), _halves(128, 256, 512)
    fp8: dict[str, Any] = {"block_size": 64, "layout": MainLayout.tag}
    fp8_of_2 = {**fp8, "block_size": 2}
    rows: dict[str, Any] = {"num_rows": 8192, "offset": 0}
    pages: dict[str, Any] = {"swa_block_size": 64, "extra_block_size": 64, "layout": MainLayout.tag}
    c128 = {**pages, "extra_block_size": 2}
    keys: dict[str, Any] = {"block_size": 64, "layout": IndexerLayout.tag}
    tokens, positions = _tensor(8), _longs(8)
    pages_table, topk = _tensor(8, 512), _tensor(2048, 512)
    named = (tokens, tokens, pages_table)
    queries, angles = (_halves(8, 64, 128), _halves(8, 64), positions), _floats(2**20, 64)
    gathered = _bytes(8192, 128), _floats(8192), tokens, tokens
    logits: dict[str, Any] = {"num_rows": 32768, **keys}
    selected = (indexer, positions, tokens, pages_table)
    chosen: dict[str, Any] = {"compress_ratio": 4, "topk": 512, **keys}
    of_v32: dict[str, Any] = {"compress_ratio": 1, "topk": 2048, "slots": True}
    return {
        "quantize_and_insert_k_cache": _insert(512, main, **fp8),
        "quantize_and_insert_k_cache, C128": _insert(512, pages_of_2, **fp8_of_2),
        "dequantize_and_gather_k_cache": _gather(out, main, offset=0, **fp8),
        "dequantize_and_gather_k_cache, whole": _gather(out, main, whole=True, offset=0, **fp8),
        "gather_k_cache": _gather(main, **rows, **fp8),
        "gather_k_cache, whole": _gather(main, whole=True, **rows, **fp8),
        "gather_k_cache, plain": _gather(plain, **rows, block_size=64, layout="plain"),
        "insert_k_cache": _insert(512, plain),
        "mla_expand_kv": ((_halves(8192, 512), kv_b, _tensor(1)), {}),
        "mla_insert_kv": _insert_dense("plain"),
        "mla_insert_kv, fp8": _insert_dense("mla_fp8", 576),
        "mla_insert_kv, ds_fp8": _insert_dense("mla_ds_fp8", 656),
        "quantize_and_insert_indexer_k": _insert(128, indexer, **keys),
        "save_compressor_states": _save(),
        "compress_and_insert": _compress(main, True, **fp8),
        "compress_and_insert, C128": _compress(pages_of_2, False, **fp8_of_2),
        "compress_and_insert, indexer": _compress(indexer, True, **keys),
        "compress_and_insert, plain": _compress(plain, False, block_size=64, layout="plain"),
        "save_and_compress": _step(main, True, **fp8),
        "save_and_compress, C128": _step(pages_of_2, False, **fp8_of_2),
        "save_and_compress, indexer": _step(indexer, True, **keys),
        "insert_c4_step": _c4_step(),
        "insert_c4_step, save_first": _c4_step(save_first=True),
        "inverse_rope_group": _output(),
        "inverse_rope_group_quantize": _output(scale_layout="row"),
        "inverse_rope_group_quantize, packed": _output(scale_layout="ue8m0_packed"),
        "qnorm_rope_kv_insert": _qnorm(main, MainLayout.tag),
        "qnorm_rope_kv_insert, plain": _qnorm(plain, "plain"),
        "sparse_mla_decode": _attention(False, main, **pages),
        "sparse_mla_decode, plain": _attention(False, plain, **{**pages, "layout": "plain"}),
        "sparse_mla_decode_paged": _attention(True, main, **c128),
        "sparse_mla_decode, 2 tokens": _attention(False, main, count=2, **pages),
        "sparse_mla_decode_paged, 2 tokens": _attention(True, main, count=2, **c128),
        "sparse_mla_decode_paged, 64 tokens": _attention(
            True, main, count=64, inverse_rope=True, **c128
        ),
        "sparse_mla_decode, planned": _attention(False, main, planned=True, **pages),
        "sparse_mla_decode, inverse RoPE": _attention(False, main, inverse_rope=True, **pages),
        "sparse_mla_decode_paged, inverse RoPE": _attention(True, main, inverse_rope=True, **c128),
        "sparse_mla_decode, flash_mla": _attention(
            False, main, inverse_rope=True, **pages, impl="flash_mla"
        ),
        "sparse_mla_decode_paged, flash_mla": _attention(
            True, main, inverse_rope=True, **c128, impl="flash_mla"
        ),
        "mla_decode": _dense(),
        "mla_decode, 128 heads": _dense(heads=128),
        "mla_decode, 2 tokens": _dense(heads=128, count=2),
        "mla_decode, tokens of a request together": _dense(hint=True),
        "mla_decode, planned": _dense(planned=True),
        "mla_decode, float32": _dense(dtype=torch.float32),
        "mla_decode, flash_mla": _dense(heads=128, impl="flash_mla"),
        "mla_decode, fp8": _dense(576, layout="mla_fp8"),
        "mla_decode, ds_fp8": _dense(656, layout="mla_ds_fp8", heads=128),
        "mla_sparse": _selected(),
        "mla_sparse, 16 heads": _selected(heads=16),
        "mla_sparse, 2048 tokens": _selected(count=2048),
        "mla_sparse, ds_fp8": _selected(656, layout="mla_ds_fp8"),
        "mla_sparse, float32": _selected(heads=16, dtype=torch.float32),
        "sparse_mla_gathered": _listed(),
        "sparse_mla_plan": ((tokens, tokens), {"num_heads": 64, "num_programs": 132}),
        "flash_mla_metadata": (
            (tokens, tokens),
            {"swa_width": 128, "extra_width": 512, "num_sm_parts": 132},
        ),
        "sparse_mla_prefill": _prefill(main, topk, **pages),
        "sparse_mla_prefill, pages": _prefill(main, topk, **pages, impl="triton"),
        "sparse_mla_prefill, all rows": _prefill(main, None, **c128),
        "sparse_mla_prefill, 8 tokens": _prefill(main, _tensor(8, 512), count=8, **pages),
        "sparse_mla_prefill, all rows of 8 tokens": _prefill(main, None, count=8, **c128),
        "sparse_mla_prefill, a window of 8 tokens": _prefill(
            main, None, count=8, window=512, **pages
        ),
        "sparse_mla_prefill, flash_mla": _prefill(main, topk, **pages, impl="flash_mla"),
        "sparse_mla_prefill, flash_mla, all rows": _prefill(main, None, **c128, impl="flash_mla"),
        "mla_prefill": _context(causal=True),
        "mla_prefill, a chunk of the context": _context(causal=False),
        "indexer_quantize_q": ((*queries, angles), {"softmax_scale": 0.01}),
        "indexer_quantize_q, V3.2": (
            (*queries, angles),
            {"softmax_scale": 0.01, "rope_first": True, "interleaved": False},
        ),
        "indexer_logits": _indexer(indexer, *named, **logits),
        "indexer_logits_ragged": _indexer(*gathered),
        "indexer_select": _indexer(*selected, **chosen),
        "indexer_select, slots": _indexer(*selected, **chosen, slots=True),
        "indexer_select, top 1024": _indexer(*selected, **{**chosen, "topk": 1024, "slots": True}),
        "indexer_select, V3.2": _indexer(*selected, **chosen | of_v32),
        "indexer_logits, deep_gemm": _indexer(indexer, *named, **logits, impl="deep_gemm"),
        "indexer_topk": ((_floats(8, 32768), tokens), {"topk": 512}),
        "fp8_linear": _linear(),
        "fp8_linear_norms": (
            (_halves(8, 4096), _codes(1536, 4096), _floats(12, 32), _floats(1024), _floats(512)),
            {"eps": 1e-6, "activations": "bf16"},
        ),
        "fp8_linear_swiglu": (
            _linear()[0][:3],
            {"swiglu_limit": 10.0, "activations": "bf16"},
        ),
        "fp8_linear, 64 tokens": _linear(count=64),
        "fp8_linear, 128 tokens": _linear(count=128),
        "fp8_linear, codes": _linear(quantized=True),
        "fp8_linear, 64 codes": _linear(count=64, quantized=True),
        "fp8_linear, 128 codes": _linear(count=128, quantized=True),
        "fp8_grouped_linear": _linear(8),
        "fp8_grouped_linear, codes": _linear(8, count=64, quantized=True),
        "grouped_topk": (
            (_floats(8, 256), _floats(256)),
            {"top_k": 8, "num_groups": 8, "kept_groups": 4, "scale": 2.5, "normalize": True},
        ),
        "expert_plan": ((_tensor(8, 6),), {"num_experts": 256, "block_size": 16}),
        "route": _route(),
        "route, by token": _route(hashed=True),
        "route, 128 tokens": _route(128),
        "experts": _experts(),
        "hyper_connection": _streams(False),
        "hyper_connection, after a block": _streams(True),
        "hyper_connection, of many": _streams(True, 100),
        "hyper_connection, of 1024": _streams(True, 1024),
        "cp_topk": _candidates(2),
        "cp_topk, of 8 ranks": _candidates(8),
        "experts, 128 tokens": _experts(128),
        "experts, 170 tokens": _experts(170),
        "experts, 2048 tokens": _experts(2048),
        "experts, activations in fp8": _experts(activations="fp8"),
        "experts, codes": _experts(128, activations="fp8"),
        "experts, fp8": _experts(fp8=True),
        "experts, fp8, 170 tokens": _experts(170, fp8=True),
        "experts, bf16": _experts(bf16=True),
        "experts, bf16, 2048 tokens": _experts(2048, bf16=True),
        "gather_indexer_k": ((indexer, _tensor(5), _tensor(4, 160)), {"num_rows": 8192, **keys}),
    }


def recorded(
    op: str, args: tuple[Any, ...], settings: dict[str, Any], where: tuple[int, int] | None = None
) -> list[_Launch]:
    """Record the launches of ``op`` on a GPU of capability ``where``, by our launcher or by the
    launcher of the library in ``settings["impl"]``."""
    launches: list[_Launch] = []
    impl = settings.get("impl", TRITON)
    if impl == TRITON and op in HOPPER_ONLY and where != HOPPER:
        return launches

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: launches.append(_Launch(self.kernel, args, kwargs))

    OPS[op].launcher(impl)(Launcher(Recorder, capability=where), *args, **settings)
    return launches


def compiled(launch: _Launch, capability: int) -> Any:
    """Compile the kernel as Triton would for these arguments."""
    arguments = [_specialised(value) for value in launch.args]
    options = launch.kwargs | dependent(launch.kernel, target_of(divmod(capability, 10)))
    return compile.compiled(launch.kernel, arguments, options, capability)


def _specialised(value: Any) -> Argument | int:
    """Describe an argument as Triton does, which treats an integer that is 1 as a constant."""
    if isinstance(value, Tensor):
        return Argument.tensor(value.dtype)
    return 1 if value == 1 else Argument.number(value)


def report(capability: int = 90, progress: Callable[[str], object] = str) -> list[KernelReport]:
    """Compile every kernel for a compute capability and read its resource usage.

    Capability 90 is H100 and H200. ``progress`` is called with a line before each example.
    """
    reports, cases = [], examples()
    progress(f"kernels: compiling the kernels of {len(cases)} calls, which takes about 3 minutes")
    where = divmod(capability, 10)
    for number, (name, (args, settings)) in enumerate(cases.items(), 1):
        progress(f"kernels: compiling {name} ({number} of {len(cases)})")
        for launch in launches(name.partition(",")[0], args, settings, where):
            kernel = compiled(launch, capability)
            spills, registers = _usage(kernel, capability)
            reports.append(
                KernelReport(
                    op=name,
                    kernel=launch.kernel.__name__,
                    warps=launch.kwargs["num_warps"],
                    registers=registers,
                    spills=spills,
                    shared=kernel.metadata.shared,
                    tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
                )
            )
    return reports


def launches(
    op: str, args: tuple[Any, ...], settings: dict[str, Any], where: tuple[int, int]
) -> list[_Launch]:
    """Return the launches on a GPU of capability ``where``. On Hopper, launches of Triton kernels
    come first; these kernels run the calls that Gluon kernels do not support."""
    device_launches = recorded(op, args, settings, where)
    if where != HOPPER:
        return device_launches
    anywhere = recorded(op, args, settings)
    all_launches = [(each.kernel, each.kwargs) for each in anywhere]
    return anywhere + [
        each for each in device_launches if (each.kernel, each.kwargs) not in all_launches
    ]


def _usage(kernel: Any, capability: int) -> tuple[int, int]:
    """Read the spilled bytes and the registers per thread."""
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"])
        done = subprocess.run(
            [ptxas(capability), "-v", f"--gpu-name={architecture}", path, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    match = _USAGE.search(done.stderr)
    if match is None:
        raise RuntimeError(
            f"report: ptxas must state its usage, got {done.stderr!r}. Update triton."
        )
    return int(match[1]) + int(match[2]), int(match[3])


def oversized(reports: list[KernelReport], capability: int) -> list[KernelReport]:
    """Return the kernels that need more shared memory or tensor memory than a program can have."""
    most = target_of(divmod(capability, 10)).shared
    return [item for item in reports if item.shared > most or item.tensor_memory > TENSOR_MEMORY]


def spilling(reports: list[KernelReport], capability: int = 90) -> list[KernelReport]:
    """Return the kernels that spill more than ``SPILLS`` and ``SPILLS_OF`` allow on Hopper, or
    ``OTHER_SPILLS`` on other GPUs."""
    granted, least = SPILLS | SPILLS_OF[max(since for since in SPILLS_OF if since <= version())], 0
    if divmod(capability, 10) != HOPPER:
        granted, least = {}, OTHER_SPILLS
    return [item for item in reports if item.spills > granted.get(item.kernel, least)]


def table(reports: list[KernelReport]) -> str:
    """Format ``reports`` in columns."""
    header = ("op", "kernel", "warps", "registers", "spill bytes", "shared bytes", "tensor columns")
    return columns([header, *(tuple(map(str, astuple(item))) for item in reports)])

"""Calls that our kernels, or a library, do not support.

The functions read shapes, dtypes, settings and the device, and need torch only, so an export or a
fake can call them. ``dispatch/choice.py`` calls them; launchers do not check again.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dsv4_ops.core.errors import plain_int
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.core.registry import TRITON
from dsv4_ops.core.target import HOPPER, capability_of
from dsv4_ops.core.tiles import LARGEST_TOPK
from dsv4_ops.core.torch_compat import guard_or_false
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, SCALED_MM
from dsv4_ops.dispatch.prefill import MOST_GATHERED, workspace_rows

Values = Mapping[str, Any]
"""Arguments of a call by name, without those that are not known yet."""

ROPE_DIM = MainLayout.head_dim - MainLayout.code_dim
"""Number of trailing values of a row that our sparse MLA kernels rotate back."""

HOPPER_ONLY = ("sparse_mla_gathered",)
"""Ops that have a Gluon kernel but no Triton kernel."""

FLASH_MLA_HEADS = (64, 128)
FLASH_MLA_TOKENS = 8192
"""Maximum tokens of a decode. FlashMLA's planner keeps numbers for each token in shared memory."""
FLASH_MLA_DENSE_SIZES, FLASH_MLA_DENSE_BLOCK = (576, 512), 64
"""Row width, latent width, and rows per block of FlashMLA's dense decode."""
FLASH_MLA_DENSE_DTYPES = (torch.bfloat16, torch.float16)
SCALED_MM_COLUMNS = 512
"""The number of columns of a weight must be a multiple of this, so that each row has a multiple of
four scales. Releases of torch pad other numbers of scales differently."""
DEEP_GEMM_HEADS, DEEP_GEMM_BLOCK = (32, 64), 64
LEAST_LATENT = 16
"""Minimum latent width of our dense decode; tensor cores multiply no smaller tile."""
MOST_COLUMNS = 128
"""Maximum columns of a tile in our dense prefill. A tile is the NoPE part of keys, the RoPE part of
keys, or values."""
MOST_CANDIDATES = 8192
"""Maximum candidates of a token, and maximum topk, for one program of ``cp_topk``."""
WIDEST_HEAD = 1024
"""Maximum values of a head in our inverse RoPE, a power of two."""


class Sizes(NamedTuple):
    """Shape and dtype of a tensor that does not exist yet."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


class Limit(NamedTuple):
    """An unsupported part of a call: ``what`` names it, ``advice`` says what is supported."""

    what: str
    advice: str


def limit(op: str, provider: str, values: Values, *, asking: bool = False) -> Limit | None:
    """Return what ``provider``, a library or "triton", does not support in a call of ``op``.

    Unless ``asking``, a symbolic size counts as supported, because checking it would add a guard.
    """
    if provider == TRITON:
        return _kernel_limit(op, values)
    if provider == FLASH_MLA:
        return _flash_mla_limit(op, values, asking)
    if provider == SCALED_MM:
        return scaled_mm_limit(values)
    return _deep_gemm_limit(values) if provider == DEEP_GEMM else None


def _kernel_limit(op: str, values: Values) -> Limit | None:
    """Return what our kernel of ``op`` does not support; None for ops that are not listed here."""
    kernels = {
        "sparse_mla_decode": _decode_limit,
        "sparse_mla_decode_paged": _decode_limit,
        "sparse_mla_gathered": _gathered_limit,
        "sparse_mla_prefill": _rows_limit,
        "mla_decode": _dense_decode_limit,
        "mla_sparse": _dense_decode_limit,
        "mla_prefill": _dense_prefill_limit,
        "indexer_logits": _logits_limit,
        "indexer_select": _select_limit,
        "indexer_topk": _topk_limit,
        "cp_topk": _rank_topk_limit,
        "inverse_rope_group": _inverse_rope_limit,
    }
    return kernels[op](values) if op in kernels else None


def _above(size: Any, most: int, asking: bool) -> bool:
    """Whether a size is above ``most``. In an export, or without ``asking``, a symbol counts as
    small, because reading the symbol would add a guard."""
    if isinstance(size, int):
        return size > most
    if not asking or torch.compiler.is_exporting():
        return False
    return guard_or_false(size > most)


def _flash_mla_limit(op: str, values: Values, asking: bool) -> Limit | None:
    q = values["q"]
    heads, width, tokens = int(q.shape[1]), int(q.shape[2]), q.shape[0]
    if op == "mla_decode":
        return _flash_mla_dense_limit(values, asking)
    if op == "mla_sparse":
        return _flash_mla_listed_limit(values, asking)
    if op == "sparse_mla_gathered":
        if q.dtype != torch.bfloat16 or width != MainLayout.head_dim:
            return Limit(
                f"with {q.dtype} rows of {width} values", "FlashMLA takes bfloat16 rows of 512"
            )
    elif values["layout"] != MainLayout.tag:
        return Limit(f"with layout {values['layout']!r}", "FlashMLA reads the layout 'v4_fp8'")
    elif op == "sparse_mla_prefill":
        rows = workspace_rows(values)
        if _above(rows, MOST_GATHERED, asking):
            what = f"with block tables of {plain_int(rows)} rows"
            return Limit(what, f"FlashMLA takes up to {MOST_GATHERED} rows of all requests")
    elif values["num_splits"] != 0 or values["batch_invariant"]:
        return Limit("with num_splits or batch_invariant", "FlashMLA decides itself what it splits")
    elif _above(tokens, FLASH_MLA_TOKENS, asking):
        return Limit(
            f"with {plain_int(tokens)} tokens", f"FlashMLA decodes up to {FLASH_MLA_TOKENS}"
        )
    if heads not in FLASH_MLA_HEADS:
        return Limit(f"with {heads} heads", "FlashMLA takes 64 or 128")
    return None


def _flash_mla_listed_limit(values: Values, asking: bool) -> Limit | None:
    q, cache, is_plain = values["q"], values.get("kv_cache"), values["layout"] == PlainLayout.tag
    heads, tokens = int(q.shape[1]), q.shape[0]
    sizes = (int(q.shape[2]), values["kv_lora_rank"])
    if q.dtype != torch.bfloat16 or sizes != FLASH_MLA_DENSE_SIZES:
        what = f"with {q.dtype} queries of {sizes[0]} values, of which {sizes[1]} are the latent"
        return Limit(what, "FlashMLA takes bfloat16 queries of 576, of which 512 are the latent")
    if values["num_splits"] != 0 or values["batch_invariant"]:
        return Limit("with num_splits or batch_invariant", "FlashMLA decides itself what it splits")
    if is_plain and cache is not None and not cache.is_contiguous():
        return Limit("with blocks that lie apart", "FlashMLA reads plain rows one after the other")
    if heads not in FLASH_MLA_HEADS:
        return Limit(f"with {heads} heads", "FlashMLA takes 64 or 128")
    if not is_plain and _above(tokens, FLASH_MLA_TOKENS, asking):
        what = f"with {plain_int(tokens)} tokens over layout {values['layout']!r}"
        return Limit(what, f"FlashMLA takes up to {FLASH_MLA_TOKENS}")
    return None


def _flash_mla_dense_limit(values: Values, asking: bool) -> Limit | None:
    q, block_size = values["q"], values["block_size"]
    heads, tokens = int(q.shape[1]), q.shape[0]
    sizes = (int(q.shape[2]), values["kv_lora_rank"])
    if values["layout"] != "plain" or q.dtype not in FLASH_MLA_DENSE_DTYPES:
        what = f"with layout {values['layout']!r} and {q.dtype} queries"
        return Limit(what, "FlashMLA takes plain bfloat16 or float16 rows")
    if sizes != FLASH_MLA_DENSE_SIZES:
        what = f"with rows of {sizes[0]} values, of which {sizes[1]} are the latent"
        return Limit(what, "FlashMLA takes rows of 576, of which 512 are the latent")
    if block_size != FLASH_MLA_DENSE_BLOCK:
        return Limit(f"with block_size {block_size}", "FlashMLA reads pages of 64 rows")
    if values["plan"] is not None:
        return Limit("with a plan", "FlashMLA makes its own in the call")
    if values["num_splits"] != 0 or values["batch_invariant"]:
        return Limit("with num_splits or batch_invariant", "FlashMLA decides itself what it splits")
    if heads > FLASH_MLA_HEADS[-1]:
        return Limit(f"with {heads} heads", f"FlashMLA takes up to {FLASH_MLA_HEADS[-1]}")
    if _above(tokens, FLASH_MLA_TOKENS, asking):
        return Limit(
            f"with {plain_int(tokens)} tokens", f"FlashMLA decodes up to {FLASH_MLA_TOKENS}"
        )
    return None


def _deep_gemm_limit(values: Values) -> Limit | None:
    heads, size = int(values["q"].shape[1]), values["block_size"]
    if values["layout"] != IndexerLayout.tag:
        return Limit(
            f"with layout {values['layout']!r}", "DeepGEMM reads the layout 'v4_indexer_fp8'"
        )
    if heads not in DEEP_GEMM_HEADS:
        return Limit(f"with {heads} heads", "DeepGEMM takes 32 or 64")
    if size != DEEP_GEMM_BLOCK:
        return Limit(f"with block_size {size}", f"DeepGEMM reads pages of {DEEP_GEMM_BLOCK} rows")
    return None


def scaled_mm_limit(values: Values) -> Limit | None:
    if values["x_scale"] is None and values["activations"] != "fp8":
        return Limit("with activations 'bf16'", "scaled_mm multiplies FP8 by FP8")
    if values["out_dtype"] != torch.bfloat16:
        return Limit(f"with out_dtype {values['out_dtype']}", "scaled_mm returns torch.bfloat16")
    columns = int(values["weight"].shape[1])
    if columns % SCALED_MM_COLUMNS != 0:
        advice = f"scaled_mm takes multiples of {SCALED_MM_COLUMNS}"
        return Limit(f"with in_features {columns}", advice)
    return None


@functools.cache
def no_triton() -> bool:
    """Whether triton is missing; all our kernels need it."""
    try:
        return importlib.util.find_spec("triton") is None
    except (ImportError, ValueError):
        return True


def _rows_limit(values: Values) -> Limit | None:
    """Return a limit unless queries are bfloat16 rows of 512 values, and the rows of plain caches
    are adjacent."""
    q, width = values["q"], int(values["q"].shape[2])
    if q.dtype != torch.bfloat16 or width != MainLayout.head_dim:
        what = f"with {q.dtype} rows of {width} values"
        return Limit(what, f"Our kernels take bfloat16 rows of {MainLayout.head_dim}")
    for name in ("swa_cache", "extra_cache"):
        cache = values.get(name)
        if cache is not None and cache.dim() == 3 and cache.stride(1) != MainLayout.head_dim:
            return Limit("with rows that lie apart", "Our kernels take blocks of dense rows")
    return None


def _decode_limit(values: Values) -> Limit | None:
    found, angles = _rows_limit(values), values.get("cos_sin_cache")
    if found is None and angles is not None and int(angles.shape[1]) != ROPE_DIM:
        return Limit(f"with {int(angles.shape[1])} angles", f"Our kernels rotate {ROPE_DIM} values")
    return found


def _gathered_limit(values: Values) -> Limit | None:
    # in Dynamo's trace, ignore the device: the check runs again when the op is lowered
    if not torch.compiler.is_dynamo_compiling() and not _runs_gluon(values["q"].device):
        return Limit("off Hopper", "Our kernel is for compute capability 9.0")
    return _rows_limit(values)


def _runs_gluon(device: torch.device) -> bool:
    return capability_of(device) == HOPPER and os.environ.get("TRITON_INTERPRET") != "1"


def _dense_decode_limit(values: Values) -> Limit | None:
    q, cache, layout = values["q"], values.get("kv_cache"), values["layout"]
    rank, width = int(values["kv_lora_rank"]), int(q.shape[2])
    if rank < LEAST_LATENT or rank & (rank - 1) != 0 or width <= rank:
        what = f"with rows of {width} values, of which {rank} are the latent"
        least = f"a latent of a power of two from {LEAST_LATENT} on"
        return Limit(what, f"Our kernels take {least}, followed by rotated values")
    if layout != PlainLayout.tag and q.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        what = f"with layout {layout!r} and {q.dtype} queries"
        return Limit(what, "Our kernels read codes for bfloat16 queries, or for codes")
    if cache is not None and (cache.stride(2) != 1 or cache.stride(1) != cache.shape[2]):
        return Limit("with rows that lie apart", "Our kernels take blocks of dense rows")
    return None


def _dense_prefill_limit(values: Values) -> Limit | None:
    q, k_nope, v = (values[name] for name in ("q", "k_nope", "v"))
    widths = [int(each.shape[2]) for each in (q, k_nope, v)]
    if q.dtype == torch.float32:
        return Limit("with torch.float32", "Our kernel takes bfloat16 or float16")
    if max(widths[0] - widths[1], *widths[1:]) > MOST_COLUMNS:
        what = f"with keys of {widths[0]}, of which {widths[1]} are not rotated, and values of "
        what = f"{what}{widths[2]} columns"
        return Limit(what, f"Our kernel takes up to {MOST_COLUMNS} of each kind")
    return None


def _logits_limit(values: Values) -> Limit | None:
    if values["layout"] != IndexerLayout.tag:
        return Limit(f"with layout {values['layout']!r}", "Our kernels read 'v4_indexer_fp8'")
    return None


def _select_limit(values: Values) -> Limit | None:
    if int(values["q"].shape[1]) == 0:
        return Limit("without heads", "Our kernel takes at least one")
    return _logits_limit(values) or _topk_limit(values)


def _topk_limit(values: Values) -> Limit | None:
    if values.get("topk", 0) > LARGEST_TOPK:
        return Limit(f"with topk {values['topk']}", f"Our kernels select up to {LARGEST_TOPK}")
    return None


def _rank_topk_limit(values: Values) -> Limit | None:
    ranks, _, width = values["rows"].shape
    candidates, topk = int(ranks) * int(width), values["topk"]
    if topk == 0 or candidates == 0:
        return Limit("with nothing to select", "The reference selects nothing")
    if max(candidates, topk) > MOST_CANDIDATES:
        what = f"with {candidates} candidates of a token and topk {topk}"
        return Limit(what, f"Our kernel takes up to {MOST_CANDIDATES}")
    return None


def _inverse_rope_limit(values: Values) -> Limit | None:
    width = int(values["o"].shape[2])
    if not 2 <= width <= WIDEST_HEAD or width & (width - 1) != 0:
        advice = f"Our kernel takes a power of two up to {WIDEST_HEAD}"
        return Limit(f"with heads of {width} values", advice)
    return None


WORDS = {
    "sparse_mla_decode": "rows other than 512 bfloat16 values, or a rope_dim other than 64",
    "sparse_mla_decode_paged": "rows other than 512 bfloat16 values, or a rope_dim other than 64",
    "sparse_mla_gathered": "GPUs other than Hopper, or rows other than 512 bfloat16 values",
    "sparse_mla_prefill": "rows other than 512 bfloat16 values",
    "mla_decode": "a kv_lora_rank that is no power of two, or rows that are not dense",
    "mla_sparse": "a kv_lora_rank that is no power of two, or rows that are not dense",
    "mla_prefill": f"float32, or a NoPE, RoPE or value part of more than {MOST_COLUMNS} columns",
    "indexer_logits": "layout 'plain'",
    "indexer_select": f"layout 'plain', no heads, or topk above {LARGEST_TOPK}",
    "indexer_topk": f"topk above {LARGEST_TOPK}",
    "cp_topk": f"more than {MOST_CANDIDATES} candidates per token",
    "inverse_rope_group": f"a head width that is no power of two up to {WIDEST_HEAD}",
}
"""Calls on a GPU that our kernels do not support, in words; the reference runs them."""

"""Dense MLA in float64, from the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.reference import mla as reference
from dsv4_ops.reference.pages import locate
from dsv4_ops.testing.case import Exact
from dsv4_ops.testing.float64.sparse_mla import exact_attention

FP8_UNIT = 2.0**-4
"""Relative error of one rounding to e4m3."""


def decode_keys(
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Return the rows [num_tokens, num_rows, width] that tokens see, not multiplied by a per-tensor
    scale, and the mask of rows that exist."""
    row = torch.arange(block_table.shape[1] * block_size, device=kv_cache.device)
    in_length = row < seq_lens[:, None]
    pages, rows = locate(block_table, req_indices[:, None], row, in_length, block_size)
    stored, exists = reference.stored_rows(kv_cache, pages, rows)
    return reference.values_of(stored, kv_cache.dtype, layout), exists


def exact_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None = None,
    plan: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    **settings: Any,
) -> tuple[Exact, Exact]:
    of_cache = {name: settings[name] for name in ("block_size", "layout")}
    keys, exists = decode_keys(kv_cache, seq_lens, req_indices, block_table, **of_cache)
    keys, exists = pad(keys, (0, 0, 0, 1)), pad(exists, (0, 1))  # a table may have no columns
    if kv_scale is not None:
        keys = keys.to(torch.float64) * kv_scale
    query = q
    if q.dtype == torch.float8_e4m3fn:
        query = q.to(torch.float64) * (1.0 if q_scale is None else q_scale)
    return _exact_latents(query, keys, exists, settings)


def _exact_latents(
    q: Tensor, keys: Tensor, exists: Tensor, settings: dict[str, Any]
) -> tuple[Exact, Exact]:
    out, _, lse = exact_attention(q, keys, exists, None, settings["softmax_scale"])
    rank = settings["kv_lora_rank"]
    return Exact(out.value[..., :rank], out.magnitude[..., :rank]), lse


def sparse_keys(
    kv_cache: Tensor, indices: Tensor, lens: Tensor, *, block_size: int, layout: str
) -> tuple[Tensor, Tensor]:
    """Return the listed rows [num_tokens, topk, width], and the mask of rows that exist."""
    column = torch.arange(indices.shape[1], device=indices.device)
    slots = torch.where(column < lens[:, None], indices, -1)
    pages, rows = reference.locate_slots(slots, block_size)
    stored, exists = reference.stored_rows(kv_cache, pages, rows)
    return reference.values_of(stored, kv_cache.dtype, layout), exists


def exact_mla_sparse(
    q: Tensor, kv_cache: Tensor, indices: Tensor, lens: Tensor, **settings: Any
) -> tuple[Exact, Exact]:
    of_cache = {name: settings[name] for name in ("block_size", "layout")}
    keys, exists = sparse_keys(kv_cache, indices, lens, **of_cache)
    return _exact_latents(q, keys, exists, settings)


def _product(left: Tensor, right: Tensor, equation: str) -> tuple[Tensor, Tensor]:
    """Compute a product in float64, and the scale of its errors. The errors of a float32 sum
    accumulate like a random walk; in half precision, the rounding of the result hides these
    errors."""
    size = torch.einsum(equation, left.double().abs(), right.double().abs())
    if left.dtype == torch.float32:
        size = size * (1 + left.shape[-1] ** 0.5 / 2)
    return torch.einsum(equation, left.double(), right.double()), size


def exact_absorbed(
    q_nope: Tensor, q_pe: Tensor, w_uk_t: Tensor, q_scale: Tensor | None = None
) -> tuple[Exact]:
    """Compute absorbed queries. For a result in e4m3, compute the values of the codes, with
    saturation."""
    latent, products = _product(q_nope, w_uk_t, "tnp,npl->tnl")
    rope = q_pe.to(torch.float64)
    value = torch.cat([latent, rope], -1)
    size = torch.cat([products, rope.abs()], -1)
    if q_scale is None:
        return (Exact(value, size),)
    unit = torch.finfo(q_nope.dtype).eps / 2
    subnormal = 2.0**-10  # error of a code below 2^-6
    scaled = (value / q_scale.to(torch.float64)).clamp(-448, 448)
    rounded = size / q_scale.to(torch.float64) * unit + subnormal
    return (Exact(scaled, scaled.abs() + rounded / FP8_UNIT, FP8_UNIT),)


def exact_expanded(kv_c: Tensor, w_kv_b: Tensor, num_valid: Tensor) -> tuple[Exact]:
    is_valid = (torch.arange(kv_c.shape[0], device=kv_c.device) < num_valid)[:, None]
    value, size = _product(torch.where(is_valid, kv_c, 0.0), w_kv_b, "tl,nwl->tnw")
    return (Exact(value, size),)


def exact_v_up(x: Tensor, w_uv: Tensor) -> tuple[Exact]:
    value, size = _product(x, w_uv, "tnl,nlv->tnv")
    return (Exact(value.flatten(1), size.flatten(1)),)

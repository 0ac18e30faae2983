"""References of the ops of dense MLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.ints import single
from dsv4_ops.core.layout import FP8_MAX, MlaDsFp8Layout, MlaFp8Layout, PlainLayout, round_up
from dsv4_ops.core.types import ABSENT, MlaAttention, PerTensor
from dsv4_ops.reference.common import (
    dense,
    materialized,
    products_of_heads,
    runs_on_cpu,
    table_entries,
)
from dsv4_ops.reference.kv_cache import insert_k_cache
from dsv4_ops.reference.pages import locate, words
from dsv4_ops.reference.quantization import (
    as_e4m3,
    bf16_bits,
    e4m3_values,
    float_values,
    from_bytes,
    saturated_codes,
    to_bytes,
)

_NAN_CODE, _NAN_BITS = 0x7F, 0x7FC0
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_UE8M0_AMAX = 1e-4
"""Minimum of amax / 448 for FlashMLA's power-of-two scales."""
_MANTISSA = 0x7FFFFF
_LEAST_AMAX = 1e-10
"""Minimum amax of a tensor that is quantised with one scale."""


def quotient(x: Tensor, divisor: Tensor | float) -> Tensor:
    """Return ``x / divisor`` rounded to float32. Triton's float32 division is approximate; a
    float64 division that is then rounded to float32 gives the correctly rounded result."""
    if isinstance(divisor, Tensor):
        divisor = divisor.to(torch.float64)
    return (x.to(torch.float64) / divisor).to(torch.float32)


def rounded_values(x: Tensor) -> Tensor:
    """Return ``x`` as float32, rounded to the dtype of ``x``, because a compiler may have kept more
    precision in ``x``."""
    if x.dtype == torch.bfloat16:
        return (bf16_bits(x) << 16).view(torch.float32)
    return (materialized(x) if x.dtype == torch.float16 else x).to(torch.float32)


def codes_of(scaled: Tensor) -> Tensor:
    """Return saturated e4m3 codes as uint8; every NaN becomes 0x7F."""
    return torch.where(scaled.isnan(), _NAN_CODE, saturated_codes(scaled))


def per_tensor_codes(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return the uint8 codes of ``x`` divided by ``scale``, the scale of the whole tensor."""
    values = rounded_values(x)
    return codes_of(values if scale is None else quotient(values, single(scale)))


def per_tile_codes(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """Return the uint8 codes of ``x`` [num_rows, 512], and the bits of a float32 scale per 128
    values."""
    tiles = rounded_values(x).unflatten(-1, (-1, MlaDsFp8Layout.quant_block))
    finite = torch.where(tiles.isnan(), 0.0, tiles.abs()).clamp(max=torch.finfo(x.dtype).max)
    scale = quotient(finite.amax(-1, keepdim=True), FP8_MAX)
    if scale_format == "ue8m0":
        bits = scale.clamp(min=_UE8M0_AMAX).view(torch.int32)
        scales = (((bits + _MANTISSA) >> 23) << 23).view(torch.float32)
    else:
        scales = scale.clamp(min=_SMALLEST_NORMAL)
    return codes_of(quotient(tiles, scales)).flatten(-2), scales.squeeze(-1).view(torch.int32)


def encoded_rows(
    kv_c: Tensor, k_pe: Tensor, scale: Tensor | None, *, layout: str, scale_format: str
) -> Tensor:
    """Encode rows as the cache stores them; return floats as integers with the same bits."""
    if layout == PlainLayout.tag:
        return torch.cat([words(kv_c), words(k_pe)], -1)
    if layout == MlaFp8Layout.tag:
        return torch.cat([per_tensor_codes(x, scale) for x in (kv_c, k_pe)], -1)
    codes, scales = per_tile_codes(kv_c, scale_format)
    rope = bf16_bits(k_pe.to(torch.bfloat16))
    if k_pe.dtype != torch.bfloat16:
        rope = torch.where(k_pe.isnan(), _NAN_BITS, rope)
    return torch.cat([codes, to_bytes(scales, 4), to_bytes(rope, 2)], -1)


def mla_insert_kv(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
    *,
    block_size: int,
    layout: str,
    scale_format: str,
) -> None:
    kv_c, k_pe = (each[: slot_mapping.shape[0]] for each in (kv_c, k_pe))
    rows = encoded_rows(kv_c, k_pe, scale, layout=layout, scale_format=scale_format)
    insert_k_cache(rows, kv_cache, slot_mapping)


def _stored_at(kv_cache: Tensor, slot_mapping: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    return stored_rows(kv_cache, slot_mapping // block_size, slot_mapping % block_size)


def mla_gather_codes(
    kv_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> Tensor:
    stored, _ = _stored_at(kv_cache, slot_mapping, block_size)
    return stored


def _bf16_of(stored: Tensor, scale: Tensor | None, layout: str) -> Tensor:
    """Return FP8 rows as bf16 bit patterns; values are rounded once."""
    values = values_of(stored, torch.uint8, layout)
    if scale is not None:
        values = values * single(scale)
    return values.to(torch.bfloat16).view(torch.int16)


def mla_dequantize_rows(codes: Tensor, scale: Tensor | None = None, *, layout: str) -> Tensor:
    return dense(_bf16_of(codes, scale, layout).view(torch.bfloat16))


def mla_gather_kv(
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
    *,
    block_size: int,
    layout: str,
) -> Tensor:
    stored, exists = _stored_at(kv_cache, slot_mapping, block_size)
    if layout == PlainLayout.tag:
        return stored.view(kv_cache.dtype)
    # absent rows have code 0, which would become NaN with an infinite scale
    rows = torch.where(exists[:, None], _bf16_of(stored, scale, layout), 0)
    return rows.view(torch.bfloat16)


def mla_absorb_q(
    q_nope: Tensor, q_pe: Tensor, w_uk_t: Tensor, q_scale: Tensor | None = None
) -> Tensor:
    q = torch.cat([products_of_heads(q_nope, w_uk_t), q_pe], -1)
    if q_scale is None:
        return q
    return as_e4m3(dense(per_tensor_codes(q, q_scale)))


def mla_expand_kv(kv_c: Tensor, w_kv_b: Tensor, num_valid: Tensor) -> Tensor:
    is_valid = torch.arange(kv_c.shape[0], device=kv_c.device) < single(num_valid)
    expanded = torch.nn.functional.linear(kv_c, w_kv_b.flatten(0, 1))
    result: Tensor = dense(torch.where(is_valid[:, None], expanded, 0.0))
    return result.view(kv_c.shape[0], *w_kv_b.shape[:2])


def mla_v_up(x: Tensor, w_uv: Tensor) -> Tensor:
    return dense(products_of_heads(x, w_uv)).flatten(1)


def quantize_per_tensor(x: Tensor) -> PerTensor:
    values = rounded_values(x)
    amax = pad(values.abs().flatten(), (0, 1)).amax(0, keepdim=True).clamp(min=_LEAST_AMAX)
    scale = quotient(torch.full_like(amax, FP8_MAX), amax)
    codes = dense(codes_of(values * scale))
    return PerTensor(as_e4m3(codes), quotient(torch.ones_like(scale), scale))


KEYS_AT_A_TIME = 128
"""Keys of each token in one iteration of a decode."""


class Decode(NamedTuple):
    """The arguments of ``mla_decode`` or ``mla_sparse`` that every chunk of the keys needs.

    Args:
        q: Queries, float32.
        seq_lens: Number of keys of each token.
        req_indices: Row of ``block_table`` for each token.
        block_table: Blocks of each request; or, with ``listed``, the slots of each token.
        kv_cache: The cache.
        scale: Factor of the product of a query and a row.
        kv_lora_rank: Number of leading values of a row that are the value vector.
        block_size: Rows per block.
        layout: Tag of the cache's layout.
        rounded: Dtype to which P and the output are rounded.
        listed: Whether ``block_table`` lists slots.
    """

    q: Tensor
    seq_lens: Tensor
    req_indices: Tensor
    block_table: Tensor
    kv_cache: Tensor
    scale: Tensor
    kv_lora_rank: int
    block_size: int
    layout: str
    rounded: torch.dtype
    listed: bool


class Running(NamedTuple):
    """State of the online softmax: maximum logit, sum of P, and sum of P V."""

    row_max: Tensor
    row_sum: Tensor
    total: Tensor


def locate_slots(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the block of each slot and the row in the block; block -1 for negative slots."""
    return torch.where(slots >= 0, slots // block_size, ABSENT), slots % block_size


def stored_rows(kv_cache: Tensor, pages: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stored rows at (block, row), and the mask of existing blocks. Floats are returned
    as integers with the same bits; rows of absent blocks are 0."""
    exists = (pages >= 0) & (pages < kv_cache.shape[0])
    stored = words(kv_cache)
    if isinstance(kv_cache.shape[0], int) and kv_cache.shape[0] == 0:
        return stored.new_zeros((*pages.shape, kv_cache.shape[2])), exists
    page = materialized(torch.where(exists, pages, 0).to(torch.int64))  # offsets may exceed 2**31
    rows = materialized(rows)
    # copy whole rows and mask absent rows afterwards, so that copies are vectorised
    result = torch.ops.aten._unsafe_index.Tensor(stored, [page, rows])
    return torch.where(exists[..., None], result, 0), exists


def values_of(stored: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    """Convert rows from ``stored_rows`` to float32; ``dtype`` is the dtype of the cache. Rows of
    layout "mla_fp8" are not multiplied by the scale of the cache."""
    if layout == PlainLayout.tag:
        return stored.view(dtype).to(torch.float32)
    if layout == MlaFp8Layout.tag:
        return e4m3_values(stored)
    rank, rope = MlaDsFp8Layout.kv_lora_rank, MlaDsFp8Layout.rope_byte
    codes = e4m3_values(stored[..., :rank])
    scales = from_bytes(stored[..., rank:rope], 4).view(torch.float32)
    scaled = codes.unflatten(-1, (-1, MlaDsFp8Layout.quant_block)) * scales[..., None]
    # a compiler rounds to bf16 only where code uses the bits
    latent = scaled.flatten(-2).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    bits = torch.cat([latent, from_bytes(stored[..., rope:], 2)], -1)
    return (bits << 16).view(torch.float32)


def attend_to(call: Decode, running: Running, start: Tensor | int, num_keys: int) -> Running:
    """Update ``running`` with the keys at positions ``start`` .. ``start + num_keys - 1``."""
    position = start + torch.arange(num_keys, device=call.q.device)
    in_length = position < call.seq_lens[:, None]
    entries = (call.block_table, call.req_indices[:, None], position, in_length)
    if call.listed:
        pages, rows = locate_slots(table_entries(*entries), call.block_size)
    else:
        pages, rows = locate(*entries, call.block_size)
    stored, exists = stored_rows(call.kv_cache, pages, rows)
    keys = values_of(stored, call.kv_cache.dtype, call.layout)
    logits = torch.matmul(call.q, keys.mT) * call.scale
    logits = torch.where(exists[:, None, :], logits, -torch.inf)
    row_max = torch.maximum(running.row_max, logits.amax(-1))
    origin = torch.where(row_max == -torch.inf, 0.0, row_max)
    p = torch.exp(logits - origin[..., None])
    factor = torch.exp(running.row_max - origin)
    values = keys[..., : call.kv_lora_rank]
    added = torch.matmul(p.to(call.rounded).to(torch.float32), values)
    return Running(
        row_max,
        running.row_sum * factor + p.sum(-1),
        running.total * factor[..., None] + added,
    )


def attend_in_chunks(call: Decode, running: Running, num_rows: int) -> Running:
    """Update ``running`` with all keys, chunk by chunk, so that memory does not grow with the
    number of keys.

    An eager call on a CPU stops when the token with the most keys has attended to all of them."""
    if runs_on_cpu(call.seq_lens) and call.seq_lens.shape[0] > 0:
        longest = max(int(call.seq_lens.max()), 0)
        num_rows = min(num_rows, round_up(longest, KEYS_AT_A_TIME))
    for start in range(0, num_rows, KEYS_AT_A_TIME):
        running = attend_to(call, running, start, min(KEYS_AT_A_TIME, num_rows - start))
    return running


def start_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    scales: Sequence[Tensor | None],
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int,
    layout: str,
    listed: bool = False,
) -> tuple[Decode, Running]:
    """Return the call, and the softmax state before the first key."""
    scale = torch.full((1,), softmax_scale, dtype=torch.float32, device=q.device)
    for each in scales:
        scale = scale if each is None else scale * single(each)
    rounded = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    tensors = (float_values(q), seq_lens, req_indices, block_table, kv_cache, scale)
    call = Decode(*tensors, kv_lora_rank, block_size, layout, rounded, listed)
    row_sum = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    total = torch.zeros((*q.shape[:2], kv_lora_rank), dtype=torch.float32, device=q.device)
    return call, Running(torch.full_like(row_sum, -torch.inf), row_sum, total)


def finish_decode(call: Decode, running: Running, kv_scale: Tensor | None) -> MlaAttention:
    """Compute the output and log-sum-exp after the last key."""
    row_max, row_sum, total = running
    none = row_sum == 0.0
    out = total / row_sum[..., None]
    if kv_scale is not None:
        out = out * single(kv_scale)
    lse = torch.where(none, -torch.inf, row_max + torch.log(row_sum))
    out = torch.where(none[..., None], 0.0, out)
    return MlaAttention(dense(out.to(call.rounded)), dense(lse))


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None = None,
    plan: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> MlaAttention:
    """Sum in float32. For half-precision queries, P is rounded to the queries' dtype before the
    product with the values, as on tensor cores."""
    tensors = (q, kv_cache, seq_lens, req_indices, block_table)
    call, running = start_decode(
        *tensors,
        (q_scale, kv_scale),
        softmax_scale=softmax_scale,
        block_size=block_size,
        kv_lora_rank=kv_lora_rank,
        layout=layout,
    )
    running = attend_in_chunks(call, running, block_table.shape[1] * block_size)
    return finish_decode(call, running, kv_scale)


def start_sparse(
    q: Tensor, kv_cache: Tensor, indices: Tensor, lens: Tensor, **settings: Any
) -> tuple[Decode, Running]:
    """Return a call of ``mla_sparse``, and the softmax state before the first key."""
    token = torch.arange(q.shape[0], device=q.device)
    rows = (kv_cache, lens, token, indices)
    return start_decode(q, *rows, (), listed=True, **settings)


def mla_sparse(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> MlaAttention:
    """Round P and the output like ``mla_decode``."""
    call, running = start_sparse(
        *(q, kv_cache, indices, lens),
        softmax_scale=softmax_scale,
        block_size=block_size,
        kv_lora_rank=kv_lora_rank,
        layout=layout,
    )
    return finish_decode(call, attend_in_chunks(call, running, indices.shape[1]), None)

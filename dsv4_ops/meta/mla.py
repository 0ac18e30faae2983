"""Fakes of dense MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import MlaDsFp8Layout, PlainLayout
from dsv4_ops.core.types import MlaAttention, PerTensor


def mla_gather_codes(kv_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    return kv_cache.new_empty((slot_mapping.shape[0], kv_cache.shape[2]))


def mla_dequantize_rows(codes: Tensor, layout: str) -> Tensor:
    is_tiled = layout == MlaDsFp8Layout.tag
    width = MlaDsFp8Layout.width if is_tiled else codes.shape[1]
    return codes.new_empty((codes.shape[0], width), dtype=torch.bfloat16)


def mla_gather_kv(kv_cache: Tensor, slot_mapping: Tensor, layout: str) -> Tensor:
    rows = mla_gather_codes(kv_cache, slot_mapping)
    return rows if layout == PlainLayout.tag else mla_dequantize_rows(rows, layout)


def mla_absorb_q(q_nope: Tensor, q_pe: Tensor, w_uk_t: Tensor, q_scale: Tensor | None) -> Tensor:
    width = w_uk_t.shape[2] + q_pe.shape[2]
    dtype = q_nope.dtype if q_scale is None else torch.float8_e4m3fn
    return q_nope.new_empty((*q_nope.shape[:2], width), dtype=dtype)


def mla_expand_kv(kv_c: Tensor, w_kv_b: Tensor) -> Tensor:
    return kv_c.new_empty((kv_c.shape[0], *w_kv_b.shape[:2]))


def mla_v_up(x: Tensor, w_uv: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w_uv.shape[0] * w_uv.shape[2]))


def quantize_per_tensor(x: Tensor) -> PerTensor:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return PerTensor(codes, x.new_empty(1, dtype=torch.float32))


def mla_decode(q: Tensor, kv_lora_rank: int) -> MlaAttention:
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_empty((*q.shape[:2], kv_lora_rank), dtype=dtype)
    return MlaAttention(out, q.new_empty(q.shape[:2], dtype=torch.float32))


mla_sparse = mla_decode

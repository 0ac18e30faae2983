"""Queries and keys before attention: norm, rotation, and the insert of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.types import InsertedQuery
from dsv4_ops.reference.common import dense
from dsv4_ops.reference.kv_cache import insert_bits
from dsv4_ops.reference.plain_cache import insert_k_cache_functional
from dsv4_ops.reference.quantization import bf16_bits
from dsv4_ops.reference.rotation import rotate_tail

NAN_BITS = 0x7FC0
"""What the cache holds for a NaN that comes out of the rotation: its payload is left to none."""


def _normed(q: Tensor, eps: float) -> Tensor:
    values = q.to(torch.float32)
    return values * torch.rsqrt((values * values).mean(-1, keepdim=True) + eps)


def _rotated_bits(kv: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """bf16 patterns, int32, of rotated keys; those of values that are not rotated untouched."""
    first = kv.shape[1] - cos_sin_cache.shape[1]
    rope = rotate_tail(kv[:, first:].to(torch.float32), positions, cos_sin_cache)
    rope_bits = torch.where(rope.isnan(), NAN_BITS, bf16_bits(rope.to(torch.bfloat16)))
    return torch.cat([bf16_bits(kv[:, :first]), rope_bits], 1)


def qnorm_rope_kv_insert_functional(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str,
) -> InsertedQuery:
    rotated = rotate_tail(_normed(q, eps), positions, cos_sin_cache)
    q_out = dense(rotated.to(torch.bfloat16))
    num_slots = slot_mapping.shape[0]
    bits = _rotated_bits(kv[:num_slots], positions[:num_slots], cos_sin_cache)
    if layout == MainLayout.tag:
        return InsertedQuery(q_out, insert_bits(bits, k_cache, slot_mapping, block_size))
    rows = bits.to(torch.int16)
    return InsertedQuery(q_out, insert_k_cache_functional(rows, k_cache, slot_mapping))


def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str,
) -> Tensor:
    q_out, written = qnorm_rope_kv_insert_functional(
        q,
        kv,
        k_cache,
        slot_mapping,
        positions,
        cos_sin_cache,
        eps=eps,
        block_size=block_size,
        layout=layout,
    )
    k_cache.copy_(written)
    return q_out

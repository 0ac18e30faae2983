"""Fakes of what happens to queries and keys before attention."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.core.types import InsertedQuery


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
    return q.new_empty(q.shape)


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
    return InsertedQuery(q.new_empty(q.shape), k_cache.new_empty(k_cache.shape))

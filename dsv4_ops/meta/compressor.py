"""Fakes of the compressor."""

from __future__ import annotations

from torch import Tensor


def compress_and_insert(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> None:
    return None


def compress_and_insert_functional(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> Tensor:
    return k_cache.new_empty(k_cache.shape)

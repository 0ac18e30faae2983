"""Fake of everything that a C4 layer writes before it selects rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import C4Step


def insert_c4_step(
    q: Tensor,
    kv: Tensor,
    kv_score: Tensor,
    indexer_q: Tensor,
    indexer_weights: Tensor,
    indexer_kv_score: Tensor,
    swa_cache: Tensor,
    swa_slot_mapping: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    states: Tensor,
    k_cache: Tensor,
    indexer_ape: Tensor,
    indexer_norm_weight: Tensor,
    indexer_states: Tensor,
    indexer_cache: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    softmax_scale: float,
    compress_ratio: int,
    state_block_size: int,
    swa_block_size: int,
    block_size: int,
) -> C4Step:
    return C4Step(
        q.new_empty(q.shape),
        indexer_q.new_empty(indexer_q.shape, dtype=torch.float8_e4m3fn),
        indexer_q.new_empty(indexer_q.shape[:2], dtype=torch.float32),
    )

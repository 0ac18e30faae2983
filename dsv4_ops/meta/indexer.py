"""Fakes of the lightning indexer's queries and logits."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import IndexerQuery


def indexer_quantize_q(
    q: Tensor, weights: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, softmax_scale: float
) -> IndexerQuery:
    codes = q.new_empty(q.shape, dtype=torch.float8_e4m3fn)
    return IndexerQuery(codes, q.new_empty(q.shape[:2], dtype=torch.float32))


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
    impl: str = "auto",
) -> Tensor:
    return weights.new_empty((q.shape[0], num_rows))


def indexer_logits_ragged(
    q: Tensor, weights: Tensor, k: Tensor, scales: Tensor, row_start: Tensor, row_stop: Tensor
) -> Tensor:
    return weights.new_empty((q.shape[0], k.shape[0]))

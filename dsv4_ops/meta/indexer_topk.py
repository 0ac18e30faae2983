"""Fakes of the lightning indexer's selection."""

from __future__ import annotations

import torch
from torch import Tensor


def indexer_topk(logits: Tensor, lens: Tensor, *, topk: int) -> Tensor:
    return logits.new_empty((logits.shape[0], topk), dtype=torch.int32)


def indexer_select(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    layout: str,
    slots: bool = False,
    impl: str = "auto",
) -> Tensor:
    return positions.new_empty((q.shape[0], topk), dtype=torch.int32)

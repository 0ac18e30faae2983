"""Fakes of the lightning indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.types import IndexerQuery


def gather_indexer_k(k_cache: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    codes = k_cache.new_empty((num_rows, IndexerLayout.head_dim))
    return codes, k_cache.new_empty((num_rows,), dtype=torch.float32)


def paged_mqa_logits_metadata(seq_lens: Tensor, num_sms: int) -> Tensor:
    return seq_lens.new_empty((num_sms + 1, 2))


def indexer_quantize_q(q: Tensor) -> IndexerQuery:
    codes = q.new_empty(q.shape, dtype=torch.float8_e4m3fn)
    return IndexerQuery(codes, q.new_empty(q.shape[:2], dtype=torch.float32))


def indexer_logits(q: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    return weights.new_empty((q.shape[0], num_rows))


def indexer_logits_ragged(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    return weights.new_empty((q.shape[0], k.shape[0]))


def indexer_topk(logits: Tensor, topk: int) -> Tensor:
    return logits.new_empty((logits.shape[0], topk), dtype=torch.int32)


def indexer_select(q: Tensor, positions: Tensor, topk: int) -> Tensor:
    return positions.new_empty((q.shape[0], topk), dtype=torch.int32)

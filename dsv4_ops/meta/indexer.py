"""Fakes of the lightning indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.types import IndexerQuery


def quantize_and_insert_indexer_k(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> None:
    return None


def quantize_and_insert_indexer_k_functional(
    k: Tensor, k_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> Tensor:
    return k_cache.new_empty(k_cache.shape)


def gather_indexer_k(
    k_cache: Tensor,
    cu_seq_lens: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    codes = k_cache.new_empty((num_rows, IndexerLayout.head_dim))
    return codes, k_cache.new_empty((num_rows,), dtype=torch.float32)


def paged_mqa_logits_metadata(seq_lens: Tensor, *, block_size: int, num_sms: int) -> Tensor:
    return seq_lens.new_empty((num_sms + 1, 2))


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

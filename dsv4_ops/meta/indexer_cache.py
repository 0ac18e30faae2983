"""Fakes of the lightning indexer's key cache."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout


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

"""Fakes of the compressed-index stages."""

from __future__ import annotations

from torch import Tensor


def global_topk_indices_and_lens(
    topk_indices: Tensor, req_indices: Tensor, block_table: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor]:
    num_tokens, topk = topk_indices.shape
    return topk_indices.new_empty((num_tokens, topk)), topk_indices.new_empty((num_tokens,))


def dense_compressed_indices(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    max_compressed: int,
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    return block_table.new_empty((num_tokens, max_compressed)), block_table.new_empty((num_tokens,))

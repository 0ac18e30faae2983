"""Fakes of window, top-k and sparse index building."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.core.layout import combined_width, mixed_width


def swa_indices_and_lens(
    positions: Tensor, block_table: Tensor, window_size: int
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    return block_table.new_empty((num_tokens, window_size)), block_table.new_empty((num_tokens,))


def prefill_gather_lens(seq_lens: Tensor) -> Tensor:
    return seq_lens.new_empty(seq_lens.shape)


def global_topk_indices_and_lens(topk_indices: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, topk = topk_indices.shape
    return topk_indices.new_empty((num_tokens, topk)), topk_indices.new_empty((num_tokens,))


def dense_compressed_indices(
    positions: Tensor, block_table: Tensor, max_compressed: int
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    return block_table.new_empty((num_tokens, max_compressed)), block_table.new_empty((num_tokens,))


def combine_topk_swa_indices(
    topk_indices: Tensor, positions: Tensor, window_size: int, topk: int
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    indices = topk_indices.new_empty((num_tokens, combined_width(topk, window_size)))
    return indices, topk_indices.new_empty((num_tokens,))


def mixed_sparse_indices(
    decode_swa_indices: Tensor,
    decode_compressed_indices: Tensor | None,
    positions: Tensor,
    req_indices: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    compressed = 0 if decode_compressed_indices is None else decode_compressed_indices.shape[1]
    width = mixed_width(decode_swa_indices.shape[1], topk, compressed)
    return req_indices.new_empty((num_tokens, width)), req_indices.new_empty((num_tokens,))

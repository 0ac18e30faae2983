"""Fakes of window, top-k and sparse index building."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.core.layout import combined_width, mixed_width


def swa_indices_and_lens(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window_size: int,
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    return block_table.new_empty((num_tokens, window_size)), block_table.new_empty((num_tokens,))


def prefill_gather_lens(query_start_loc: Tensor, seq_lens: Tensor, *, window_size: int) -> Tensor:
    return seq_lens.new_empty(seq_lens.shape)


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


def combine_topk_swa_indices(
    topk_indices: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    workspace_rows: int,
    swa_offset: int,
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    indices = topk_indices.new_empty((num_tokens, combined_width(topk, window_size)))
    return indices, topk_indices.new_empty((num_tokens,))


def mixed_sparse_indices(
    decode_swa_indices: Tensor,
    decode_compressed_indices: Tensor | None,
    decode_compressed_lens: Tensor | None,
    prefill_topk_indices: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    compressed_block_table: Tensor | None,
    *,
    swa_block_size: int,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    decode_compressed_indices_are_local: bool,
    swa_block_span: int | None,
    compressed_block_span: int | None,
) -> tuple[Tensor, Tensor]:
    num_tokens = positions.shape[0]
    compressed = 0 if decode_compressed_indices is None else decode_compressed_indices.shape[1]
    width = mixed_width(decode_swa_indices.shape[1], topk, compressed)
    return req_indices.new_empty((num_tokens, width)), req_indices.new_empty((num_tokens,))

"""Fakes of the prefill chunking stages."""

from __future__ import annotations

from torch import Tensor


def split_prefill_chunks(
    seq_lens: Tensor,
    query_lens: Tensor,
    *,
    workspace_size: int,
    max_logits_bytes: int,
    max_chunks: int,
    request_offset: int,
) -> tuple[Tensor, Tensor]:
    return seq_lens.new_empty((max_chunks, 4)), seq_lens.new_empty((1,))


def prefill_row_bounds(
    positions: Tensor, req_indices: Tensor, seq_lens: Tensor, *, compress_ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = positions.shape[0]
    cu_seq_lens = seq_lens.new_empty((seq_lens.shape[0] + 1,))
    return cu_seq_lens, seq_lens.new_empty((num_tokens,)), seq_lens.new_empty((num_tokens,))


def prefill_chunk_row_bounds(
    positions: Tensor,
    req_indices: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    chunk: Tensor,
    *,
    compress_ratio: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return prefill_row_bounds(positions, req_indices, seq_lens, compress_ratio=compress_ratio)

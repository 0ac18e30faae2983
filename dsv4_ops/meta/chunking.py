"""Fakes of the ops that plan prefill chunks."""

from __future__ import annotations

from torch import Tensor


def split_prefill_chunks(seq_lens: Tensor, max_chunks: int) -> tuple[Tensor, Tensor]:
    return seq_lens.new_empty((max_chunks, 4)), seq_lens.new_empty((1,))


def prefill_row_bounds(positions: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = positions.shape[0]
    cu_seq_lens = seq_lens.new_empty((seq_lens.shape[0] + 1,))
    return cu_seq_lens, seq_lens.new_empty((num_tokens,)), seq_lens.new_empty((num_tokens,))


prefill_chunk_row_bounds = prefill_row_bounds

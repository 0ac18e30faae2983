"""Fakes of the sliding-window stages."""

from __future__ import annotations

from torch import Tensor


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

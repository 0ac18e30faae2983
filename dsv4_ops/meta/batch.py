"""Fakes of the ops that split and search batches."""

from __future__ import annotations

import torch
from torch import Tensor


def split_decodes_and_prefills(query_start_loc: Tensor) -> Tensor:
    return query_start_loc.new_empty((4,))


def token_map(query_start_loc: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    req_indices = query_start_loc.new_empty((num_tokens,))
    return req_indices, query_start_loc.new_empty((num_tokens,), dtype=torch.int64)


def flatten_decode(query_start_loc: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    return query_start_loc.new_empty((num_tokens,)), query_start_loc.new_empty((num_tokens,))


def expand_block_table(block_table: Tensor, req_indices: Tensor) -> Tensor:
    return block_table.new_empty((req_indices.shape[0], block_table.shape[1]))


def mtp_seq_lens(seq_lens: Tensor, next_n: int) -> Tensor:
    return seq_lens.new_empty((seq_lens.shape[0], next_n))

"""Sliding-window slots per token, and the rows a prefill gathers."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import ABSENT
from dsv4_ops.reference.common import int32_slots, query_lens, table_entries, valid_tokens


def swa_indices_and_lens(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window_size: int,
) -> tuple[Tensor, Tensor]:
    valid = valid_tokens(positions, req_indices, block_table.shape[0])
    position = torch.where(valid, positions, ABSENT).to(torch.int32)
    lens = position.clamp(max=window_size - 1) + 1
    offset = torch.arange(window_size, dtype=torch.int32, device=positions.device)
    key = (position - (window_size - 1)).clamp(min=0)[:, None] + offset
    pages = table_entries(
        block_table, req_indices[:, None], key // block_size, offset < lens[:, None]
    )
    return int32_slots(pages, key % block_size, block_size), lens


def prefill_gather_lens(query_start_loc: Tensor, seq_lens: Tensor, *, window_size: int) -> Tensor:
    lens = query_lens(query_start_loc)
    length = seq_lens.clamp(min=0)
    context = (length - lens).clamp(min=0, max=window_size - 1)
    return torch.minimum(lens + context, length)

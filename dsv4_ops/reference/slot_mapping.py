"""Compute the slots of the compressed rows that a step completes."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.reference.common import quotient, remainder, table_entries, valid_tokens


def compressed_slot_mapping(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    cp_world_size: int,
    cp_interleave: int,
) -> Tensor:
    completes = valid_tokens(positions, req_indices, block_table.shape[0]) & (slot_mapping >= 0)
    position = torch.where(completes, positions, 0).to(torch.int32)
    completes = completes & (remainder(position, compress_ratio) == compress_ratio - 1)
    local = position
    if cp_world_size > 1:
        # torch would wrap a larger divisor to int32, perhaps to 0; no position is as large
        turn = min(cp_interleave * cp_world_size, INT32_MAX)
        local = quotient(position, turn) * cp_interleave + remainder(position, cp_interleave)
    row = quotient(local, compress_ratio)
    column = quotient(row, block_size)
    pages = table_entries(block_table, req_indices, column, completes).long()
    return torch.where(pages >= 0, pages * block_size + remainder(row, block_size), ABSENT)

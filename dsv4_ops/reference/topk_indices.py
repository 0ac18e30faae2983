"""Slots of the compressed rows that a token attends to: selected ones (C4) or all of them
(C128)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.reference.common import int32_slots, table_entries, valid_tokens, visible_rows


def global_topk_indices_and_lens(
    topk_indices: Tensor, req_indices: Tensor, block_table: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor]:
    columns = topk_indices // block_size
    pages = table_entries(block_table, req_indices[:, None], columns, topk_indices >= 0)
    indices = int32_slots(pages, topk_indices % block_size, block_size)
    num_tokens, topk = topk_indices.shape
    if topk == 0:  # a maximum over nothing does not exist
        return indices, indices.new_zeros((num_tokens,))
    one_past = torch.arange(1, topk + 1, dtype=torch.int32, device=indices.device)
    return indices, torch.where(indices >= 0, one_past, 0).amax(1)


def dense_compressed_indices(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    max_compressed: int,
) -> tuple[Tensor, Tensor]:
    valid = valid_tokens(positions, req_indices, block_table.shape[0])
    lens = torch.where(valid, visible_rows(positions, compress_ratio).clamp(max=max_compressed), 0)
    row = torch.arange(max_compressed, dtype=torch.int32, device=positions.device)
    pages = table_entries(block_table, req_indices[:, None], row // block_size, row < lens[:, None])
    return int32_slots(pages, row % block_size, block_size), lens

"""Index matrices that hold the selected compressed rows and the window of every token."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import round_up
from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.reference.common import (
    int32_slots,
    masked_index,
    table_entries,
    valid_tokens,
    visible_rows,
)
from dsv4_ops.reference.swa import swa_indices_and_lens

KEY_BLOCK = 128
"""FlashMLA's sparse prefill takes key counts that are a multiple of this."""

ROW_ALIGNMENT = 4
"""FlashInfer reads 16 bytes of indices at a time."""


def combined_width(topk: int, window_size: int) -> int:
    """Columns of ``combine_topk_swa_indices``."""
    return round_up(topk + window_size, KEY_BLOCK)


def mixed_width(swa_width: int, topk: int, compressed_width: int) -> int:
    """Columns of ``mixed_sparse_indices``."""
    return swa_width + round_up(max(topk, compressed_width), ROW_ALIGNMENT)


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
    num_reqs = seq_lens.shape[0]
    valid = valid_tokens(positions, req_indices, num_reqs)
    selected = torch.where(valid, visible_rows(positions, compress_ratio).clamp(max=topk), 0)
    length = visible_rows(positions, 1)
    window = torch.where(valid, length.clamp(max=window_size), 0)
    gathered = masked_index(gather_lens, valid, [req_indices], 0).to(torch.int64)
    first = masked_index(seq_lens, valid, [req_indices], 0) - gathered
    column = torch.arange(combined_width(topk, window_size), device=positions.device)
    in_topk = column < selected[:, None]
    token = torch.arange(positions.shape[0], device=positions.device)[:, None]
    chosen = masked_index(topk_indices, in_topk, [token, column], ABSENT).to(torch.int64)
    chosen_exists = in_topk & (chosen >= 0) & (chosen < swa_offset)
    # the key of the first window column, counted from the first gathered row
    oldest = (length - window).to(torch.int64) - first
    key = oldest[:, None] + column - selected[:, None]
    in_window = ~in_topk & (column < (selected + window)[:, None])
    row = swa_offset + key
    key_exists = in_window & (key >= 0) & (key < gathered[:, None]) & (row < workspace_rows)
    local = torch.where(in_topk, chosen, row)
    base = torch.where(valid, req_indices, 0).to(torch.int64) * workspace_rows
    index = base[:, None] + local
    exists = (chosen_exists | key_exists) & (index <= INT32_MAX)
    return torch.where(exists, index, ABSENT).to(torch.int32), selected + window


def spanned(slots: Tensor, block_size: int, span: int | None) -> Tensor:
    """Slots of pages that are ``span`` rows apart instead of ``block_size``; negative ones are
    -1."""
    if span is None:
        return torch.where(slots >= 0, slots, ABSENT)
    return int32_slots(
        torch.where(slots >= 0, slots // block_size, ABSENT), slots % block_size, span
    )


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
    num_decode_tokens, swa_width = decode_swa_indices.shape
    token = torch.arange(positions.shape[0], device=positions.device)
    valid = valid_tokens(positions, req_indices, swa_block_table.shape[0])
    decode, prefill = valid & (token < num_decode_tokens), valid & (token >= num_decode_tokens)

    window, _ = swa_indices_and_lens(
        torch.where(prefill, positions, ABSENT),
        req_indices,
        swa_block_table,
        block_size=swa_block_size,
        window_size=window_size,
    )
    window = torch.nn.functional.pad(window, (0, swa_width - window_size), value=ABSENT)
    given = _entries(decode_swa_indices, token, decode)
    swa = spanned(torch.where(decode[:, None], given, window), swa_block_size, swa_block_span)

    if decode_compressed_indices is None:
        decode_compressed_indices = decode_swa_indices[:, :0]
    width = mixed_width(swa_width, topk, decode_compressed_indices.shape[1]) - swa_width
    visible = torch.where(prefill, visible_rows(positions, compress_ratio).clamp(max=topk), 0)
    column = torch.arange(width, dtype=torch.int32, device=positions.device)
    decoded = _entries(decode_compressed_indices, token, decode, width)
    chosen = _entries(prefill_topk_indices, token - num_decode_tokens, prefill, width)
    chosen = torch.where(column < visible[:, None], chosen, ABSENT)
    table = swa_block_table if compressed_block_table is None else compressed_block_table
    compressed = torch.where(decode[:, None], decoded, chosen)
    local = (decode | prefill) if decode_compressed_indices_are_local else prefill
    slots = _local_slots(compressed, req_indices, local, table, compressed_block_size)
    compressed = torch.where(local[:, None], slots, compressed)

    if decode_compressed_lens is not None:
        most = decode_compressed_indices.shape[1]
        decoded_lens = masked_index(decode_compressed_lens, decode, [token], 0).clamp(0, most)
    elif decode_compressed_indices_are_local:
        decoded_lens = torch.where(compressed >= 0, column + 1, 0).amax(1)
    else:
        decoded_lens = torch.full_like(req_indices, decode_compressed_indices.shape[1])
    lens = torch.where(decode, decoded_lens, visible)
    compressed = torch.where(column < lens[:, None], compressed, ABSENT)
    compressed = spanned(compressed, compressed_block_size, compressed_block_span)
    return torch.cat([swa, compressed], 1), torch.where(valid, swa_width + lens, 0)


def _entries(values: Tensor, row: Tensor, wanted: Tensor, width: int | None = None) -> Tensor:
    """``values[row]`` for wanted rows, else -1; of ``width`` columns, -1 behind the last one."""
    columns = values.shape[1]
    column = torch.arange(columns if width is None else width, device=values.device)
    inside = wanted[:, None] & (column < columns)
    return masked_index(values, inside, [row[:, None], column], ABSENT)


def _local_slots(
    rows: Tensor, req_indices: Tensor, wanted: Tensor, block_table: Tensor, block_size: int
) -> Tensor:
    """Slots of request-local rows; -1 where unwanted, negative, or not in the table."""
    inside = wanted[:, None] & (rows >= 0)
    pages = table_entries(block_table, req_indices[:, None], rows // block_size, inside)
    return int32_slots(pages, rows % block_size, block_size)

"""References of the ops that build window indices, top-k indices and sparse indices."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import combined_width, mixed_width
from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.reference.common import (
    int32_slots,
    masked_index,
    query_lens,
    quotient,
    remainder,
    table_entries,
    valid_tokens,
    visible_rows,
)


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
        block_table, req_indices[:, None], quotient(key, block_size), offset < lens[:, None]
    )
    return int32_slots(pages, remainder(key, block_size), block_size), lens


def prefill_gather_lens(query_start_loc: Tensor, seq_lens: Tensor, *, window_size: int) -> Tensor:
    lens = query_lens(query_start_loc)
    length = seq_lens.clamp(min=0)
    context = (length - lens).clamp(min=0, max=window_size - 1)
    return torch.minimum(lens + context, length)


def global_topk_indices_and_lens(
    topk_indices: Tensor, req_indices: Tensor, block_table: Tensor, *, block_size: int
) -> tuple[Tensor, Tensor]:
    columns = quotient(topk_indices, block_size)
    pages = table_entries(block_table, req_indices[:, None], columns, topk_indices >= 0)
    indices = int32_slots(pages, remainder(topk_indices, block_size), block_size)
    num_tokens, topk = topk_indices.shape
    if topk == 0:  # amax refuses an empty dimension
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
    columns = quotient(row, block_size)
    pages = table_entries(block_table, req_indices[:, None], columns, row < lens[:, None])
    return int32_slots(pages, remainder(row, block_size), block_size), lens


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
    valid = valid_tokens(positions, req_indices, seq_lens.shape[0])
    selected = torch.where(valid, visible_rows(positions, compress_ratio).clamp(max=topk), 0)
    length = visible_rows(positions, 1).to(torch.int64)
    window = torch.where(valid, length.clamp(max=window_size), 0).to(torch.int32)
    gathered = masked_index(gather_lens, valid, [req_indices], 0).to(torch.int64)
    first = masked_index(seq_lens, valid, [req_indices], 0) - gathered
    # The workspace rows of a request start at row ``base``. If column c of the result is for a
    # window row, the column holds row base + c + shift. Bounds are computed once per token in 64
    # bits, so that each entry needs only a few 32-bit operations.
    base = torch.where(valid, req_indices, 0).to(torch.int64) * workspace_rows
    fitting = INT32_MAX + 1 - base
    shift = swa_offset + length - window - first - selected
    width = combined_width(topk, window_size)
    begin = torch.maximum(selected.to(torch.int64), swa_offset - shift).clamp(0, width)
    gathered_stop = swa_offset + gathered.clamp(max=workspace_rows - swa_offset)
    stop = torch.minimum(torch.minimum(gathered_stop, fitting) - shift, selected + window)
    stop = stop.clamp(0, width)
    chosen_stop = fitting.clamp(0, swa_offset)
    chosen_base = torch.where(chosen_stop > 0, base, 0)
    window_base = torch.where(begin < stop, base + shift, 0)
    selected, begin, stop, chosen_stop, chosen_base, window_base = (
        bound.to(torch.int32)[:, None]
        for bound in (selected, begin, stop, chosen_stop, chosen_base, window_base)
    )
    column = torch.arange(width, dtype=torch.int32, device=positions.device)
    token = torch.arange(positions.shape[0], device=positions.device)[:, None]
    chosen = masked_index(topk_indices, column < selected, [token, column], ABSENT)
    exists = (chosen >= 0) & (chosen < chosen_stop)
    from_topk = torch.where(exists, torch.where(exists, chosen, 0) + chosen_base, ABSENT)
    in_window = (column >= begin) & (column < stop)
    index = torch.where(in_window, column + window_base, from_topk)
    return index, selected.squeeze(1) + window


def spanned(slots: Tensor, block_size: int, span: int | None) -> Tensor:
    """Convert slots from blocks ``block_size`` rows apart to blocks ``span`` rows apart, unless
    ``span`` is None; -1 for negative slots and results beyond int32."""
    if span is None:
        return torch.where(slots >= 0, slots, ABSENT)
    pages = quotient(slots, block_size).to(torch.int64)
    places = pages * span + remainder(slots, block_size)
    return torch.where((slots >= 0) & (places <= INT32_MAX), places, ABSENT).to(torch.int32)


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
    decode_slots = _entries(decode_swa_indices, token, decode)
    swa = spanned(
        torch.where(decode[:, None], decode_slots, window), swa_block_size, swa_block_span
    )

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
    elif decode_compressed_indices_are_local and width > 0:  # amax refuses an empty dimension
        decoded_lens = torch.where(compressed >= 0, column + 1, 0).amax(1)
    else:
        decoded_lens = torch.full_like(req_indices, decode_compressed_indices.shape[1])
    lens = torch.where(decode, decoded_lens, visible)
    compressed = torch.where(column < lens[:, None], compressed, ABSENT)
    compressed = spanned(compressed, compressed_block_size, compressed_block_span)
    return torch.cat([swa, compressed], 1), torch.where(valid, swa_width + lens, 0)


def _entries(values: Tensor, row: Tensor, mask: Tensor, width: int | None = None) -> Tensor:
    """Return ``values[row]`` where ``mask`` is True, else -1; pad with -1 to ``width`` columns."""
    columns = values.shape[1]
    column = torch.arange(columns if width is None else width, device=values.device)
    inside = mask[:, None] & (column < columns)
    return masked_index(values, inside, [row[:, None], column], ABSENT)


def _local_slots(
    rows: Tensor, req_indices: Tensor, mask: Tensor, block_table: Tensor, block_size: int
) -> Tensor:
    """Return the slots of request-local rows; -1 for rows that are masked, negative, or not in the
    table."""
    inside = mask[:, None] & (rows >= 0)
    columns = quotient(rows, block_size)
    pages = table_entries(block_table, req_indices[:, None], columns, inside)
    return int32_slots(pages, remainder(rows, block_size), block_size)

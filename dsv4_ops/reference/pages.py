"""Bounded reads and writes of paged cache rows, by slot or by block table, without host syncs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.layout import QuantizedLayout
from dsv4_ops.reference.common import masked_index, materialized, runs_on_cpu, table_entries, take


class Columns(NamedTuple):
    """Where a block holds values of its rows: ``width`` values of row r start at ``first + r *
    stride``."""

    block_size: int
    first: int
    stride: int
    width: int

    def places(self, device: torch.device) -> Tensor:
        """Return the position of every value in a block, int64 [block_size, width]."""
        row = torch.arange(self.block_size, device=device)[:, None]
        return row * self.stride + torch.arange(self.first, self.first + self.width, device=device)

    def view(self, cache: Tensor) -> Tensor:
        """Return ``cache`` [num_blocks, page] as [num_blocks, block_size, width]."""
        stop = self.first + (self.block_size - 1) * self.stride + self.width
        return cache[:, self.first : stop].unfold(1, self.width, self.stride)


def words(values: Tensor) -> Tensor:
    """View floats as integers of the same size: compilers keep NaN payloads only in integers."""
    if not values.is_floating_point():
        return values
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


def scatter_rows(cache: Tensor, values: Tensor, slot_mapping: Tensor, columns: Columns) -> Tensor:
    """Return a copy of ``cache`` with row t of ``values`` at slot ``slot_mapping[t]``.

    Args:
        cache: [num_blocks, page].
        values: [num_tokens, width].
        slot_mapping: int64 [num_tokens]; rows whose slot does not exist are skipped.
        columns: Position of each row's values in its block.

    Not every compiler can skip a write, so a token without a slot repeats the write of the first
    token that has a slot. If no token has a slot, all tokens rewrite row 0 with its current values.
    """
    # in torch 2.11, a trace must not compare the size of a slice of ``values`` with 0
    num_tokens, num_blocks, block_size = slot_mapping.shape[0], cache.shape[0], columns.block_size
    if num_tokens == 0 or num_blocks == 0:
        return cache.clone(memory_format=torch.contiguous_format)
    token = torch.arange(num_tokens, device=cache.device)
    exists = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    first = torch.where(exists, token, num_tokens - 1).amin(0, keepdim=True)
    source = torch.where(exists, token, first)
    values_of_rows = materialized(take(exists, source))
    slot = materialized(torch.where(values_of_rows, take(slot_mapping, source), 0))
    source = materialized(source)
    page = (slot // block_size)[:, None]
    column = take(columns.places(cache.device), slot % block_size)
    old = words(torch.ops.aten._unsafe_index.Tensor(cache, [page, column]))
    rows = torch.where(values_of_rows[:, None], take(words(values), source), old).view(cache.dtype)
    written: Tensor = torch.ops.aten._unsafe_index_put.default(cache, [page, column], rows)
    return written


def write_rows(cache: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Write row t of ``values`` to slot ``slot_mapping[t]`` of ``cache`` [num_blocks, block_size,
    width], in place and without a copy of the cache. Only for calls that are not traced."""
    num_blocks, block_size, _ = cache.shape
    exists = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    slot = slot_mapping[exists]
    words(cache)[slot // block_size, slot % block_size] = words(values)[exists]


def insert_rows(cache: Tensor, values: Tensor, slot_mapping: Tensor, columns: Columns) -> None:
    """Run ``scatter_rows`` in place."""
    if runs_on_cpu(cache):
        write_rows(columns.view(cache), values, slot_mapping)
        return
    cache.copy_(scatter_rows(cache, values, slot_mapping, columns))


def insert_parts(
    layout: QuantizedLayout, parts: dict[int, Tensor], cache: Tensor, slot_mapping: Tensor
) -> None:
    """Insert rows in parts. ``parts`` maps the first byte of each part, counted as in
    ``row_columns``, to the bytes of the part, uint8 [num_tokens, width]."""
    written = cache
    for byte, values in parts.items():
        columns = row_columns(layout, byte, values.shape[1])
        if runs_on_cpu(cache):
            write_rows(columns.view(cache), values, slot_mapping)
        else:
            written = scatter_rows(written, values, slot_mapping, columns)
    if written is not cache:
        cache.copy_(written)


def row_columns(layout: QuantizedLayout, byte: int, width: int) -> Columns:
    """Locate ``width`` bytes of a row in its block. ``byte`` is the index of the first of them,
    counted through the row's data bytes, then its scale bytes."""
    if byte < layout.data_bytes:
        return Columns(layout.block_size, byte, layout.data_bytes, width)
    scales = layout.block_size * layout.data_bytes + byte - layout.data_bytes
    return Columns(layout.block_size, scales, layout.scale_bytes, width)


def gather_rows(cache: Tensor, pages: Tensor, rows: Tensor, columns: Columns) -> Tensor:
    """Read rows [..., width] of ``cache`` [num_blocks, page] at (block, row); zeros if the block
    does not exist. ``columns`` is as for ``scatter_rows``."""
    exists = ((pages >= 0) & (pages < cache.shape[0])).unsqueeze(-1)
    if runs_on_cpu(cache) and cache.shape[0] > 0:
        # copy whole rows, because an index per value takes twenty times as long
        page, row = (torch.where(exists.squeeze(-1), each, 0) for each in (pages, rows))
        return torch.where(exists, columns.view(cache)[page, row], 0)
    column = take(columns.places(cache.device), torch.where(exists.squeeze(-1), rows, 0))
    page, exists, column = torch.broadcast_tensors(pages.unsqueeze(-1), exists, column)
    return masked_index(cache, exists, [page, column], 0)


def locate(
    block_table: Tensor, req_indices: Tensor, positions: Tensor, mask: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return the block of each int64 position of a request, and the row in that block. The block is
    -1 if the position is masked, negative or past the table, or if the table's entry is
    negative."""
    mask = mask & (positions >= 0)
    pages = table_entries(block_table, req_indices, positions // block_size, mask)
    return pages, torch.where(mask, positions % block_size, 0)

"""Inductor IR for [num_tokens, width] matrices of cache slots, for ``swa_indices_and_lens`` and
``dense_compressed_indices``.

Most of a step's metadata is in these matrices, so their kernels must be fast: they do only one
masked table read per entry. Values that depend only on the token are realized as [num_tokens]
buffers, which Inductor fuses into the kernel of ``token_map``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.lowering._compat import FloorDiv, ModularIndexing, Pointwise, lowerings, ops

Value = Any
IndexFn = Callable[[Any], Value]


def realized(like: Any, dtype: torch.dtype, ranges: list[Any], value: IndexFn) -> Any:
    """Realize ``value`` as a buffer, so that Inductor does not inline it into consumers."""
    buffer = Pointwise.create(device=like.get_device(), dtype=dtype, inner_fn=value, ranges=ranges)
    buffer.realize()
    return buffer


def int32(value: int) -> Value:
    """Make an int32 constant."""
    return ops.constant(value, torch.int32)


def token_is_valid(positions: Any, req_indices: Any, num_reqs: Any) -> IndexFn:
    """Build ``reference.common.valid_tokens`` as IR."""
    load_position, load_request = positions.make_loader(), req_indices.make_loader()

    def valid(index: Any) -> Value:
        position, request = load_position(index), load_request(index)
        at_least_0 = ops.logical_and(
            ops.ge(position, ops.constant(0, torch.int64)), ops.ge(request, int32(0))
        )
        below = ops.logical_and(
            ops.lt(position, ops.constant(INT32_MAX, torch.int64)),
            ops.lt(request, ops.index_expr(num_reqs, torch.int32)),
        )
        return ops.logical_and(at_least_0, below)

    return valid


def slot_rows(
    block_table: Any,
    req_indices: Any,
    first: Any | None,
    lens: Any,
    *,
    width: int,
    block_size: int,
) -> Any:
    """Build int32 slots [num_tokens, width]: entry (t, o) is the slot of cache row ``first[t] + o``
    if o < ``lens[t]``, else -1.

    If ``first`` is None, all rows start at 0. ``lens`` must be 0 for tokens whose request is out of
    range. Entries for rows past the table are -1.
    """
    (num_tokens,) = lens.get_size()
    num_reqs, max_blocks = block_table.get_size()
    on_cpu = lens.get_device().type == "cpu"
    load_num_entries, load_request = _row_buffers(block_table, req_indices, first, lens, block_size)
    load_page = block_table.make_loader()
    load_first = first.make_loader() if first is not None else None

    def block_and_row(token: Any, entry: Any) -> tuple[Any, Value]:
        """Return the table column as an index, and the row in its block."""
        if load_first is None:
            row = ops.index_expr(ModularIndexing(entry, 1, block_size), torch.int32)
            return FloorDiv(entry, block_size), row
        key = ops.add(load_first([token]), ops.index_expr(entry, torch.int32))
        # truncation equals floor division, because a key is never negative
        block = ops.truncdiv(key, int32(block_size))
        row = ops.sub(key, ops.mul(block, int32(block_size)))
        # a masked lane reads nothing, but its address must still be near the table
        column = ops.minimum(block, ops.index_expr(max_blocks - 1, torch.int32))
        return ops.indirect_indexing(column, max_blocks, check=False, wrap_neg=False), row

    def table_index(token: Any, entry: Any) -> list[Any]:
        request = ops.indirect_indexing(
            load_request([token]), num_reqs, check=False, wrap_neg=False
        )
        return [request, block_and_row(token, entry)[0]]

    def slot(token: Any, entry: Any) -> Value:
        inside = ops.lt(ops.index_expr(entry, torch.int32), load_num_entries([token]))
        if on_cpu:  # the C++ backend cannot use an outer value in a masked body
            page = ops.masked(inside, lambda: load_page(table_index(token, entry)), ABSENT)
        else:  # Triton reads the values of a row once per thread, but only outside the mask
            index = table_index(token, entry)
            page = ops.masked(inside, lambda: load_page(index), ABSENT)
        usable = ops.logical_and(
            ops.ge(page, int32(0)), ops.le(page, int32(2**31 // block_size - 1))
        )
        if on_cpu:  # int32 overflow is undefined in C++, even for an unused value
            page = ops.where(usable, page, int32(0))
        _, row = block_and_row(token, entry)
        return ops.where(usable, ops.add(ops.mul(page, int32(block_size)), row), int32(ABSENT))

    def flat_slot(index: Any) -> Value:
        return slot(FloorDiv(index[0], width), ModularIndexing(index[0], 1, width))

    # The buffer has one dimension. With two, Inductor would tile 32 x 32 in Triton and vectorise
    # over tokens in C++, as for a transpose; the kernel would be 2 to 4 times slower.
    flat = realized(lens, torch.int32, [num_tokens * width], flat_slot)
    return lowerings[torch.ops.aten.view.default](flat, [num_tokens, width])


def _row_buffers(
    block_table: Any, req_indices: Any, first: Any | None, lens: Any, block_size: int
) -> tuple[Callable[..., Any], ...]:
    """Return loaders of two [num_tokens] buffers: the number of the token's entries that lie in the
    table, and the row of the table that the token reads."""
    (num_tokens,) = lens.get_size()
    max_blocks = block_table.get_size()[1]
    load_len, load_request = lens.make_loader(), req_indices.make_loader()
    load_first = first.make_loader() if first is not None else None

    def num_entries(index: Any) -> Value:
        beyond = ops.index_expr(max_blocks * block_size, torch.int64)
        if load_first is not None:
            beyond = ops.sub(beyond, ops.to_dtype(load_first(index), torch.int64))
        beyond = ops.maximum(beyond, ops.constant(0, torch.int64))
        length = ops.to_dtype(load_len(index), torch.int64)
        return ops.to_dtype(ops.minimum(beyond, length), torch.int32)

    def table_row(index: Any) -> Value:
        exists = ops.gt(load_len(index), int32(0))
        return ops.where(exists, load_request(index), int32(0))

    return tuple(
        realized(lens, torch.int32, [num_tokens], value).make_loader()
        for value in (num_entries, table_row)
    )

"""Addresses in paged caches: what slots and block-table entries that do not exist turn into.

Torch takes a tensor for written to if its pointer leads to a store through a function's result. The
function that stores where slots say thus loads them itself, or is given what a kernel has loaded,
and gives them to ``place_slots``.
"""

import triton
import triton.language as tl

MAX_POSITIONS = tl.constexpr(2**31 - 1)
"""Positions that a token can have; others mean padding."""


@triton.jit
def find_real(position, request, num_reqs):
    """Which tokens are no padding, by their position and request."""
    real = (position >= 0) & (position < MAX_POSITIONS)
    return real & (request >= 0) & (request < num_reqs)


@triton.jit
def place_slots(slot, num_blocks, block_size):
    """int64 page and row of slots, and which of them exist."""
    slot = slot.to(tl.uint64)  # below 0: past every page, in half the instructions
    size = tl.full((), block_size, tl.uint64)
    page, row = slot // size, slot % size
    exists = page < num_blocks
    return tl.where(exists, page, 0).to(tl.int64), row.to(tl.int64), exists


@triton.jit
def locate_positions(table, request, position, wanted, num_blocks, block_size):
    """int64 block and row of int64 positions of int64 requests, and which of them exist."""
    block_table, table_stride, column_stride, max_blocks = table
    position = position.to(tl.uint64)
    size = tl.full((), block_size, tl.uint64)
    column, row = position // size, position % size
    inside = wanted & (column < max_blocks)
    entry = request * table_stride + tl.where(inside, column, 0).to(tl.int64) * column_stride
    page = tl.load(block_table + entry, mask=inside, other=-1)
    exists = (page >= 0) & (page < num_blocks)
    return tl.where(exists, page, 0).to(tl.int64), row.to(tl.int64), exists


@triton.jit
def load_pages(entries, row, wanted, BLOCK_SIZE: tl.constexpr):
    """Blocks of int32 rows of a request, -1 where none is wanted, and of rows that are negative or
    behind the table. ``entries``: the request's row of the table, its stride and its columns."""
    table, column_stride, max_blocks = entries
    column = row.to(tl.uint32, bitcast=True) // BLOCK_SIZE
    entry = column.to(tl.int64) * column_stride
    return tl.load(table + entry, mask=wanted & (column < max_blocks), other=-1)


@triton.jit
def join_slots(page, row, BLOCK_SIZE: tl.constexpr):
    """int32 slots of such rows; -1 of pages that are negative or whose slots int32 does not
    hold."""
    offset = row.to(tl.uint32, bitcast=True) % BLOCK_SIZE
    fits = (page >= 0) & (page <= 2**31 // BLOCK_SIZE - 1)
    slot = tl.where(fits, page, 0) * BLOCK_SIZE + offset.to(tl.int32, bitcast=True)
    return tl.where(fits, slot, -1)


@triton.jit
def prefetch_column(table, num_reqs, row, BLOCK_SIZE: tl.constexpr):
    """Bring the page of ``row`` into the L2 for each of the first 32 requests, whichever has it.

    Programs that do so for their rows, while they wait for the lengths of the requests, bring most
    of the pages that they are going to look up. Volatile: what is loaded is not used. One program
    in eight pages will do, whose entries share 32 bytes.
    """
    block_table, table_stride, column_stride, max_blocks = table
    column = row // BLOCK_SIZE
    request = tl.arange(0, 32)
    useful = (request < num_reqs) & (column < max_blocks) & (row % (8 * BLOCK_SIZE) == 0)
    entry = request.to(tl.int64) * table_stride + column.to(tl.int64) * column_stride
    tl.load(block_table + entry, mask=useful, volatile=True)

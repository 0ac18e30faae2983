"""Addresses in paged caches: slots and block-table entries become pages and rows.

Torch believes that a tensor is written to if its pointer leads to a store through the result of a
function. A function that stores at slots therefore loads the slots itself, or takes values that a
kernel has loaded, and passes them to ``place_slots``.
"""

import triton
import triton.language as tl

MAX_POSITIONS = tl.constexpr(2**31 - 1)
"""Maximum number of positions; a position outside of them is padding."""


@triton.jit
def find_real(position, request, num_reqs):
    """Return which tokens are not padding, from their positions and requests."""
    valid = (position >= 0) & (position < MAX_POSITIONS)
    return valid & (request >= 0) & (request < num_reqs)


@triton.jit
def place_slots(slot, num_blocks, block_size):
    """Return the int64 page and row of each slot, and which slots exist."""
    slot = slot.to(tl.uint64)  # negative slots lie past every page: half the instructions
    size = tl.full((), block_size, tl.uint64)
    page, row = slot // size, slot % size
    valid = page < num_blocks
    return tl.where(valid, page, 0).to(tl.int64), row.to(tl.int64), valid


@triton.jit
def locate_positions(table, request, position, mask, num_blocks, block_size):
    """Return the int64 block and row of each int64 position of its request, and which of them
    exist; only positions with ``mask`` do."""
    block_table, table_stride, column_stride, max_blocks = table
    position = position.to(tl.uint64)
    size = tl.full((), block_size, tl.uint64)
    column, row = position // size, position % size
    in_table = mask & (column < max_blocks)
    entry = request * table_stride + tl.where(in_table, column, 0).to(tl.int64) * column_stride
    page = tl.load(block_table + entry, mask=in_table, other=-1)
    valid = (page >= 0) & (page < num_blocks)
    return tl.where(valid, page, 0).to(tl.int64), row.to(tl.int64), valid


@triton.jit
def load_pages(entries, row, mask, BLOCK_SIZE: tl.constexpr):
    """Load the block of each int32 row of a request; -1 without ``mask``, and for rows that are
    negative or past the table. ``entries``: the request's row of the table, its stride and its
    columns."""
    table, column_stride, max_blocks = entries
    column = row.to(tl.uint32, bitcast=True) // BLOCK_SIZE
    entry = column.to(tl.int64) * column_stride
    return tl.load(table + entry, mask=mask & (column < max_blocks), other=-1)


@triton.jit
def join_slots(page, row, BLOCK_SIZE: tl.constexpr):
    """Return int32 slots; -1 for negative pages and for slots past int32."""
    offset = row.to(tl.uint32, bitcast=True) % BLOCK_SIZE
    fits = (page >= 0) & (page <= 2**31 // BLOCK_SIZE - 1)
    slot = tl.where(fits, page, 0) * BLOCK_SIZE + offset.to(tl.int32, bitcast=True)
    return tl.where(fits, slot, -1)


@triton.jit
def prefetch_column(table, num_reqs, row, BLOCK_SIZE: tl.constexpr):
    """Load the table's page of ``row`` into the L2 for each of the first 32 requests.

    Programs call this for their own rows while they wait for the lengths of the requests: together
    they load most of the pages that they will look up. The load is volatile, as its value is
    unused. Only one page in eight is loaded: eight entries share 32 bytes.
    """
    block_table, table_stride, column_stride, max_blocks = table
    column = row // BLOCK_SIZE
    request = tl.arange(0, 32)
    mask = (request < num_reqs) & (column < max_blocks) & (row % (8 * BLOCK_SIZE) == 0)
    entry = request.to(tl.int64) * table_stride + column.to(tl.int64) * column_stride
    tl.load(block_table + entry, mask=mask, volatile=True)

"""Addresses in paged caches: the page and the row of a slot or of a position.

If a function returns values that it loaded from a tensor, and the address of a store depends on
these values, torch treats the tensor as written. A function that stores at slots therefore loads
the slots itself, or takes slots that a kernel has loaded, and passes them to ``locate_slots``.
"""

import triton
import triton.language as tl

MAX_POSITIONS = tl.constexpr(2**31 - 1)
"""Valid positions are at least 0 and below this number. Tokens at other positions are padding."""


@triton.jit
def valid_tokens(position, request, num_reqs):
    """Return which tokens are not padding, from their positions and requests."""
    valid = (position >= 0) & (position < MAX_POSITIONS)
    return valid & (request >= 0) & (request < num_reqs)


@triton.jit
def locate_slots(slot, num_blocks, block_size):
    """Return the int64 page and row of each slot, and which slots exist."""
    slot = slot.to(tl.uint64)  # negative slots become huge, so one comparison is enough
    size = tl.full((), block_size, tl.uint64)
    page, row = slot // size, slot % size
    valid = page < num_blocks
    return tl.where(valid, page, 0).to(tl.int64), row.to(tl.int64), valid


@triton.jit
def locate_positions(table, request, position, mask, num_blocks, block_size):
    """Return the int64 page and row of each int64 ``position`` of a request, and which positions
    exist. A position outside ``mask`` does not exist."""
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
def load_pages(table_row, row, mask, BLOCK_SIZE: tl.constexpr):
    """Load the page of each int32 row of a request; -1 outside ``mask``, and for rows that are
    negative or past the table. ``table_row``: the request's row of the block table, its stride and
    its number of columns."""
    block_table, column_stride, max_blocks = table_row
    column = row.to(tl.uint32, bitcast=True) // BLOCK_SIZE
    entry = column.to(tl.int64) * column_stride
    return tl.load(block_table + entry, mask=mask & (column < max_blocks), other=-1)


@triton.jit
def compute_slots(page, row, BLOCK_SIZE: tl.constexpr):
    """Return the int32 slots of rows in their pages; -1 for negative pages and for slots past
    int32."""
    offset = row.to(tl.uint32, bitcast=True) % BLOCK_SIZE
    valid = (page >= 0) & (page <= 2**31 // BLOCK_SIZE - 1)
    slot = tl.where(valid, page, 0) * BLOCK_SIZE + offset.to(tl.int32, bitcast=True)
    return tl.where(valid, slot, -1)


@triton.jit
def prefetch_column(table, num_reqs, row, BLOCK_SIZE: tl.constexpr):
    """For each of the first 32 requests, load the block-table entry of ``row`` into the L2 cache.

    Each program calls this function for its own rows while it waits for the lengths of the
    requests. Together the programs load most entries that they will look up. The load is volatile,
    so that Triton keeps the load although its value is unused. One entry in eight is enough,
    because 32 bytes hold eight entries.
    """
    block_table, table_stride, column_stride, max_blocks = table
    column = row // BLOCK_SIZE
    request = tl.arange(0, 32)
    mask = (request < num_reqs) & (column < max_blocks) & (row % (8 * BLOCK_SIZE) == 0)
    entry = request.to(tl.int64) * table_stride + column.to(tl.int64) * column_stride
    tl.load(block_table + entry, mask=mask, volatile=True)


@triton.constexpr_function
def word_pointer(size):
    """Return the type of a pointer to integers of ``size`` bytes, 2 or 4."""
    return tl.pointer_type(tl.int16 if size == 2 else tl.int32)

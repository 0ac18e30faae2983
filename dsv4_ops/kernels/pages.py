"""Addresses in paged caches: what slots and block-table entries that do not exist turn into.

Torch takes a tensor for written to if its pointer leads to a store through a function. A kernel
that stores where slots say thus loads them itself, and gives them to ``place_slots``.
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
    exists = (slot >= 0) & (slot // block_size < num_blocks)
    slot = tl.where(exists, slot, 0)
    return slot // block_size, slot % block_size, exists


@triton.jit
def locate_positions(
    block_table,
    table_stride,
    column_stride,
    request,
    position,
    wanted,
    max_blocks,
    num_blocks,
    block_size,
):
    """int64 page and row of int64 positions of int64 requests, and which of them exist."""
    inside = wanted & (position >= 0) & (position // block_size < max_blocks)
    position = tl.where(inside, position, 0)
    entry = request * table_stride + position // block_size * column_stride
    page = tl.load(block_table + entry, mask=inside, other=-1)
    exists = (page >= 0) & (page < num_blocks)
    return tl.where(exists, page, 0).to(tl.int64), position % block_size, exists

"""The best of many int32 keys, exactly: among equal ones those that come first.

A row is cut into parts, each of which streams through its keys and keeps the best; then the lists
of the parts are merged. Every list is in the order of the row, so that ties need no index.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.indexer_scores import ABSENT_KEY


@triton.jit
def partition(count, splits, topk, STEP: tl.constexpr, LEAST: tl.constexpr):
    """How many parts a row of int64 ``count`` keys has, and keys per part; one part if all fit."""
    share = (count + splits - 1) // splits
    share = tl.maximum((share + STEP - 1) // STEP * STEP, LEAST)
    whole = count <= topk
    return tl.where(whole, 1, (count + share - 1) // share), tl.where(whole, count, share)


@triton.jit
def _threshold(key, present, topk):
    """The largest value that at least ``topk`` of the keys reach, or one that exactly these reach;
    there are more of them."""
    low = tl.min(tl.where(present, key, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(key, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0)
        high = tl.where(reached > topk, high, tl.where(reached == topk, middle + 1, middle))
        low = tl.where(reached >= topk, middle, low)
    return low.to(tl.int32)


@triton.jit
def best(key, topk):
    """Which keys are the ``topk`` best present ones, the place of each of them, in order, how many
    there are, and the value that none is below."""
    present = key > ABSENT_KEY
    total = tl.sum(present.to(tl.int32), axis=0)
    threshold = tl.full((), ABSENT_KEY, tl.int32)
    if total > topk:
        threshold = _threshold(key, present, topk)
    above = key > threshold
    kept = tl.minimum(total, topk)
    room = kept - tl.sum(above.to(tl.int32), axis=0)
    equal = key == threshold
    # both counts in one scan
    seen = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    equals = seen >> 16
    taken = above | (equal & (equals <= room))
    return taken, (seen & 0xFFFF) + tl.minimum(equals, room) - 1, kept, threshold


@triton.jit
def emit(out, index, kept, topk, WIDTH: tl.constexpr):
    """The result row at ``out``: ``kept`` indices from ``index``, then -1."""
    slot = tl.arange(0, WIDTH)
    value = tl.load(index + slot, mask=slot < kept, other=-1)
    tl.store(out + slot, value, mask=slot < topk)


@triton.jit
def pad_list(keys, kept, topk, WIDTH: tl.constexpr):
    """Nothing behind the ``kept`` keys of a list."""
    slot = tl.arange(0, WIDTH)
    tl.store(keys + slot, ABSENT_KEY, mask=(slot >= kept) & (slot < topk))


@triton.jit
def merge(
    keys,
    indices,
    row,
    row_step,
    lists,
    width,
    topk,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Merge ``lists`` lists of ``width`` keys, in the rows ``row``, ``row + row_step`` .. of
    ``keys`` and ``indices``, into the first of them; how many were kept. CAPACITY keys are looked
    at together: the first list at least, which is therefore read before it is overwritten."""
    slot = tl.arange(0, CAPACITY)
    entries = lists * width
    kept = 0
    start = 0
    while start < entries:
        entry = start + slot - kept
        carried = slot < kept
        wanted = carried | (entry < entries)
        entry = tl.where(wanted & (slot >= kept), entry, 0)
        place = tl.where(carried, slot, entry % width)
        at = (row + entry // width * row_step).to(tl.int64) * STRIDE + place
        key = tl.load(keys + at, mask=wanted, other=ABSENT_KEY)
        start += CAPACITY - kept
        taken, place, kept, _ = best(key, topk)
        index = tl.load(indices + at, mask=taken, other=0)
        tl.debug_barrier()  # all was read
        at = row.to(tl.int64) * STRIDE + place
        tl.store(keys + at, key, mask=taken)
        tl.store(indices + at, index, mask=taken)
        tl.debug_barrier()  # all can be read
    return kept


@triton.jit
def merge_groups_kernel(
    keys,
    indices,
    plan,
    splits,
    topk,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Where the lists of a row are too long for one pass: merge them in groups, at once."""
    token = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    parts = tl.load(plan + 2 * token)
    width = tl.load(plan + 2 * token + 1)
    if parts * width > CAPACITY:
        size = (parts + GROUPS - 1) // GROUPS
        lists = tl.minimum(size, parts - group * size)
        if lists > 0:
            row = token * splits + group * size
            kept = merge(keys, indices, row, 1, lists, width, topk, STRIDE, CAPACITY)
            pad_list(keys + row.to(tl.int64) * STRIDE, kept, topk, WIDTH)


@triton.jit
def merge_parts_kernel(
    keys,
    indices,
    plan,
    out,
    splits,
    topk,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The result of every row that has several parts."""
    token = tl.program_id(0)
    parts = tl.load(plan + 2 * token)
    width = tl.load(plan + 2 * token + 1)
    if parts > 1:
        row = token * splits
        step = 1
        if parts * width > CAPACITY:
            step = (parts + GROUPS - 1) // GROUPS
            width = tl.minimum(topk, step * width)
            parts = (parts + step - 1) // step
        kept = merge(keys, indices, row, step, parts, width, topk, STRIDE, CAPACITY)
        list_of_row = indices + row.to(tl.int64) * STRIDE
        emit(out + token.to(tl.int64) * topk, list_of_row, kept, topk, WIDTH)

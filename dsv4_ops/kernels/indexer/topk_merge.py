"""Exact top-k of int32 keys, and the merge of lists: among equal keys those that come first.

A row is split into parts, each of which streams through its keys and keeps the best
(``topk_partial.py``); then the lists of the parts are merged. Every list is in the order of the
row, so that ties need no index.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.paging import compute_slots, load_pages
from dsv4_ops.kernels.indexer.score_tile import ABSENT_KEY

_OCTAVE = tl.constexpr(2**23)
_OCTAVES = tl.constexpr(2**25)


@triton.jit
def partition(
    count, num_tokens, splits, topk,
    STEP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, MERGED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPED: tl.constexpr, LISTS: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """How many parts a row of ``count`` keys has, keys per part, the width of their lists, and
    whether a list has every key of its part, in order; one part if all fit. Lists are as wide
    as MERGED keys allow, which are merged together, because the merge alone has to be exact; more
    are merged in GROUPS before, of GROUPED keys at a time."""
    # LISTS can be merged together: with parts as short as LONG a token, fewer parts take less time
    # than the merge of groups
    merged_share = (count + LISTS - 1) // LISTS
    splits = tl.where(merged_share <= LONG * num_tokens, tl.minimum(splits, LISTS), splits)
    share = (count + splits - 1) // splits
    share = tl.maximum((share + STEP - 1) // STEP * STEP, LEAST)
    whole = share <= topk
    grouped = tl.minimum(share, topk) * GROUPS
    group = (count + grouped - 1) // grouped * share
    # powers of two, so that the lists of a row are all of its keys, and no more than are merged
    # together or, of a longer one, than its groups are
    if (count <= MERGED) | (whole & (count <= GROUPS * GROUPED) & (group > GROUPED)):
        least = LEAST
        while least < share:
            least *= 2
        share = least
    parts = tl.maximum((count + share - 1) // share, 1)
    whole = (share <= topk) | (parts * share <= MERGED)
    width = tl.maximum(tl.minimum(MERGED // 2 // parts, MOST), topk)
    width = tl.where(whole, share, width)
    one = count <= topk
    parts, share = tl.where(one, 1, parts), tl.where(one, count, share)
    return parts, share, width, whole


@triton.jit
def find_threshold(key, low, at_low, topk, most):
    """A value such that ``topk`` to ``most`` of the keys are above it, or fewer than ``topk`` but
    with those that equal it at least as many; and how many are above. ``at_low`` keys, more than
    ``most``, reach ``low``. Two values at a time, counted in one sum: at first within some octaves
    of the best, where scores are, and not by halves of all that a float can be."""
    high = tl.max(key, axis=0) + 1
    at_high = 0
    length = _length(low, high)
    near = length > _OCTAVES
    first = tl.where(near, high - _OCTAVES, low + _part(length, 2))
    second = tl.where(near, high - _OCTAVE, low + _part(length, 1))
    while (length > 1) & (at_low > most):
        reached = (key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16)
        reached = tl.sum(reached, axis=0)
        at_first, at_second = reached & 0xFFFF, reached >> 16
        high = tl.where(at_second >= topk, high, tl.where(at_first >= topk, second, first))
        at_high = tl.where(
            at_second >= topk, at_high, tl.where(at_first >= topk, at_second, at_first)
        )
        low = tl.where(at_second >= topk, second, tl.where(at_first >= topk, first, low))
        at_low = tl.where(
            at_second >= topk, at_second, tl.where(at_first >= topk, at_first, at_low)
        )
        length = _length(low, high)
        first = low + _part(length, 2)
        second = low + _part(length, 1)
    enough = at_low <= most
    return tl.where(enough, low - 1, low), tl.where(enough, at_low, at_high)


@triton.jit
def _length(low, high):
    return high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)


@triton.jit
def _part(length, SHIFT: tl.constexpr):
    """At least 1 of the uint32 ``length``."""
    return tl.maximum(length >> SHIFT, 1).to(tl.int32, bitcast=True)


@triton.jit
def best(key, low, topk, most):
    """Which keys are the best, ``topk`` of those present or up to ``most``; the offset of each of
    them, in order; how many there are; and a value that none of them is below. Keys below ``low``
    are not among the best."""
    total = tl.sum((key >= low).to(tl.int32), axis=0)
    threshold = low - 1
    above_it = total
    kept = total
    if total > most:
        threshold, above_it = find_threshold(key, low, total, topk, most)
        kept = tl.maximum(above_it, topk)
    needed = kept - above_it
    above = key > threshold
    equal = key == threshold
    # both counts in one scan
    seen = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    equals = seen >> 16
    taken = above | (equal & (equals <= needed))
    least = tl.where(needed > 0, threshold, threshold + 1)
    return taken, (seen & 0xFFFF) + tl.minimum(equals, needed) - 1, kept, least


@triton.jit
def exactly(key, topk):
    """The ``topk`` best of those present, as ``best``."""
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    taken, dst, kept, _ = best(key, low, topk, topk)
    return taken, dst, kept


@triton.jit
def scratch_slots(number, CAPACITY: tl.constexpr):
    """Slots of a scratch row, one after the other over the threads; ``number`` is not negative.
    Triton would have each thread load four in a row, but store, where it cannot know that offsets
    follow each other, in this layout; and going from one to the other costs more than the
    selection. So it is not to see that slots follow each other, nor that they are the same
    everywhere, which would keep addresses in registers."""
    return tl.arange(0, CAPACITY) ^ tl.minimum(number, 0)


@triton.jit
def _load_indices(indices, head, base, slot):
    """Indices of the keys of a scratch row: those behind the first ``head`` count from
    ``base`` on."""
    index = tl.load(indices + slot, mask=slot < head, other=0)
    return tl.where(slot < head, index, base + slot)


@triton.jit
def reduce_list(keys, indices, fill, head, base, low, topk, most, CAPACITY: tl.constexpr):
    """Reduce the ``fill`` keys of a scratch row to the best, ``topk`` to ``most`` of them, without
    gaps; how many there are, and a value that none is below."""
    slot = scratch_slots(fill, CAPACITY)
    tl.debug_barrier()  # all was written
    key = tl.load(keys + slot, mask=slot < fill, other=ABSENT_KEY)
    index = _load_indices(indices, head, base, slot)
    taken, dst, kept, least = best(key, low, topk, most)
    tl.debug_barrier()  # all was read
    tl.store(keys + dst, key, mask=taken)
    tl.store(indices + dst, index, mask=taken)
    return kept, least


@triton.jit
def emit_list(keys, indices, fill, head, base, entries, out, topk, SIZES: tl.constexpr):
    """The result row at ``out`` from a scratch row; if SLOTS, the slots of the indices. Blocks are
    loaded for all of them before the best are known, which hides the time it takes. SIZES: WIDTH,
    CAPACITY, BLOCK_SIZE and SLOTS."""
    slot = scratch_slots(fill, SIZES[1])
    tl.debug_barrier()  # all was written
    key = tl.load(keys + slot, mask=slot < fill, other=ABSENT_KEY)
    index = _load_indices(indices, head, base, slot)
    _emit(key, index, slot < fill, entries, out, topk, SIZES)
    tl.debug_barrier()  # all was read


@triton.jit
def _emit(key, index, wanted, entries, out, topk, SIZES: tl.constexpr):
    BLOCK_SIZE: tl.constexpr = SIZES[2]
    SLOTS: tl.constexpr = SIZES[3]
    if SLOTS:
        page = load_pages(entries, index, wanted, BLOCK_SIZE)
    taken, dst, kept = exactly(key, topk)
    if SLOTS:
        index = compute_slots(page, index, BLOCK_SIZE)
    tl.store(out + dst, index, mask=taken)
    pad_result(out, kept, topk, SIZES[0])


@triton.jit
def pad_list(keys, kept, width, CAPACITY: tl.constexpr):
    """Nothing behind the ``kept`` keys of a list."""
    if kept < width:
        slot = scratch_slots(kept, CAPACITY)
        tl.store(keys + slot, ABSENT_KEY, mask=(slot >= kept) & (slot < width))


@triton.jit
def pad_result(out, kept, topk, WIDTH: tl.constexpr):
    if kept < topk:
        slot = scratch_slots(kept, WIDTH)
        tl.store(out + slot, -1, mask=(slot >= kept) & (slot < topk))


@triton.jit
def _load_entries(scratch, lists, base, start, kept, CAPACITY: tl.constexpr):
    """The ``kept`` keys of a list, then entries from ``start`` on of it and the lists behind it.

    Their indices too: if the lists are whole, they count from ``base``. ``scratch``: keys, indices
    and keys of a row. ``lists``: the row of the first, the step to the row of the next, entries in
    all and of one, and whether lists are whole. The quotient is exact: there are fewer than 2**21
    entries."""
    keys, indices, stride = scratch
    row, step, entries, width, whole = lists
    slot = scratch_slots(entries, CAPACITY)
    carried = slot < kept
    entry = start + slot - kept
    wanted = carried | (entry < entries)
    number = ((entry.to(tl.float32) + 0.5) * (1.0 / tl.maximum(width, 1).to(tl.float32))).to(
        tl.int32
    )
    at = tl.where(carried, slot, number * step * stride + (entry - number * width))
    at += row * stride
    key = tl.load(keys + at, mask=wanted, other=ABSENT_KEY)
    counted = (whole != 0) & (slot >= kept)
    index = tl.load(indices + at, mask=wanted & (counted == 0), other=0)
    return key, tl.where(counted, base + entry, index)


@triton.jit
def _merge(scratch, lists, base, topk, CAPACITY: tl.constexpr):
    """Merge lists into the first of them; how many were kept. CAPACITY keys are looked at together:
    the first list at least, which is therefore read before it is overwritten."""
    keys, indices, stride = scratch
    row, _, entries, _, _ = lists
    kept = 0
    start = 0
    while start < entries:
        key, index = _load_entries(scratch, lists, base, start, kept, CAPACITY)
        start += CAPACITY - kept
        taken, dst, kept = exactly(key, topk)
        tl.debug_barrier()  # all was read
        tl.store(keys + row * stride + dst, key, mask=taken)
        tl.store(indices + row * stride + dst, index, mask=taken)
        tl.debug_barrier()  # all can be read
    return kept


@triton.jit
def _choose(scratch, lists, entries, out, topk, SIZES: tl.constexpr):
    """The result row at ``out`` from lists of at most CAPACITY keys, as ``emit_list``."""
    key, index = _load_entries(scratch, lists, 0, 0, 0, SIZES[1])
    # of keys that are none the index is anything
    _emit(key, index, index >= 0, entries, out, topk, SIZES)


@triton.jit
def merge_groups_kernel(
    keys, indices, plan, num_tokens, topk,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, MERGED: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Where the lists of a row have more than MERGED keys: merge them in groups, at once."""
    token = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    parts = tl.load(plan + 3 * token)
    width = tl.load(plan + 3 * token + 1)
    whole = tl.load(plan + 3 * token + 2)
    if parts * width > MERGED:
        size = (parts + GROUPS - 1) // GROUPS
        lists = tl.minimum(size, parts - group * size)
        if lists > 0:
            row = token + group * size * num_tokens
            base = group * size * width
            merged = (row, num_tokens, lists * width, width, whole)
            kept = _merge((keys, indices, STRIDE), merged, base, topk, CAPACITY)
            pad_list(keys + row * STRIDE, kept, topk, WIDTH)


@triton.jit
def merge_parts_kernel(
    keys, indices, plan, out,
    num_tokens, topk,
    req_indices, request_stride,
    block_table, table_stride, column_stride, max_blocks,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The result of every row that has several parts; if SLOTS, as cache slots. A token with such a
    row is no padding: its request has a row in the table."""
    token = tl.program_id(0)
    table = block_table
    if SLOTS:  # asked for together with the plan
        request = tl.load(req_indices + token.to(tl.int64) * request_stride)
        table += request.to(tl.int64) * table_stride
    parts = tl.load(plan + 3 * token)
    width = tl.load(plan + 3 * token + 1)
    whole = tl.load(plan + 3 * token + 2)
    if parts > 1:
        step = num_tokens
        if parts * width > CAPACITY:
            size = (parts + GROUPS - 1) // GROUPS
            parts = (parts + size - 1) // size
            step = size * num_tokens
            width = topk
            whole = 0
        scratch = (keys, indices, STRIDE)
        if parts * width > CAPACITY:
            lists = (token, step, parts * width, width, 0)
            width = _merge(scratch, lists, 0, topk, CAPACITY)
            parts = 1
        lists = (token, step, parts * width, width, whole)
        out += token.to(tl.int64) * topk
        entries = (table, column_stride, max_blocks)
        if parts * width <= CAPACITY // 2:
            _choose(scratch, lists, entries, out, topk, (WIDTH, CAPACITY // 2, BLOCK_SIZE, SLOTS))
        else:
            _choose(scratch, lists, entries, out, topk, (WIDTH, CAPACITY, BLOCK_SIZE, SLOTS))

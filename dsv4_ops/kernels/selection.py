"""The best of many int32 keys, exactly: among equal ones those that come first.

A row is cut into parts, each of which streams through its keys and keeps the best; then the lists
of the parts are merged. Every list is in the order of the row, so that ties need no index.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.indexer_scores import ABSENT_KEY

_OCTAVE = tl.constexpr(2**23)
_OCTAVES = tl.constexpr(2**25)


@triton.jit
def partition(
    count,
    splits,
    topk,
    STEP: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    MERGED: tl.constexpr,
):
    """How many parts a row of ``count`` keys has, keys per part, the width of their lists, and
    whether a list has every key of its part, in its place; one part if all fit. Lists are as wide
    as MERGED keys allow, which are merged together, because the merge alone has to be exact."""
    share = (count + splits - 1) // splits
    share = tl.maximum((share + STEP - 1) // STEP * STEP, LEAST)
    # powers of two, so that the lists of a short row are all of its keys and no more than MERGED
    if (count <= MERGED // 2) | ((count <= MERGED) & (share <= topk)):
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
def _threshold(key, low, at_low, topk, most):
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
    """Which keys are the best, ``topk`` of those present or up to ``most``, the place of each of
    them, in order, how many there are, and a value that none of them is below. Keys below ``low``
    are not among the best."""
    total = tl.sum((key >= low).to(tl.int32), axis=0)
    threshold = low - 1
    above_it = total
    kept = total
    if total > most:
        threshold, above_it = _threshold(key, low, total, topk, most)
        kept = tl.maximum(above_it, topk)
    room = kept - above_it
    above = key > threshold
    equal = key == threshold
    # both counts in one scan
    seen = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    equals = seen >> 16
    taken = above | (equal & (equals <= room))
    least = tl.where(room > 0, threshold, threshold + 1)
    return taken, (seen & 0xFFFF) + tl.minimum(equals, room) - 1, kept, least


@triton.jit
def _exactly(key, topk):
    """The ``topk`` best of those present, as ``best``."""
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    taken, place, kept, _ = best(key, low, topk, topk)
    return taken, place, kept


@triton.jit
def _slots(number, CAPACITY: tl.constexpr):
    """Slots of a scratch row, one after the other over the threads; ``number`` is not negative.
    Triton would have each thread load four in a row, but store, where it cannot know that places
    follow each other, in this layout; and going from one to the other costs more than the
    selection. So it is not to see that slots follow each other, nor that they are the same
    everywhere, which would keep addresses in registers."""
    return tl.arange(0, CAPACITY) ^ tl.minimum(number, 0)


@triton.jit
def _load_indices(indices, head, base, slot):
    """Indices of the keys of a scratch row: those behind the first ``head`` are in their places,
    from ``base`` on."""
    index = tl.load(indices + slot, mask=slot < head, other=0)
    return tl.where(slot < head, index, base + slot)


@triton.jit
def reduce_list(keys, indices, fill, head, base, low, topk, most, CAPACITY: tl.constexpr):
    """Reduce the ``fill`` keys of a scratch row to the best, ``topk`` to ``most`` of them, without
    gaps; how many there are, and a value that none is below."""
    slot = _slots(fill, CAPACITY)
    tl.debug_barrier()  # all was written
    key = tl.load(keys + slot, mask=slot < fill, other=ABSENT_KEY)
    index = _load_indices(indices, head, base, slot)
    taken, place, kept, least = best(key, low, topk, most)
    tl.debug_barrier()  # all was read
    tl.store(keys + place, key, mask=taken)
    tl.store(indices + place, index, mask=taken)
    return kept, least


@triton.jit
def emit_list(
    keys, indices, fill, head, base, out, topk, WIDTH: tl.constexpr, CAPACITY: tl.constexpr
):
    """The result row at ``out`` from a scratch row."""
    slot = _slots(fill, CAPACITY)
    tl.debug_barrier()  # all was written
    key = tl.load(keys + slot, mask=slot < fill, other=ABSENT_KEY)
    index = _load_indices(indices, head, base, slot)
    taken, place, kept = _exactly(key, topk)
    tl.store(out + place, index, mask=taken)
    _pad_result(out, kept, topk, WIDTH)
    tl.debug_barrier()  # all was read


@triton.jit
def pad_list(keys, kept, width, CAPACITY: tl.constexpr):
    """Nothing behind the ``kept`` keys of a list."""
    if kept < width:
        slot = _slots(kept, CAPACITY)
        tl.store(keys + slot, ABSENT_KEY, mask=(slot >= kept) & (slot < width))


@triton.jit
def _pad_result(out, kept, topk, WIDTH: tl.constexpr):
    if kept < topk:
        slot = _slots(kept, WIDTH)
        tl.store(out + slot, -1, mask=(slot >= kept) & (slot < topk))


@triton.jit
def _load_entries(
    keys,
    indices,
    row,
    step,
    entries,
    width,
    whole,
    base,
    start,
    kept,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The ``kept`` keys of the list in ``row``, then entries from ``start`` on of the lists of
    ``width`` keys in the rows ``row``, ``row + step`` .., of which there are ``entries``; and their
    indices: if the lists are ``whole``, they count from ``base``. The quotient is exact: there are
    fewer than 2**21 entries."""
    slot = _slots(entries, CAPACITY)
    carried = slot < kept
    entry = start + slot - kept
    wanted = carried | (entry < entries)
    number = ((entry.to(tl.float32) + 0.5) * (1.0 / tl.maximum(width, 1).to(tl.float32))).to(
        tl.int32
    )
    at = tl.where(carried, slot, number * step * STRIDE + (entry - number * width))
    at += row * STRIDE
    key = tl.load(keys + at, mask=wanted, other=ABSENT_KEY)
    counted = (whole != 0) & (slot >= kept)
    index = tl.load(indices + at, mask=wanted & (counted == 0), other=0)
    return key, tl.where(counted, base + entry, index)


@triton.jit
def _merge(
    keys,
    indices,
    row,
    step,
    lists,
    width,
    whole,
    base,
    topk,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Merge lists into the first of them; how many were kept. CAPACITY keys are looked at together:
    the first list at least, which is therefore read before it is overwritten."""
    entries = lists * width
    kept = 0
    start = 0
    while start < entries:
        key, index = _load_entries(
            keys, indices, row, step, entries, width, whole, base, start, kept, STRIDE, CAPACITY
        )
        start += CAPACITY - kept
        taken, place, kept = _exactly(key, topk)
        tl.debug_barrier()  # all was read
        tl.store(keys + row * STRIDE + place, key, mask=taken)
        tl.store(indices + row * STRIDE + place, index, mask=taken)
        tl.debug_barrier()  # all can be read
    return kept


@triton.jit
def _choose(
    keys,
    indices,
    row,
    step,
    lists,
    width,
    whole,
    out,
    topk,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The result row at ``out`` from lists of at most CAPACITY keys."""
    key, index = _load_entries(
        keys, indices, row, step, lists * width, width, whole, 0, 0, 0, STRIDE, CAPACITY
    )
    taken, place, kept = _exactly(key, topk)
    tl.store(out + place, index, mask=taken)
    _pad_result(out, kept, topk, WIDTH)


@triton.jit
def merge_groups_kernel(
    keys,
    indices,
    plan,
    num_tokens,
    topk,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Where the lists of a row are too long for one pass: merge them in groups, at once."""
    token = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    parts = tl.load(plan + 3 * token)
    width = tl.load(plan + 3 * token + 1)
    whole = tl.load(plan + 3 * token + 2)
    if parts * width > CAPACITY:
        size = (parts + GROUPS - 1) // GROUPS
        lists = tl.minimum(size, parts - group * size)
        if lists > 0:
            row = token + group * size * num_tokens
            base = group * size * width
            kept = _merge(
                keys, indices, row, num_tokens, lists, width, whole, base, topk, STRIDE, CAPACITY
            )
            pad_list(keys + row * STRIDE, kept, topk, WIDTH)


@triton.jit
def merge_parts_kernel(
    keys,
    indices,
    plan,
    out,
    num_tokens,
    topk,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The result of every row that has several parts."""
    token = tl.program_id(0)
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
        if parts * width > CAPACITY:
            width = _merge(keys, indices, token, step, parts, width, 0, 0, topk, STRIDE, CAPACITY)
            parts = 1
        entries = parts * width
        out += token.to(tl.int64) * topk
        if entries <= CAPACITY // 2:
            _choose(
                keys,
                indices,
                token,
                step,
                parts,
                width,
                whole,
                out,
                topk,
                WIDTH,
                STRIDE,
                CAPACITY // 2,
            )
        else:
            _choose(
                keys, indices, token, step, parts, width, whole, out, topk, WIDTH, STRIDE, CAPACITY
            )

"""Exact top-k of int32 keys, and merges of lists. Among equal keys, the first keys are selected.

A row is divided into parts. The first pass reduces each part to a list of its largest keys
(``topk_partial.py``); then the lists of a row are merged. A list keeps the order of the row, so
ties are broken without comparing indices.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import compute_slots, load_pages
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.topk import ABSENT_KEY, find_threshold  # Inductor needs functions


@triton.jit
def partition(
    count, num_tokens, max_parts, topk,
    STEP: tl.constexpr, MIN_PART: tl.constexpr, MAX_WIDTH: tl.constexpr,
    MERGE_CAPACITY: tl.constexpr, GROUPS: tl.constexpr, GROUP_CAPACITY: tl.constexpr,
    MAX_LISTS: tl.constexpr, SHORT_PART: tl.constexpr,
):  # fmt: skip
    """Divide a row of ``count`` keys into parts. Return the number of parts, keys per part, the
    width of a list, and whether a list has all keys of its part. A row of up to ``topk`` keys is
    one part.

    Lists are as wide as one merge of MERGE_CAPACITY keys allows, so that the first pass need not
    select exactly ``topk`` keys. If the lists of a row have more keys than MERGE_CAPACITY, they are
    first merged in GROUPS groups, GROUP_CAPACITY keys at a time.
    """
    # if parts stay short, make only as many parts as fit one merge, because two merges cost more
    if SHORT_PART > 0:
        merged_part = (count + MAX_LISTS - 1) // MAX_LISTS
        is_short = merged_part <= SHORT_PART * num_tokens
        max_parts = tl.where(is_short, tl.minimum(max_parts, MAX_LISTS), max_parts)
    part_keys = (count + max_parts - 1) // max_parts
    part_keys = tl.maximum((part_keys + STEP - 1) // STEP * STEP, MIN_PART)
    complete = part_keys <= topk
    group_keys = tl.minimum(part_keys, topk) * GROUPS
    group = (count + group_keys - 1) // group_keys * part_keys
    # round the keys per part up to a power of two if complete lists then fit: all lists of the row
    # into one merge, or the lists of a group into GROUP_CAPACITY
    if (count <= MERGE_CAPACITY) | (
        complete & (count <= GROUPS * GROUP_CAPACITY) & (group > GROUP_CAPACITY)
    ):
        size = MIN_PART
        while size < part_keys:
            size *= 2
        part_keys = size
    parts = tl.maximum((count + part_keys - 1) // part_keys, 1)
    complete = (part_keys <= topk) | (parts * part_keys <= MERGE_CAPACITY)
    width = tl.maximum(tl.minimum(MERGE_CAPACITY // 2 // parts, MAX_WIDTH), topk)
    width = tl.where(complete, part_keys, width)
    is_one = count <= topk
    parts, part_keys = tl.where(is_one, 1, parts), tl.where(is_one, count, part_keys)
    return parts, part_keys, width, complete


@triton.jit
def select(key, low, topk, max_selected):
    """Select the largest keys: ``topk`` to ``max_selected`` of them, or all if there are fewer.

    Return a mask of the selected keys, their offsets in a list, the number of selected keys, and a
    lower bound of these keys. Keys below ``low`` are absent, or known not to be among the largest.
    """
    total = tl.sum((key >= low).to(tl.int32), axis=0)
    threshold = low - 1
    num_above = total
    count = total
    if total > max_selected:
        threshold, num_above = find_threshold(key, low, total, topk, max_selected)
        count = tl.maximum(num_above, topk)
    num_equal = count - num_above
    above = key > threshold
    equal = key == threshold
    # compute both ranks in one scan
    ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    equal_rank = ranks >> 16
    selected = above | (equal & (equal_rank <= num_equal))
    bound = tl.where(num_equal > 0, threshold, threshold + 1)
    return selected, (ranks & 0xFFFF) + tl.minimum(equal_rank, num_equal) - 1, count, bound


@triton.jit
def select_topk(key, topk):
    """Select exactly the ``topk`` largest keys, or all if there are fewer. Return the first three
    results of ``select``."""
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    selected, dst, count, _ = select(key, low, topk, topk)
    return selected, dst, count


@triton.jit
def scratch_slots(number, CAPACITY: tl.constexpr):
    """Return the slots of a scratch row; consecutive threads have consecutive slots. ``number`` is
    not negative.

    The result hides two facts from Triton. If Triton knew that slots are consecutive, a thread
    would load four adjacent slots. But in stores to unknown offsets a thread has one slot, and
    converting between the two layouts costs more than the selection. If Triton knew that slots are
    the same in all calls, it would keep addresses in registers.
    """
    return tl.arange(0, CAPACITY) ^ tl.minimum(number, 0)


@triton.jit
def _load_indices(indices, head, base, slot):
    """Load the indices of keys of a scratch row. From slot ``head`` on, an index is the slot plus
    ``base``."""
    index = tl.load(indices + slot, mask=slot < head, other=0)
    return tl.where(slot < head, index, base + slot)


@triton.jit
def reduce_list(keys, indices, fill, head, base, low, topk, max_selected, CAPACITY: tl.constexpr):
    """Reduce the ``fill`` keys of a scratch row to the largest keys, without gaps. At least
    ``topk`` and at most ``max_selected`` keys are left. Return the number of these keys, and a
    lower bound of these keys."""
    slot = scratch_slots(fill, CAPACITY)
    tl.debug_barrier()  # after all stores of keys
    key = tl.load(keys + slot, mask=slot < fill, other=ABSENT_KEY)
    index = _load_indices(indices, head, base, slot)
    selected, dst, count, bound = select(key, low, topk, max_selected)
    tl.debug_barrier()  # after all loads
    tl.store(keys + dst, key, mask=selected)
    tl.store(indices + dst, index, mask=selected)
    return count, bound


@triton.jit
def emit_list(keys, indices, fill, head, base, table_row, out, topk, SIZES: tl.constexpr):
    """Select the top k of a scratch row, and write them to ``out`` as indices, or as slots if
    SLOTS. SIZES: WIDTH, CAPACITY, BLOCK_SIZE and SLOTS."""
    CAPACITY: tl.constexpr = SIZES[1]
    slot = scratch_slots(fill, CAPACITY)
    tl.debug_barrier()  # after all stores of keys
    key = tl.load(keys + slot, mask=slot < fill, other=ABSENT_KEY)
    index = _load_indices(indices, head, base, slot)
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    emit(key, index, slot < fill, low, table_row, out, topk, SIZES)
    tl.debug_barrier()  # after all loads


@triton.jit
def emit(key, index, mask, low, table_row, out, topk, SIZES: tl.constexpr):
    """Select the top k of the keys that are at least ``low``, and write them as ``emit_list``
    does."""
    WIDTH: tl.constexpr = SIZES[0]
    BLOCK_SIZE: tl.constexpr = SIZES[2]
    SLOTS: tl.constexpr = SIZES[3]
    if SLOTS:  # load the pages of all keys, because the selection hides the latency of these loads
        page = load_pages(table_row, index, mask, BLOCK_SIZE)
    selected, dst, count, _ = select(key, low, topk, topk)
    if SLOTS:
        index = compute_slots(page, index, BLOCK_SIZE)
    tl.store(out + dst, index, mask=selected)
    pad_result(out, count, topk, WIDTH)


@triton.jit
def pad_list(keys, count, width, CAPACITY: tl.constexpr):
    """Pad a list of ``count`` keys to ``width`` with absent keys."""
    if count < width:
        slot = scratch_slots(count, CAPACITY)
        tl.store(keys + slot, ABSENT_KEY, mask=(slot >= count) & (slot < width))


@triton.jit
def pad_result(out, count, topk, WIDTH: tl.constexpr):
    """Pad a result row of ``count`` entries to ``topk`` with -1."""
    if count < topk:
        slot = scratch_slots(count, WIDTH)
        tl.store(out + slot, -1, mask=(slot >= count) & (slot < topk))


@triton.jit
def _load_entries(scratch, lists, base, start, head, CAPACITY: tl.constexpr):
    """Load the first ``head`` keys of the first list, then entries of all lists from entry
    ``start`` on. Return keys and indices; in complete lists, indices count from ``base``.

    ``scratch``: keys, indices, and keys per row. ``lists``: the row of the first list, the step
    between rows of lists, entries of all lists, entries per list, and whether lists are complete.
    """
    keys, indices, stride = scratch
    row, step, entries, width, complete = lists
    slot = scratch_slots(entries, CAPACITY)
    in_head = slot < head
    entry = start + slot - head
    mask = in_head | (entry < entries)
    # the quotient is exact, because there are fewer than 2**21 entries
    number = ((entry.to(tl.float32) + 0.5) * (1.0 / tl.maximum(width, 1).to(tl.float32))).to(
        tl.int32
    )
    offset = tl.where(in_head, slot, number * step * stride + (entry - number * width))
    offset += row * stride
    key = tl.load(keys + offset, mask=mask, other=ABSENT_KEY)
    is_counted = (complete != 0) & (slot >= head)
    index = tl.load(indices + offset, mask=mask & (is_counted == 0), other=0)
    return key, tl.where(is_counted, base + entry, index)


@triton.jit
def _merge(scratch, lists, base, topk, CAPACITY: tl.constexpr):
    """Merge lists into the first list; return the number of keys in the result. CAPACITY keys are
    loaded at a time. CAPACITY is at least the width of a list, so the first list is read before it
    is overwritten."""
    keys, indices, stride = scratch
    row, _, entries, _, _ = lists
    count = 0
    start = 0
    while start < entries:
        key, index = _load_entries(scratch, lists, base, start, count, CAPACITY)
        start += CAPACITY - count
        selected, dst, count = select_topk(key, topk)
        tl.debug_barrier()  # after all loads
        tl.store(keys + row * stride + dst, key, mask=selected)
        tl.store(indices + row * stride + dst, index, mask=selected)
        tl.debug_barrier()  # after all stores
    return count


@triton.jit
def _emit_lists(scratch, lists, table_row, out, topk, SIZES: tl.constexpr):
    """Select the top k of lists with at most CAPACITY keys; write them as ``emit_list`` does."""
    CAPACITY: tl.constexpr = SIZES[1]
    key, index = _load_entries(scratch, lists, 0, 0, 0, CAPACITY)
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    # the index of an absent key is arbitrary
    emit(key, index, index >= 0, low, table_row, out, topk, SIZES)


@triton.jit(do_not_specialize=SIZES)
def merge_groups_kernel(
    keys, indices, plan, num_tokens, topk,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    MERGE_CAPACITY: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Merge the lists of each row that has more than MERGE_CAPACITY keys in its lists. A program
    merges one group of lists."""
    wait_for_previous_kernel()
    token = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    parts = tl.load(plan + 3 * token)
    width = tl.load(plan + 3 * token + 1)
    complete = tl.load(plan + 3 * token + 2)
    if parts * width > MERGE_CAPACITY:
        size = (parts + GROUPS - 1) // GROUPS
        lists = tl.minimum(size, parts - group * size)
        if lists > 0:
            row = token + group * size * num_tokens
            base = group * size * width
            group_lists = (row, num_tokens, lists * width, width, complete)
            count = _merge((keys, indices, STRIDE), group_lists, base, topk, CAPACITY)
            pad_list(keys + row * STRIDE, count, topk, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def merge_parts_kernel(
    keys, indices, plan, out,
    num_tokens, topk,
    req_indices, request_stride,
    block_table, table_stride, column_stride, max_blocks,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the result of every row with several parts, as indices, or as slots if SLOTS. The token
    of a row with several parts is not padding, so the block table has its request."""
    wait_for_previous_kernel()
    token = tl.program_id(0)
    table = block_table
    if SLOTS:  # load the request together with the plan
        request = tl.load(req_indices + token.to(tl.int64) * request_stride)
        table += request.to(tl.int64) * table_stride
    parts = tl.load(plan + 3 * token)
    width = tl.load(plan + 3 * token + 1)
    complete = tl.load(plan + 3 * token + 2)
    if parts > 1:
        step = num_tokens
        if parts * width > CAPACITY:
            size = (parts + GROUPS - 1) // GROUPS
            parts = (parts + size - 1) // size
            step = size * num_tokens
            width = topk
            complete = 0
        scratch = (keys, indices, STRIDE)
        if parts * width > CAPACITY:
            lists = (token, step, parts * width, width, 0)
            width = _merge(scratch, lists, 0, topk, CAPACITY)
            parts = 1
        lists = (token, step, parts * width, width, complete)
        out += token.to(tl.int64) * topk
        table_row = (table, column_stride, max_blocks)
        if parts * width <= CAPACITY // 2:
            HALF_SIZES: tl.constexpr = (WIDTH, CAPACITY // 2, BLOCK_SIZE, SLOTS)
            _emit_lists(scratch, lists, table_row, out, topk, HALF_SIZES)
        else:
            SIZES: tl.constexpr = (WIDTH, CAPACITY, BLOCK_SIZE, SLOTS)
            _emit_lists(scratch, lists, table_row, out, topk, SIZES)

"""Pass two of the selection: the lists of the parts of a row, merged."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.paging import join_slots, load_pages
from dsv4_ops.kernels.indexer.score_tile import ABSENT_KEY
from dsv4_ops.kernels.indexer.topk_threshold import exactly, pad_list, pad_result, scratch_slots


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
    WIDTH: tl.constexpr = SIZES[0]
    CAPACITY: tl.constexpr = SIZES[1]
    BLOCK_SIZE: tl.constexpr = SIZES[2]
    SLOTS: tl.constexpr = SIZES[3]
    key, index = _load_entries(scratch, lists, 0, 0, 0, CAPACITY)
    if SLOTS:  # of keys that are none the index is anything
        page = load_pages(entries, index, index >= 0, BLOCK_SIZE)
    taken, dst, kept = exactly(key, topk)
    if SLOTS:
        index = join_slots(page, index, BLOCK_SIZE)
    tl.store(out + dst, index, mask=taken)
    pad_result(out, kept, topk, WIDTH)


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
    MERGED: tl.constexpr,
    CAPACITY: tl.constexpr,
):
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
    keys,
    indices,
    plan,
    out,
    num_tokens,
    topk,
    req_indices,
    request_stride,
    block_table,
    table_stride,
    column_stride,
    max_blocks,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
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

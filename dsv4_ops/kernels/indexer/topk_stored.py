"""First pass of a wide selection in two kernels: one stores the keys of all scores, the other
reduces every part of a row to a list of its largest keys, as ``topk_partial.py`` does.

A program that scores keys and selects many of them needs registers for both, so that an SM runs one
such program, and scores at half the speed of ``indexer_logits``.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import valid_tokens
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.topk import ABSENT_KEY, sortable
from dsv4_ops.kernels.indexer.score_tile import (
    load_query,
    load_tile_pages,
    load_weights,
    score_tile,
)
from dsv4_ops.kernels.indexer.topk_merge import partition, scratch_slots, select
from dsv4_ops.kernels.indexer.topk_partial import finish_part, store_all_keys, write_plan


@triton.jit(do_not_specialize=SIZES)
def score_keys_kernel(
    q, token_stride, head_stride, dim_stride, num_heads,
    weights, weight_token_stride, weight_head_stride,
    k_cache, page_stride, num_blocks,
    positions, position_stride,
    req_indices, request_stride,
    block_table, table_stride, column_stride, num_reqs, max_blocks,
    scores, num_rows, topk,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Score up to ROWS keys of a token that sees more than ``topk``."""
    wait_for_previous_kernel()
    programs = (num_rows + ROWS - 1) // ROWS
    token = (tl.program_id(0) // programs).to(tl.int64)
    start = tl.program_id(0) % programs * ROWS
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    position = tl.load(positions + token * position_stride)
    valid = valid_tokens(position, request, num_reqs)
    request = tl.where(valid, request, 0)
    count = tl.where(valid, (position + 1) // RATIO, 0)
    stop = tl.minimum(count, num_rows).to(tl.int32)
    if (start < stop) & (stop > topk):
        queries = (q, token_stride, head_stride, dim_stride, num_heads)
        query = load_query(queries, token, HEADS, DATA_BYTES, CONVERTS)
        head_weights = (weights, weight_token_stride, weight_head_stride)
        weight = load_weights(head_weights, token, num_heads, HEADS)
        cache = (k_cache, page_stride, num_blocks)
        FORMAT: tl.constexpr = (BLOCK_SIZE, DATA_BYTES, SCALE_BYTES, CONVERTS)
        table_row = (block_table + request * table_stride, column_stride)
        pages = load_tile_pages(table_row, start, stop, BLOCK_SIZE, STEP, ROWS)
        lane = tl.arange(0, STEP)
        target = scores + token * num_rows
        for tile in tl.range(0, ROWS // STEP, num_stages=STAGES):
            score, kv_valid = score_tile(
                cache, table_row, pages, start, tile, stop, query, weight, FORMAT, STEP
            )
            row = start + tile * STEP + lane
            key = tl.where(kv_valid, sortable(score), ABSENT_KEY)
            tl.store(target + row, key, mask=row < stop)


@triton.jit
def _copy(keys, source, count, CAPACITY: tl.constexpr):
    """Copy a part whose list has all of its keys."""
    slot = scratch_slots(count, CAPACITY)
    key = tl.load(source + slot, mask=slot < count, other=ABSENT_KEY)
    tl.store(keys + slot, key, mask=slot < count)


@triton.jit
def _reduce_chunk(
    keys, indices, head, source, start, length, low, topk, max_selected, CAPACITY: tl.constexpr
):
    """Reduce the ``head`` keys of a scratch row, and ``length`` more from ``start`` of ``source``
    on, as ``reduce_list`` does. They are loaded together, so that their latencies overlap."""
    slot = scratch_slots(head, CAPACITY)
    is_kept = slot < head
    row = start + slot - head
    tl.debug_barrier()  # after all stores of keys
    key = tl.load(keys + slot, mask=is_kept, other=ABSENT_KEY)
    is_new = (slot >= head) & (slot < head + length)
    new_key = tl.load(source + row, mask=is_new, other=ABSENT_KEY)
    key = tl.where(is_kept, key, new_key)
    index = tl.load(indices + slot, mask=is_kept, other=0)
    index = tl.where(is_kept, index, row)
    selected, dst, count, bound = select(key, low, topk, max_selected)
    tl.debug_barrier()  # after all loads
    tl.store(keys + dst, key, mask=selected)
    tl.store(indices + dst, index, mask=selected)
    return count, bound


@triton.jit(do_not_specialize=SIZES)
def select_stored_kernel(
    scores, num_rows, num_blocks,
    positions, position_stride,
    req_indices, request_stride,
    block_table, table_stride, column_stride, num_reqs, max_blocks,
    keys, indices, plan, out,
    num_tokens, max_parts, topk,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, MIN_PART: tl.constexpr,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, MAX_WIDTH: tl.constexpr,
    MERGE_CAPACITY: tl.constexpr, GROUPS: tl.constexpr, GROUP_CAPACITY: tl.constexpr,
    MAX_LISTS: tl.constexpr, SHORT_PART: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Select from the keys that ``score_keys_kernel`` stored. Parts are assigned to programs as in
    ``select_logits_kernel``."""
    wait_for_previous_kernel()
    program = tl.program_id(0)
    keys += program.to(tl.int64) * CAPACITY
    indices += program.to(tl.int64) * CAPACITY
    item = program
    while item < num_tokens * max_parts:
        token = (item % num_tokens).to(tl.int64)
        part = item // num_tokens
        request = tl.load(req_indices + token * request_stride).to(tl.int64)
        position = tl.load(positions + token * position_stride)
        valid = valid_tokens(position, request, num_reqs)
        request = tl.where(valid, request, 0)
        count = tl.where(valid, (position + 1) // RATIO, 0)
        count = tl.minimum(count, num_rows).to(tl.int32)
        parts, part_keys, width, complete = partition(
            count, num_tokens, max_parts, topk,
            STEP, MIN_PART, MAX_WIDTH, MERGE_CAPACITY, GROUPS, GROUP_CAPACITY, MAX_LISTS,
            SHORT_PART,
        )  # fmt: skip
        table = block_table + request * table_stride
        if part < parts:
            write_plan(plan, token, part, parts, width, complete)
            start = part * part_keys
            fill = 0
            head = 0
            if count <= topk:
                table_row = (table, column_stride)
                store_all_keys(keys, table_row, num_blocks, count, WIDTH, BLOCK_SIZE)
                fill = count
                start = count
            else:
                stop = start + tl.minimum(part_keys, count - start)
                low = tl.full((), ABSENT_KEY + 1, tl.int32)
                row_scores = scores + token * num_rows
                if (parts > 1) & (complete != 0):
                    fill = stop - start
                    _copy(keys, row_scores + start, fill, CAPACITY)
                    start = stop
                while start < stop:
                    length = tl.minimum(stop - start, CAPACITY - head)
                    is_last = start + length == stop
                    max_selected = tl.where(is_last & (parts > 1), width, MAX_WIDTH)
                    head, low = _reduce_chunk(
                        keys, indices, head, row_scores, start, length, low, topk, max_selected,
                        CAPACITY,
                    )  # fmt: skip
                    start += length
                    fill = head
            base = start - fill
            table_row = (table, column_stride, max_blocks)
            SIZES: tl.constexpr = (WIDTH, CAPACITY, BLOCK_SIZE, SLOTS)
            result = out + token * topk
            scratch = (keys, indices)
            finish_part(scratch, fill, head, base, parts, width, table_row, result, topk, SIZES)
        item += tl.num_programs(0)

"""First pass of the selection: reduce every part of a row to a list of the part's largest keys. The
kernels read keys as logits, or compute them as scores.

A program has a scratch row of CAPACITY keys and indices. The program appends all keys in order,
including absent keys. So the loop over loads need not count keys, and a key's slot determines its
index. When the scratch row is full, the program reduces it to at most MAX_WIDTH keys.

The number of keys of a row decides where keys are stored. Torch treats a tensor as written if a
device function gets the tensor's pointer and the function's result reaches a store. So lengths and
positions are loaded by the kernels themselves, not by device functions.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import valid_tokens
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.topk import ABSENT_KEY, sortable
from dsv4_ops.kernels.common.triton_compat import EMULATE
from dsv4_ops.kernels.indexer.score_tile import (
    load_query,
    load_tile_pages,
    load_weights,
    score_tile,
)
from dsv4_ops.kernels.indexer.topk_merge import emit_list, pad_list, partition, reduce_list


@triton.jit
def write_plan(plan, token, part, parts, width, complete):
    """Store for the merges: the number of a row's parts, the width of a list, and whether lists are
    complete."""
    if part == 0:
        tl.store(plan + 3 * token, parts)
        tl.store(plan + 3 * token + 1, width)
        tl.store(plan + 3 * token + 2, complete.to(tl.int32))


@triton.jit
def finish_part(scratch, fill, head, base, parts, width, table_row, out, topk, SIZES: tl.constexpr):
    """Write the result of a row that has one part; otherwise pad the part's list for the merge."""
    CAPACITY: tl.constexpr = SIZES[1]
    keys, indices = scratch
    if parts == 1:
        emit_list(keys, indices, fill, head, base, table_row, out, topk, SIZES)
    else:
        pad_list(keys, fill, width, CAPACITY)


@triton.jit
def store_all_keys(
    keys, table_row, num_blocks, count, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """All ``count`` rows of a token are selected, whatever their scores: store equal keys for the
    rows that exist, and ABSENT_KEY for the other rows. ``table_row``: the request's row of the
    block table and its stride."""
    table, column_stride = table_row
    slot = tl.arange(0, WIDTH)
    page = tl.load(table + (slot // BLOCK_SIZE) * column_stride, mask=slot < count, other=-1)
    kv_valid = (page >= 0) & (page < num_blocks)
    tl.store(keys + slot, tl.where(kv_valid, 0, ABSENT_KEY))


@triton.jit(do_not_specialize=SIZES)
def select_logits_kernel(
    logits, row_stride, column_stride, num_columns,
    lens, lens_stride,
    keys, indices, plan, out,
    num_tokens, max_parts, topk,
    STEP: tl.constexpr, MIN_PART: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    MAX_WIDTH: tl.constexpr, MERGE_CAPACITY: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_CAPACITY: tl.constexpr, MAX_LISTS: tl.constexpr, SHORT_PART: tl.constexpr,
):  # fmt: skip
    """Select by logits. A program processes every ``num_programs``-th part of the batch; the first
    parts of all rows come first."""
    wait_for_previous_kernel()
    program = tl.program_id(0)
    keys += program.to(tl.int64) * CAPACITY
    indices += program.to(tl.int64) * CAPACITY
    lane = tl.arange(0, STEP)
    item = program
    while item < num_tokens * max_parts:
        token = (item % num_tokens).to(tl.int64)
        part = item // num_tokens
        count = tl.load(lens + token * lens_stride).to(tl.int64)
        count = tl.minimum(tl.maximum(count, 0), num_columns).to(tl.int32)
        parts, part_keys, width, complete = partition(
            count, num_tokens, max_parts, topk,
            STEP, MIN_PART, MAX_WIDTH, MERGE_CAPACITY, GROUPS, GROUP_CAPACITY, MAX_LISTS,
            SHORT_PART,
        )  # fmt: skip
        if part < parts:
            write_plan(plan, token, part, parts, width, complete)
            start = part * part_keys
            stop = start + tl.minimum(part_keys, count - start)
            row_logits = logits + token * row_stride
            fill = 0
            head = 0
            low = tl.full((), ABSENT_KEY + 1, tl.int32)
            while start < stop:
                length = tl.minimum(stop - start, (CAPACITY - fill) // STEP * STEP)
                first = 0
                while first < length:
                    column = start + first + lane
                    source = row_logits + column.to(tl.int64) * column_stride
                    score = tl.load(source, mask=column < stop, other=float("-inf"))
                    key = tl.where(score == float("-inf"), ABSENT_KEY, sortable(score))
                    tl.store(keys + fill + first + lane, key)
                    first += STEP
                start += length
                fill += length
                if (start < stop) | ((parts > 1) & (complete == 0)):
                    max_selected = tl.where(start < stop, MAX_WIDTH, width)
                    head, low = reduce_list(
                        keys, indices, fill, head, start - fill, low, topk, max_selected, CAPACITY
                    )
                    fill = head
            result = out + token * topk
            base = start - fill
            scratch = (keys, indices)
            table_row = (None, 0, 0)
            SIZES: tl.constexpr = (WIDTH, CAPACITY, 1, False)
            finish_part(scratch, fill, head, base, parts, width, table_row, result, topk, SIZES)
        item += tl.num_programs(0)


@triton.jit(do_not_specialize=SIZES)
def select_keys_kernel(
    q, token_stride, head_stride, dim_stride, num_heads,
    weights, weight_token_stride, weight_head_stride,
    k_cache, page_stride, num_blocks,
    positions, position_stride,
    req_indices, request_stride,
    block_table, table_stride, column_stride, num_reqs, max_blocks,
    keys, indices, plan, out,
    num_tokens, max_parts, topk,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, MIN_PART: tl.constexpr,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, MAX_WIDTH: tl.constexpr,
    MERGE_CAPACITY: tl.constexpr, GROUPS: tl.constexpr, GROUP_CAPACITY: tl.constexpr,
    MAX_LISTS: tl.constexpr, SHORT_PART: tl.constexpr, STAGES: tl.constexpr, SLOTS: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Compute scores from queries and keys, and select by them. Programs process parts as in
    ``select_logits_kernel``."""
    wait_for_previous_kernel()
    queries = (q, token_stride, head_stride, dim_stride, num_heads)
    head_weights = (weights, weight_token_stride, weight_head_stride)
    cache = (k_cache, page_stride, num_blocks)
    FORMAT: tl.constexpr = (BLOCK_SIZE, DATA_BYTES, SCALE_BYTES, CONVERTS)
    program = tl.program_id(0)
    keys += program.to(tl.int64) * CAPACITY
    indices += program.to(tl.int64) * CAPACITY
    lane = tl.arange(0, STEP)
    item = program
    while item < num_tokens * max_parts:
        token = (item % num_tokens).to(tl.int64)
        part = item // num_tokens
        request = tl.load(req_indices + token * request_stride).to(tl.int64)
        position = tl.load(positions + token * position_stride)
        valid = valid_tokens(position, request, num_reqs)
        request = tl.where(valid, request, 0)
        count = tl.where(valid, (position + 1) // RATIO, 0)
        count = tl.minimum(count, tl.cast(max_blocks, tl.int64) * BLOCK_SIZE).to(tl.int32)
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
                query = load_query(queries, token, HEADS, DATA_BYTES, CONVERTS)
                weight = load_weights(head_weights, token, num_heads, HEADS)
                tile_table = (table, column_stride)
                pages = load_tile_pages(tile_table, start, stop, BLOCK_SIZE, STEP, CAPACITY)
                while start < stop:
                    length = tl.minimum(stop - start, (CAPACITY - fill) // STEP * STEP)
                    tiles = (length + STEP - 1) // STEP
                    # Triton's interpreter cannot loop up to a tensor; extra tiles add no keys
                    for tile in tl.range(
                        0, CAPACITY // STEP if EMULATE else tiles, num_stages=STAGES
                    ):
                        score, kv_valid = score_tile(
                            cache, tile_table, pages, start, tile, stop, query, weight, FORMAT, STEP
                        )
                        key = tl.where(kv_valid, sortable(score), ABSENT_KEY)
                        slot = tile * STEP + lane
                        tl.store(keys + fill + slot, key, mask=slot < length)
                    start += length
                    fill += length
                    pages = load_tile_pages(tile_table, start, stop, BLOCK_SIZE, STEP, CAPACITY)
                    if (start < stop) | ((parts > 1) & (complete == 0)):
                        max_selected = tl.where(start < stop, MAX_WIDTH, width)
                        head, low = reduce_list(
                            keys, indices, fill, head, start - fill, low, topk, max_selected,
                            CAPACITY,
                        )  # fmt: skip
                        fill = head
            result = out + token * topk
            base = start - fill
            scratch = (keys, indices)
            table_row = (table, column_stride, max_blocks)
            SIZES: tl.constexpr = (WIDTH, CAPACITY, BLOCK_SIZE, SLOTS)
            finish_part(scratch, fill, head, base, parts, width, table_row, result, topk, SIZES)
        item += tl.num_programs(0)

"""Pass one of the selection: the best keys of every part of a row, from scores that are computed on
the way or read.

A program has a scratch row of CAPACITY keys and indices. Keys are put there as they come, present
or not, so that nothing is counted in the loop that waits for loads; their indices follow from their
offsets. When the row is full it is reduced to the best, MOST at most.

Where keys go depends on how many a row has. Torch takes a pointer for written to if it leads to a
store through a function, so that what says how many is loaded in no function of these.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.paging import valid_tokens
from dsv4_ops.kernels.common.triton_compat import EMULATE
from dsv4_ops.kernels.indexer.score_tile import (
    ABSENT_KEY,
    find_pages,
    load_query,
    load_weights,
    score_tile,
    sortable,
)
from dsv4_ops.kernels.indexer.topk_merge import emit_list, pad_list, partition, reduce_list


@triton.jit
def _write_plan(plan, token, split, parts, width, whole):
    if split == 0:
        tl.store(plan + 3 * token, parts)
        tl.store(plan + 3 * token + 1, width)
        tl.store(plan + 3 * token + 2, whole.to(tl.int32))


@triton.jit
def _finish(scratch, fill, head, base, parts, width, entries, out, topk, SIZES: tl.constexpr):
    """A row of one part is a result; the list of a part is merged later."""
    keys, indices = scratch
    if parts == 1:
        emit_list(keys, indices, fill, head, base, entries, out, topk, SIZES)
    else:
        pad_list(keys, fill, width, SIZES[1])


@triton.jit
def select_logits_kernel(
    logits, row_stride, column_stride, num_columns,
    lens, lens_stride,
    keys, indices, plan, out,
    num_tokens, splits, topk,
    STEP: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    MOST: tl.constexpr, MERGED: tl.constexpr, GROUPS: tl.constexpr, GROUPED: tl.constexpr,
    LISTS: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    keys += program.to(tl.int64) * CAPACITY
    indices += program.to(tl.int64) * CAPACITY
    lane = tl.arange(0, STEP)
    item = program
    while item < num_tokens * splits:
        token = (item % num_tokens).to(tl.int64)
        split = item // num_tokens
        count = tl.load(lens + token * lens_stride).to(tl.int64)
        count = tl.minimum(tl.maximum(count, 0), num_columns).to(tl.int32)
        parts, share, width, whole = partition(
            count, num_tokens, splits, topk,
            STEP, LEAST, MOST, MERGED, GROUPS, GROUPED, LISTS, LONG,
        )  # fmt: skip
        if split < parts:
            _write_plan(plan, token, split, parts, width, whole)
            start = split * share
            stop = start + tl.minimum(share, count - start)
            source = logits + token * row_stride
            fill = 0
            head = 0
            low = tl.full((), ABSENT_KEY + 1, tl.int32)
            while start < stop:
                length = tl.minimum(stop - start, (CAPACITY - fill) // STEP * STEP)
                first = 0
                while first < length:
                    column = start + first + lane
                    values = source + column.to(tl.int64) * column_stride
                    score = tl.load(values, mask=column < stop, other=float("-inf"))
                    key = tl.where(score == float("-inf"), ABSENT_KEY, sortable(score))
                    tl.store(keys + fill + first + lane, key)
                    first += STEP
                start += length
                fill += length
                if (start < stop) | ((parts > 1) & (whole == 0)):
                    most = tl.where(start < stop, MOST, width)
                    head, low = reduce_list(
                        keys, indices, fill, head, start - fill, low, topk, most, CAPACITY
                    )
                    fill = head
            row = out + token * topk
            base = start - fill
            scratch = (keys, indices)
            of_row = (None, 0, 0)
            SIZES: tl.constexpr = (WIDTH, CAPACITY, 1, False)
            _finish(scratch, fill, head, base, parts, width, of_row, row, topk, SIZES)
        item += tl.num_programs(0)


@triton.jit
def select_keys_kernel(
    q, token_stride, head_stride, dim_stride, num_heads,
    weights, weight_token_stride, weight_head_stride,
    k_cache, page_stride, num_blocks,
    positions, position_stride,
    req_indices, request_stride,
    block_table, table_stride, column_stride, num_reqs, max_blocks,
    keys, indices, plan, out,
    num_tokens, splits, topk,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, MERGED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPED: tl.constexpr, LISTS: tl.constexpr, LONG: tl.constexpr,
    STAGES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    queries = (q, token_stride, head_stride, dim_stride, num_heads)
    scaled = (weights, weight_token_stride, weight_head_stride)
    cache = (k_cache, page_stride, num_blocks)
    FORMAT: tl.constexpr = (BLOCK_SIZE, DATA_BYTES, SCALE_BYTES)
    program = tl.program_id(0)
    keys += program.to(tl.int64) * CAPACITY
    indices += program.to(tl.int64) * CAPACITY
    lane = tl.arange(0, STEP)
    item = program
    while item < num_tokens * splits:
        token = (item % num_tokens).to(tl.int64)
        split = item // num_tokens
        request = tl.load(req_indices + token * request_stride).to(tl.int64)
        position = tl.load(positions + token * position_stride)
        real = valid_tokens(position, request, num_reqs)
        request = tl.where(real, request, 0)
        count = tl.where(real, (position + 1) // RATIO, 0)
        count = tl.minimum(count, tl.cast(max_blocks, tl.int64) * BLOCK_SIZE).to(tl.int32)
        parts, share, width, whole = partition(
            count, num_tokens, splits, topk,
            STEP, LEAST, MOST, MERGED, GROUPS, GROUPED, LISTS, LONG,
        )  # fmt: skip
        table = block_table + request * table_stride
        if split < parts:
            _write_plan(plan, token, split, parts, width, whole)
            start = split * share
            fill = 0
            head = 0
            if count <= topk:  # all that exist, whatever their scores
                slot = tl.arange(0, WIDTH)
                page = tl.load(
                    table + (slot // BLOCK_SIZE) * column_stride, mask=slot < count, other=-1
                )
                exists = (page >= 0) & (page < num_blocks)
                tl.store(keys + slot, tl.where(exists, 0, ABSENT_KEY))
                fill = count
                start = count
            else:
                stop = start + tl.minimum(share, count - start)
                low = tl.full((), ABSENT_KEY + 1, tl.int32)
                query = load_query(queries, token, HEADS, DATA_BYTES)
                weight = load_weights(scaled, token, num_heads, HEADS)
                entries = (table, column_stride)
                pages = find_pages(entries, start, stop, BLOCK_SIZE, STEP, CAPACITY)
                while start < stop:
                    length = tl.minimum(stop - start, (CAPACITY - fill) // STEP * STEP)
                    tiles = (length + STEP - 1) // STEP
                    # Triton's interpreter has no range up to a value: extra tiles add nothing
                    for tile in tl.range(
                        0, CAPACITY // STEP if EMULATE else tiles, num_stages=STAGES
                    ):
                        score, exists = score_tile(
                            cache, entries, pages, start, tile, stop, query, weight, FORMAT, STEP
                        )
                        key = tl.where(exists, sortable(score), ABSENT_KEY)
                        slot = tile * STEP + lane
                        tl.store(keys + fill + slot, key, mask=slot < length)
                    start += length
                    fill += length
                    pages = find_pages(entries, start, stop, BLOCK_SIZE, STEP, CAPACITY)
                    if (start < stop) | ((parts > 1) & (whole == 0)):
                        most = tl.where(start < stop, MOST, width)
                        head, low = reduce_list(
                            keys, indices, fill, head, start - fill, low, topk, most, CAPACITY
                        )
                        fill = head
            row = out + token * topk
            base = start - fill
            scratch = (keys, indices)
            of_row = (table, column_stride, max_blocks)
            SIZES: tl.constexpr = (WIDTH, CAPACITY, BLOCK_SIZE, SLOTS)
            _finish(scratch, fill, head, base, parts, width, of_row, row, topk, SIZES)
        item += tl.num_programs(0)

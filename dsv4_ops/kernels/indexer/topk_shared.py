"""Pass one of the selection for tokens that share keys, such as those of a verification: keys are
read once and scored with the queries of TOKENS tokens, each of which has a scratch row of its own.

As in ``topk_partial.py``, except that all scratch rows of a program are filled alike: what a
reduction keeps is padded to one length. Tokens that lie together need not be of one request: a
program takes them in runs whose requests are the same.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.paging import find_real
from dsv4_ops.kernels.common.triton_compat import EMULATE
from dsv4_ops.kernels.indexer.score_tile import (
    ABSENT_KEY,
    find_pages,
    find_run,
    load_query,
    load_tile,
    load_weights,
    pick,
    score_codes,
    sortable,
)
from dsv4_ops.kernels.indexer.topk_merge import (
    emit_list,
    pad_list,
    pad_result,
    partition,
    reduce_list,
)


@triton.jit
def _varied(fill, number):
    """``fill``, as what may differ from row to row: addresses that are the same for all rows would
    stay in registers from one to the next, and spill."""
    return fill + tl.minimum(number, 0)


@triton.jit
def select_shared_keys_kernel(
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
    GROUPS: tl.constexpr, GROUPED: tl.constexpr, STAGES: tl.constexpr, SLOTS: tl.constexpr,
    TOKENS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    queries = (q, token_stride, head_stride, dim_stride, num_heads)
    scaled = (weights, weight_token_stride, weight_head_stride)
    cache = (k_cache, page_stride, num_blocks)
    FORMAT: tl.constexpr = (BLOCK_SIZE, DATA_BYTES, SCALE_BYTES)
    SIZES: tl.constexpr = (WIDTH, CAPACITY, BLOCK_SIZE, SLOTS)
    program = tl.program_id(0)
    keys += program.to(tl.int64) * TOKENS * CAPACITY
    indices += program.to(tl.int64) * TOKENS * CAPACITY
    lane = tl.arange(0, STEP)
    member = tl.arange(0, LANES)
    together = num_tokens // TOKENS
    item = program
    while item < together * splits:
        first = (item % together).to(tl.int64) * TOKENS
        split = item // together
        token = first + tl.minimum(member, TOKENS - 1)
        request = tl.load(req_indices + token * request_stride).to(tl.int64)
        position = tl.load(positions + token * position_stride)
        real = find_real(position, request, num_reqs) & (member < TOKENS)
        request = tl.where(real, request, 0)
        every = tl.where(real, (position + 1) // RATIO, 0)
        every = tl.minimum(every, tl.cast(max_blocks, tl.int64) * BLOCK_SIZE).to(tl.int32)
        done = 0
        while done < TOKENS:
            own, end = find_run(request, every, done, TOKENS)
            counts = tl.where((member >= done) & (member < end), every, 0)
            count = tl.max(counts)
            parts, share, width, whole = partition(
                count, splits, topk, STEP, LEAST, MOST, MERGED, GROUPS, GROUPED
            )
            table = block_table + own * table_stride
            if split < parts:
                if split == 0:  # a token without candidates is no row to merge
                    planned = (member >= done) & (member < end)
                    several = counts > 0
                    entry = plan + 3 * token
                    tl.store(entry, tl.where(several, parts, 1), mask=planned)
                    tl.store(entry + 1, tl.where(several, width, 0), mask=planned)
                    tl.store(entry + 2, (several & whole).to(tl.int32), mask=planned)
                start = split * share
                fill = 0
                head = 0
                visible = ()
                for place in tl.static_range(TOKENS):
                    visible += (pick(counts, place),)
                if count <= topk:  # all that exist, whatever their scores
                    slot = tl.arange(0, WIDTH)
                    page = tl.load(
                        table + (slot // BLOCK_SIZE) * column_stride, mask=slot < count, other=-1
                    )
                    exists = (page >= 0) & (page < num_blocks)
                    for place in tl.static_range(TOKENS):
                        key = tl.where(exists & (slot < visible[place]), 0, ABSENT_KEY)
                        tl.store(keys + place * CAPACITY + slot, key, mask=visible[place] > 0)
                    fill = count
                    start = count
                else:
                    stop = start + tl.minimum(share, count - start)
                    low = tl.full((LANES,), ABSENT_KEY + 1, tl.int32)
                    query = ()
                    for place in tl.static_range(TOKENS):
                        query += (load_query(queries, first + place, HEADS, DATA_BYTES),)
                    entries = (table, column_stride)
                    pages = find_pages(entries, start, stop, BLOCK_SIZE, STEP, CAPACITY)
                    while start < stop:
                        length = tl.minimum(stop - start, (CAPACITY - fill) // STEP * STEP)
                        tiles = (length + STEP - 1) // STEP
                        # Triton's interpreter has no range up to a value: extra tiles add nothing
                        for tile in tl.range(
                            0, CAPACITY // STEP if EMULATE else tiles, num_stages=STAGES
                        ):
                            codes, scale, exists = load_tile(
                                cache, entries, pages, start, tile, stop, FORMAT, STEP
                            )
                            slot = tile * STEP + lane
                            for place in tl.static_range(TOKENS):
                                # for each tile anew: kept for all tokens, they would spill
                                weight = load_weights(scaled, first + place, num_heads, HEADS)
                                score = score_codes(codes, scale, query[place], weight)
                                there = exists & (start + slot < visible[place])
                                key = tl.where(there, sortable(score), ABSENT_KEY)
                                kept_at = keys + place * CAPACITY + fill + slot
                                tl.store(kept_at, key, mask=(slot < length) & (visible[place] > 0))
                        start += length
                        fill += length
                        pages = find_pages(entries, start, stop, BLOCK_SIZE, STEP, CAPACITY)
                        if (start < stop) | ((parts > 1) & (whole == 0)):
                            most = tl.where(start < stop, MOST, width)
                            number = done
                            while number < end:
                                row = number * CAPACITY
                                kept, least = reduce_list(
                                    keys + row, indices + row, _varied(fill, number),
                                    head, start - fill, pick(low, number), topk, most, CAPACITY,
                                )  # fmt: skip
                                pad_list(keys + row, kept, most, CAPACITY)
                                low = tl.where(member == number, least, low)
                                number += 1
                            fill = most
                            head = most
                number = done
                while number < end:
                    row = number * CAPACITY
                    target = out + (first + number) * topk
                    if pick(counts, number) == 0:
                        if split == 0:
                            pad_result(target, 0, topk, WIDTH)
                    elif parts == 1:
                        emit_list(
                            keys + row, indices + row, _varied(fill, number), head, start - fill,
                            (table, column_stride, max_blocks), target, topk, SIZES,
                        )  # fmt: skip
                    else:
                        pad_list(keys + row, fill, width, CAPACITY)
                    number += 1
            done = end
        item += tl.num_programs(0)

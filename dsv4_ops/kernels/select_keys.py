"""Pass one of the selection: the best keys of every part of a row, from scores that are computed on
the way or read.

A program has a scratch row of CAPACITY keys and indices. Keys are appended in order, once it has
topk of them only those that can be among the best; when it is full it is reduced to the best.

Where keys go depends on what was loaded. Torch takes a pointer for written to if it leads to a
store through a function, so that queries, keys and tables are loaded in no function of these.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.indexer_scores import ABSENT_KEY, decoded, score_codes, sortable
from dsv4_ops.kernels.pages import find_real
from dsv4_ops.kernels.selection import best, emit, pad_list, partition


@triton.jit
def _append(keys, indices, fill, key, index, least):
    """Put the keys above ``least`` behind the ``fill`` ones of a scratch row; how many it has."""
    taken = key > least
    place = fill + tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(keys + place, key, mask=taken)
    tl.store(indices + place, index, mask=taken)
    return fill + tl.sum(taken.to(tl.int32), axis=0)


@triton.jit
def _reduce(keys, indices, fill, topk, CAPACITY: tl.constexpr):
    """Reduce the ``fill`` keys of a scratch row, more than ``topk``, to the best; the worst of
    these, which later keys have to be above."""
    slot = tl.arange(0, CAPACITY)
    tl.debug_barrier()  # all was written
    key = tl.load(keys + slot, mask=slot < fill, other=ABSENT_KEY)
    taken, place, _, least = best(key, topk)
    index = tl.load(indices + slot, mask=taken, other=0)
    tl.debug_barrier()  # all was read
    tl.store(keys + place, key, mask=taken)
    tl.store(indices + place, index, mask=taken)
    return least


@triton.jit
def _finish(keys, indices, plan, out, token, split, parts, share, kept, topk, WIDTH: tl.constexpr):
    """A row of one part is a result; the list of a part is merged later."""
    tl.debug_barrier()
    if split == 0:
        tl.store(plan + 2 * token, parts.to(tl.int32))
        tl.store(plan + 2 * token + 1, tl.minimum(share, topk).to(tl.int32))
    if parts == 1:
        emit(out + token * topk, indices, kept, topk, WIDTH)
        tl.debug_barrier()
    else:
        pad_list(keys, kept, topk, WIDTH)


@triton.jit
def select_logits_kernel(
    logits,
    row_stride,
    column_stride,
    num_columns,
    lens,
    lens_stride,
    keys,
    indices,
    plan,
    out,
    num_tokens,
    splits,
    topk,
    STEP: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    program = tl.program_id(0)
    keys += program.to(tl.int64) * CAPACITY
    indices += program.to(tl.int64) * CAPACITY
    lane = tl.arange(0, STEP)
    item = program
    while item < num_tokens * splits:
        token = (item // splits).to(tl.int64)
        split = item % splits
        count = tl.load(lens + token * lens_stride).to(tl.int64)
        count = tl.minimum(tl.maximum(count, 0), num_columns)
        parts, share = partition(count, splits, topk, STEP, LEAST)
        if split < parts:
            start = split * share
            stop = tl.minimum(start + share, count)
            fill = 0
            least = tl.full((), ABSENT_KEY, tl.int32)
            while start < stop:
                column = start + lane
                place = logits + token * row_stride + column * column_stride
                score = tl.load(place, mask=column < stop, other=float("-inf"))
                key = tl.where(score == float("-inf"), ABSENT_KEY, sortable(score))
                fill = _append(keys, indices, fill, key, column.to(tl.int32), least)
                start += STEP
                if (fill > topk) & ((start >= stop) | (fill + STEP > CAPACITY)):
                    least = _reduce(keys, indices, fill, topk, CAPACITY)
                    fill = topk
            _finish(keys, indices, plan, out, token, split, parts, share, fill, topk, WIDTH)
        item += tl.num_programs(0)


@triton.jit
def _append_tile(
    keys,
    indices,
    fill,
    least,
    query,
    weight,
    k_cache,
    page_stride,
    num_blocks,
    block_table,
    table_stride,
    column_stride,
    request,
    start,
    first,
    length,
    BLOCK_SIZE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Score the tile at ``first`` of the ``length`` rows from ``start`` on, and append its keys."""
    place = first + tl.arange(0, STEP)
    wanted = place < length
    position = tl.where(wanted, start.to(tl.int32) + place, 0)
    column = (position // BLOCK_SIZE).to(tl.int64) * column_stride
    page = tl.load(block_table + request * table_stride + column, mask=wanted, other=-1)
    exists = (page >= 0) & (page < num_blocks)
    page_start = k_cache + tl.where(exists, page, 0).to(tl.int64) * page_stride
    row = position % BLOCK_SIZE
    source = page_start + row * DATA_BYTES
    lane = tl.arange(0, DATA_BYTES)[None, :]
    if EMULATE:
        codes = decoded(tl.load(source[:, None] + lane, mask=exists[:, None], other=0))
    else:  # anything where no row exists, which touches no other row of the product
        source = source.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        codes = tl.load(source[:, None] + lane, mask=exists[:, None])
    scales = page_start + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES
    scale = tl.load(scales.to(tl.pointer_type(tl.float32), bitcast=True), mask=exists, other=0.0)
    score = score_codes(codes, scale, query, weight)
    key = tl.where(exists, sortable(score), ABSENT_KEY)
    return _append(keys, indices, fill, key, position, least)


@triton.jit
def select_keys_kernel(
    q,
    token_stride,
    head_stride,
    dim_stride,
    num_heads,
    weights,
    weight_token_stride,
    weight_head_stride,
    k_cache,
    page_stride,
    num_blocks,
    positions,
    position_stride,
    req_indices,
    request_stride,
    block_table,
    table_stride,
    column_stride,
    num_reqs,
    max_blocks,
    keys,
    indices,
    plan,
    out,
    num_tokens,
    splits,
    topk,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    program = tl.program_id(0)
    keys += program.to(tl.int64) * CAPACITY
    indices += program.to(tl.int64) * CAPACITY
    item = program
    while item < num_tokens * splits:
        token = (item // splits).to(tl.int64)
        split = item % splits
        request = tl.load(req_indices + token * request_stride).to(tl.int64)
        position = tl.load(positions + token * position_stride)
        real = find_real(position, request, num_reqs)
        request = tl.where(real, request, 0)
        count = tl.where(real, (position + 1) // RATIO, 0)
        count = tl.minimum(count, tl.cast(max_blocks, tl.int64) * BLOCK_SIZE)
        parts, share = partition(count, splits, topk, STEP, LEAST)
        if split < parts:
            start = split * share
            stop = tl.minimum(start + share, count)
            fill = 0
            if count <= topk:  # all that exist, whatever their scores
                while start < stop:
                    row = start + tl.arange(0, STEP)
                    column = tl.where(row < stop, row // BLOCK_SIZE, 0) * column_stride
                    entry = block_table + request * table_stride + column
                    page = tl.load(entry, mask=row < stop, other=-1)
                    exists = (page >= 0) & (page < num_blocks)
                    key = tl.where(exists, 0, ABSENT_KEY)
                    fill = _append(keys, indices, fill, key, row.to(tl.int32), ABSENT_KEY)
                    start += STEP
            else:
                least = tl.full((), ABSENT_KEY, tl.int32)
                head = tl.arange(0, HEADS)
                there = head < num_heads
                lane = tl.arange(0, DATA_BYTES).to(tl.int64) * dim_stride
                source = q + token * token_stride + head.to(tl.int64)[:, None] * head_stride
                source += lane[None, :]
                if EMULATE:
                    query = decoded(tl.load(source, mask=there[:, None], other=0))
                else:
                    source = source.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
                    query = tl.load(source, mask=there[:, None], other=0.0)
                query = tl.trans(query)
                at = token * weight_token_stride + head.to(tl.int64) * weight_head_stride
                weight = tl.load(weights + at, mask=there, other=0.0)
                while start < stop:
                    length = tl.minimum(stop - start, (CAPACITY - fill) // STEP * STEP).to(tl.int32)
                    tiles = (length + STEP - 1) // STEP
                    # Triton's interpreter has no range up to a value: further tiles add nothing
                    for tile in tl.range(
                        0, CAPACITY // STEP if EMULATE else tiles, num_stages=STAGES
                    ):
                        fill = _append_tile(
                            keys,
                            indices,
                            fill,
                            least,
                            query,
                            weight,
                            k_cache,
                            page_stride,
                            num_blocks,
                            block_table,
                            table_stride,
                            column_stride,
                            request,
                            start,
                            tile * STEP,
                            length,
                            BLOCK_SIZE,
                            DATA_BYTES,
                            SCALE_BYTES,
                            STEP,
                            EMULATE,
                        )
                    start += length
                    if (fill > topk) & ((start >= stop) | (fill + CAPACITY // 4 > CAPACITY)):
                        least = _reduce(keys, indices, fill, topk, CAPACITY)
                        fill = topk
            _finish(keys, indices, plan, out, token, split, parts, share, fill, topk, WIDTH)
        item += tl.num_programs(0)

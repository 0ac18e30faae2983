"""A wide selection in three kernels: one stores the keys of all scores, one keeps the keys that may
be selected, and one selects from the kept keys. A key is the sortable integer of a score.

One kernel for both scores and a wide selection would need so many registers that an SM would run
only one program. Scoring would then be half as fast as in ``indexer_logits``.

The first kernel also stores a sample of every row. A lower bound of the kept keys follows from the
sample. The bound is so low that a row hardly ever keeps fewer than ``topk`` keys, and so high that
the last kernel can hold the kept keys in registers. If a row keeps too few or too many keys, for
example because most of its keys are equal, the last kernel reads all of its keys. So the result
depends on the keys alone, never on the sample. The last kernel also reads all keys of a short row,
which it can hold in registers.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.paging import valid_tokens
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.topk import ABSENT_KEY, find_threshold, sortable
from dsv4_ops.kernels.indexer.score_tile import (
    load_query,
    load_tile_pages,
    load_weights,
    score_tile,
)
from dsv4_ops.kernels.indexer.topk_merge import emit, scratch_slots, select


@triton.jit(do_not_specialize=SIZES)
def score_keys_kernel(
    q, token_stride, head_stride, dim_stride, num_heads,
    weights, weight_token_stride, weight_head_stride,
    k_cache, page_stride, num_blocks,
    positions, position_stride,
    req_indices, request_stride,
    block_table, table_stride, column_stride, num_reqs, max_blocks,
    scores, samples, num_rows, topk,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, CONVERTS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Score up to ROWS rows of a token that sees more than ``topk`` rows. Store their keys in
    ``scores``, and also store the keys of the sample in ``samples``."""
    wait_for_previous_kernel()
    programs = (num_rows + ROWS - 1) // ROWS
    token = (tl.program_id(0) // programs).to(tl.int64)
    start = (tl.program_id(0) % programs).to(tl.int32) * ROWS
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
        sample = samples + token * SAMPLE
        shift = _sample_shift(stop, SAMPLE)
        for tile in tl.range(0, ROWS // STEP, num_stages=STAGES):
            score, kv_valid = score_tile(
                cache, table_row, pages, start, tile, stop, query, weight, FORMAT, STEP
            )
            row = start + tile * STEP + lane
            key = tl.where(kv_valid, sortable(score), ABSENT_KEY)
            tl.store(target + row, key, mask=row < stop)
            place = row >> shift
            # vary which of every 2^shift rows is sampled, because contents may repeat
            varied = ((place * 40503) >> 7) & ((1 << shift) - 1)
            in_sample = (row == (place << shift) + varied) & (place < (stop >> shift))
            tl.store(sample + place, key, mask=in_sample)


@triton.jit
def _sample_shift(count, SAMPLE: tl.constexpr):
    """Return the smallest shift for which a row of ``count`` keys has at most SAMPLE samples, one
    of every 2^shift keys."""
    shift = 0
    while (count >> shift) > SAMPLE:
        shift += 1
    return shift


@triton.jit
def _find_cut(key, shift, topk, DEVIATIONS: tl.constexpr):
    """From a sample of one in 2^shift keys of a row, return a lower bound of the keys to keep.

    If ``rank`` samples are kept, the number of kept keys has a standard deviation of up to
    ``sqrt(rank)`` times 2^shift keys. The expected number exceeds ``topk`` by DEVIATIONS times this
    deviation."""
    each = (1 << shift).to(tl.float32)
    wanted = topk / each
    spread = DEVIATIONS * DEVIATIONS * (1 - 1 / each)
    rank = tl.ceil(wanted + spread / 2 + tl.sqrt(spread * (wanted + spread / 4))).to(tl.int32)
    max_rank = rank + rank // 16  # so that few steps find a bound
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    total = tl.sum((key >= low).to(tl.int32), axis=0)
    cut = low
    if total > max_rank:
        threshold, num_above = find_threshold(key, low, total, rank, max_rank)
        cut = tl.where(num_above >= rank, threshold + 1, threshold)
    return cut


@triton.jit(do_not_specialize=SIZES)
def keep_keys_kernel(
    scores, samples, num_rows,
    positions, position_stride,
    req_indices, request_stride, num_reqs,
    keys, rows, counts, cuts, max_parts, capacity, topk,
    RATIO: tl.constexpr, SAMPLE: tl.constexpr, DEVIATIONS: tl.constexpr, STEP: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """For one of the ``max_parts`` parts of a row, list up to ``capacity`` keys to keep, and their
    rows. Store the number of keys to keep, and their lower bound. Rows of up to CAPACITY keys need
    no list."""
    wait_for_previous_kernel()
    token = (tl.program_id(0) // max_parts).to(tl.int64)
    part = tl.program_id(0) % max_parts
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    position = tl.load(positions + token * position_stride)
    valid = valid_tokens(position, request, num_reqs)
    count = tl.where(valid, (position + 1) // RATIO, 0)
    count = tl.minimum(count, num_rows).to(tl.int32)
    if (count > topk) & (count > CAPACITY):
        part_keys = (count + max_parts - 1) // max_parts
        start = part * part_keys
        stop = tl.minimum(start + part_keys, count)
        fill = 0
        if start < stop:
            shift = _sample_shift(count, SAMPLE)
            place = scratch_slots(count, SAMPLE)
            sample = samples + token * SAMPLE + place
            sampled = tl.load(sample, mask=place < (count >> shift), other=ABSENT_KEY)
            cut = _find_cut(sampled, shift, topk, DEVIATIONS)
            if part == 0:
                tl.store(cuts + token, cut)
            source = scores + token * num_rows
            first = tl.program_id(0).to(tl.int64) * capacity
            while start < stop:
                row = start + scratch_slots(count, STEP)
                key = tl.load(source + row, mask=row < stop, other=ABSENT_KEY)
                kept = key >= cut
                rank = tl.cumsum(kept.to(tl.int32), axis=0)
                slot = fill + rank - 1
                fits = kept & (slot < capacity)
                tl.store(keys + first + slot, key, mask=fits)
                tl.store(rows + first + slot, row, mask=fits)
                fill += tl.sum(kept.to(tl.int32), axis=0)
                start += STEP
        tl.store(counts + tl.program_id(0), fill)


@triton.jit(do_not_specialize=SIZES)
def select_kept_kernel(
    scores, num_rows, num_blocks,
    positions, position_stride,
    req_indices, request_stride,
    block_table, table_stride, column_stride, num_reqs, max_blocks,
    keys, rows, counts, cuts, out, max_parts, capacity, topk,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    MAX_PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Select from the kept keys of a token, or from all of its keys if too few or too many are
    kept."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(req_indices + token * request_stride).to(tl.int64)
    position = tl.load(positions + token * position_stride)
    valid = valid_tokens(position, request, num_reqs)
    request = tl.where(valid, request, 0)
    count = tl.where(valid, (position + 1) // RATIO, 0)
    count = tl.minimum(count, num_rows).to(tl.int32)
    keys += token * max_parts * capacity
    rows += token * max_parts * capacity
    counts += token * max_parts
    is_scored = count > topk
    is_kept = is_scored & (count > CAPACITY)
    lowest = tl.full((), ABSENT_KEY + 1, tl.int32)
    part = tl.arange(0, MAX_PARTS)
    kept = tl.load(counts + part, mask=(part < max_parts) & is_kept, other=0)
    low = tl.load(cuts + token, mask=is_kept, other=ABSENT_KEY + 1)
    total = tl.where(is_kept, tl.sum(kept, axis=0), count)
    parts = tl.where(is_kept, max_parts, 1)
    # the lists of the row, or the row itself
    source = tl.where(is_kept, keys, scores + token * num_rows)
    reads_all = (total > CAPACITY) | ((total < topk) & (low > lowest))
    reads_all &= is_kept
    low = tl.where(reads_all, lowest, low)
    if reads_all:
        total = _reduce_row(keys, rows, scores + token * num_rows, count, topk, CAPACITY)
        parts = 1
    table = block_table + request * table_stride
    table_row = (table, column_stride, max_blocks)
    out += token * topk
    HALF_SIZES: tl.constexpr = (WIDTH, CAPACITY // 2, BLOCK_SIZE, SLOTS)
    lists = (source, rows, counts, parts, capacity, is_kept)
    if is_scored == 0:
        slot = scratch_slots(count, WIDTH)
        column = (slot // BLOCK_SIZE).to(tl.int64)
        # not ``load_pages``: torch would treat the block table as written
        page = tl.load(table + column * column_stride, mask=slot < count, other=-1)
        key = tl.where((page >= 0) & (page < num_blocks), 0, ABSENT_KEY)
        ALL_SIZES: tl.constexpr = (WIDTH, WIDTH, BLOCK_SIZE, SLOTS)
        emit(key, slot, slot < count, low, table_row, out, topk, ALL_SIZES)
    elif total <= CAPACITY // 2:
        _emit_kept(lists, total, low, table_row, out, topk, HALF_SIZES)
    else:
        SIZES: tl.constexpr = (WIDTH, CAPACITY, BLOCK_SIZE, SLOTS)
        _emit_kept(lists, total, low, table_row, out, topk, SIZES)


@triton.jit
def _reduce_row(keys, rows, source, count, topk, CAPACITY: tl.constexpr):
    """List the top k of the ``count`` keys of a row. Return their number."""
    head = 0
    start = 0
    low = tl.full((), ABSENT_KEY + 1, tl.int32)
    while start < count:
        length = tl.minimum(count - start, CAPACITY - head)
        head, low = _reduce_chunk(keys, rows, head, source, start, length, low, topk, CAPACITY)
        start += length
    tl.debug_barrier()  # after all stores
    return head


@triton.jit
def _emit_kept(lists, total, low, table_row, out, topk, SIZES: tl.constexpr):
    """Select from the ``total`` keys in the lists of a token, or in its row."""
    keys, rows, counts, parts, capacity, is_kept = lists
    CAPACITY: tl.constexpr = SIZES[1]
    slot = scratch_slots(total, CAPACITY)
    offset = slot
    stop = 0
    part = 1
    while part < parts:  # skip what the lists of earlier parts leave empty
        length = tl.load(counts + part - 1)
        stop += length
        offset += tl.where(slot >= stop, capacity - length, 0)
        part += 1
    key = tl.load(keys + offset, mask=slot < total, other=ABSENT_KEY)
    index = tl.load(rows + offset, mask=(slot < total) & is_kept, other=0)
    index = tl.where(is_kept, index, slot)
    emit(key, index, slot < total, low, table_row, out, topk, SIZES)


@triton.jit
def _reduce_chunk(keys, indices, head, source, start, length, low, topk, CAPACITY: tl.constexpr):
    """Select the top k among the ``head`` keys of a list and ``length`` keys of ``source``, from
    ``start`` on. Store them in the list; return their number and a lower bound of them."""
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
    selected, dst, count, bound = select(key, low, topk, topk)
    tl.debug_barrier()  # after all loads
    tl.store(keys + dst, key, mask=selected)
    tl.store(indices + dst, index, mask=selected)
    return count, bound

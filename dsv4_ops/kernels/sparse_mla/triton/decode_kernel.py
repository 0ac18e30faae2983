"""Sparse MLA decode in Triton: a token attends to one split of its keys."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.attention.mainloop import (
    LINES,
    amax_of,
    attend,
    denominator,
    initial_state,
    load_keys,
    load_queries,
    log2_sum,
    prefetch_keys,
    recompute,
    scale_of,
    store_heads,
)
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.rope import inverse_rope, load_angles
from dsv4_ops.kernels.common.sizes import SIZES


@triton.jit
def locate_rows(
    unit, swa_units, stop, swa, extra, SIZES: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr
):
    """Return the rows of a block that begins at ``unit``, as ``load_keys`` takes them.

    A block has at most KEYS keys, and ends early where its split or the window ends. Entries of
    lists are unsigned here, so that negative slots lie past every block of the cache, and divisions
    are shifts.

    Args:
        unit, swa_units, stop: First unit of the block, number of units of the window, end of the
            split.
        swa, extra: The cache, the stride and the number of its blocks; the token's list, the
            stride and the length of the list.
        SIZES: SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA, PAGED.
        KEYS, UNIT: Keys of a block and of a unit.
    """
    SWA_BLOCK_SIZE: tl.constexpr = SIZES[0]
    EXTRA_BLOCK_SIZE: tl.constexpr = SIZES[1]
    HAS_EXTRA: tl.constexpr = SIZES[2]
    PAGED: tl.constexpr = SIZES[3]
    swa_cache, swa_page_stride, swa_blocks, swa_slots, swa_step, swa_len = swa
    extra_cache, extra_page_stride, extra_blocks, extra_slots, extra_step, extra_len = extra
    in_window = unit < swa_units
    first_unit = tl.where(in_window, 0, swa_units)
    column = (unit - first_unit) * UNIT + tl.arange(0, KEYS)
    length, list_start, step, offset = swa_len, swa_slots, swa_step, column
    if HAS_EXTRA:
        length = tl.where(in_window, swa_len, extra_len)
        list_start = tl.where(in_window, swa_slots, extra_slots)
        step = tl.where(in_window, swa_step, extra_step)
        if PAGED:
            offset = tl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    if UNIT < KEYS:
        end = tl.where(in_window, tl.minimum(stop, swa_units), stop)
        length = tl.minimum(length, (end - first_unit) * UNIT)
    mask = column < length
    entries = tl.load(list_start + offset.to(tl.int64) * step, mask=mask, other=-1).to(tl.uint32)
    page, row = entries // SWA_BLOCK_SIZE, entries % SWA_BLOCK_SIZE
    cache, page_stride, blocks, block_size = swa_cache, swa_page_stride, swa_blocks, SWA_BLOCK_SIZE
    if HAS_EXTRA:
        if PAGED:
            page = tl.where(in_window, page, entries)
            row = tl.where(in_window, row, (column % EXTRA_BLOCK_SIZE).to(tl.uint32))
        else:
            page = tl.where(in_window, page, entries // EXTRA_BLOCK_SIZE)
            row = tl.where(in_window, row, entries % EXTRA_BLOCK_SIZE)
        cache = tl.where(in_window, swa_cache, extra_cache)
        page_stride = tl.where(in_window, swa_page_stride, extra_page_stride)
        blocks = tl.where(in_window, swa_blocks, extra_blocks)
        block_size = tl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    kv_valid = page < blocks
    page = tl.where(kv_valid, page, 0).to(tl.int64)
    return cache, page_stride, page, tl.where(kv_valid, row, 0), kv_valid, block_size


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=SIZES)
def split_keys_kernel(
    q, q_stride, q_head_stride, q_dim_stride,
    out, lse, partial, partial_lse, partial_scale, attn_sink,
    swa_cache, swa_page_stride, swa_blocks,
    swa_indices, swa_stride, swa_column_stride,
    swa_lens, swa_len_stride, swa_width,
    extra_cache, extra_page_stride, extra_blocks,
    extra_indices, extra_stride, extra_column_stride,
    extra_lens, extra_len_stride, extra_width,
    req_indices, req_stride, num_reqs,
    plan, plan_stride, plan_column_stride,
    positions, positions_stride,
    cos_sin_cache, num_positions,
    capacity, num_tokens, num_heads, splits,
    SOFTMAX_SCALE: tl.constexpr, SWA_BLOCK_SIZE: tl.constexpr, EXTRA_BLOCK_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr, PAGED: tl.constexpr, HAS_SINK: tl.constexpr, HAS_PLAN: tl.constexpr,
    INVERSE_ROPE: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr, MMA_SYNC: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one token over one split of its keys, for a tile of heads.

    The window's keys come first, then the keys of the extra cache. A split is a whole number of
    units. With one split, a program writes the result, with inverse RoPE if INVERSE_ROPE. With
    several splits, a program writes the normalised accumulator, divided by ``partial_scale``, to
    ``partial``. With PAGED, ``extra_indices`` is a block table. With HAS_PLAN, a program reads its
    token, its split and the number of splits from the plan.
    """
    wait_for_previous_kernel()
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_valid = head < num_heads
    if HAS_PLAN:
        plan_row = plan + tl.program_id(0).to(tl.int64) * plan_stride
        token = tl.load(plan_row).to(tl.int64)
        split = tl.load(plan_row + plan_column_stride)
        splits = tl.load(plan_row + 2 * plan_column_stride)
        first = tl.load(plan_row + 3 * plan_column_stride)
        partials_fit = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        valid = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & partials_fit
        if not valid:
            return
        partial_index = first + split
    else:
        token = (tl.program_id(0) // splits).to(tl.int64)
        split = tl.program_id(0) % splits
        partial_index = tl.program_id(0)
    q_heads = q + token * q_stride + head[:, None].to(tl.int64) * q_head_stride
    queries = load_queries(q_heads, head_valid, q_dim_stride)
    state = initial_state(HEADS)
    prefetch_zeros = tl.zeros((KEYS, LINES), dtype=tl.int32)
    scale = SOFTMAX_SCALE * _LOG2_E

    swa_len = tl.load(swa_lens + token * swa_len_stride)
    swa_len = tl.minimum(tl.maximum(swa_len, 0), swa_width)
    extra_len = swa_len * 0
    request = token * 0
    if HAS_EXTRA:
        extra_len = tl.load(extra_lens + token * extra_len_stride)
        extra_len = tl.minimum(tl.maximum(extra_len, 0), extra_width)
        if PAGED:
            request = tl.load(req_indices + token * req_stride).to(tl.int64)
            extra_len = tl.where((request >= 0) & (request < num_reqs), extra_len, 0)
            request = tl.where(extra_len > 0, request, 0)
    swa_slots = swa_indices + token * swa_stride
    swa = (swa_cache, swa_page_stride, swa_blocks, swa_slots, swa_column_stride, swa_len)
    extra_slots = extra_indices + (request if PAGED else token) * extra_stride
    extra = (
        extra_cache, extra_page_stride, extra_blocks, extra_slots, extra_column_stride, extra_len
    )  # fmt: skip
    SIZES: tl.constexpr = (SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE, HAS_EXTRA, PAGED)
    swa_units = (swa_len + UNIT - 1) // UNIT
    units = (swa_units + (extra_len + UNIT - 1) // UNIT).to(tl.int64)
    unit = (units * split // splits).to(tl.int32)
    stop = (units * (split + 1) // splits).to(tl.int32)
    last = stop if UNIT == KEYS else stop - 1
    while unit < last:
        # one loop over both lists: two loops would hold the accumulator in registers twice
        next_unit = unit + KEYS // UNIT
        if UNIT < KEYS:
            crosses = (unit < swa_units) & (next_unit > swa_units)
            next_unit = tl.minimum(tl.where(crosses, swa_units, next_unit), stop)
        rows = locate_rows(unit, swa_units, stop, swa, extra, SIZES, KEYS, UNIT)
        keys = load_keys(rows, FORMAT, MMA_SYNC)
        next_rows = locate_rows(next_unit, swa_units, stop, swa, extra, SIZES, KEYS, UNIT)
        prefetch_zeros += prefetch_keys(next_rows, next_unit < stop, FORMAT)
        _, _, _, _, kv_valid, _ = rows
        state = attend(queries, state, keys, kv_valid, scale, unit, MMA_SYNC)
        unit = next_unit
    if (UNIT < KEYS) & (unit < stop):  # a last single unit takes half the time of a block
        rows = locate_rows(unit, swa_units, stop, swa, extra, SIZES, UNIT, UNIT)
        keys = load_keys(rows, FORMAT, MMA_SYNC)
        _, _, _, _, kv_valid, _ = rows
        state = attend(queries, state, keys, kv_valid, scale, unit, MMA_SYNC)

    head = recompute(tl.program_id(1) + tl.zeros_like(head)) * HEADS + tl.arange(0, HEADS)
    head_valid = head < num_heads
    head_valid &= tl.sum(tl.sum(prefetch_zeros, axis=1), axis=0) == 0  # always true
    acc0, acc1, acc2, acc3, row_max, row_sum = state
    lse_log2 = log2_sum(row_max, row_sum)
    if splits == 1:
        if INVERSE_ROPE:  # load the angles early, while the other values are stored
            position = tl.load(positions + token * positions_stride)
            in_table, cos, sin = load_angles(cos_sin_cache, position, num_positions, acc3.shape[1])
        sink = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
        if HAS_SINK:
            sink = tl.load(attn_sink + head, mask=head_valid, other=0.0) * _LOG2_E
        inverse_sum = 1.0 / denominator(row_max, row_sum, sink)[:, None]
        target = out + (token * num_heads + head[:, None]) * HEAD_DIM
        store_heads(target, head_valid, acc0 * inverse_sum, 0)
        store_heads(target, head_valid, acc1 * inverse_sum, 256)
        store_heads(target, head_valid, acc2 * inverse_sum, 384)
        rope = acc3 * inverse_sum
        if INVERSE_ROPE:
            rope = inverse_rope(rope, in_table, cos, sin)
        store_heads(target, head_valid, rope, 448)
        tl.store(lse + token * num_heads + head, lse_log2 / _LOG2_E, mask=head_valid)
    else:
        inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        amax = tl.maximum(amax_of(acc3 * inverse), amax_of(acc2 * inverse))
        amax = tl.maximum(amax, amax_of(acc1 * inverse))
        amax = tl.maximum(amax, amax_of(acc0 * inverse))
        amax = scale_of(amax)
        inverse *= 1.0 / amax
        row = partial_index.to(tl.int64) * num_heads + head
        dst = partial + row[:, None] * HEAD_DIM
        store_heads(dst, head_valid, acc0 * inverse, 0)
        store_heads(dst, head_valid, acc1 * inverse, 256)
        store_heads(dst, head_valid, acc2 * inverse, 384)
        store_heads(dst, head_valid, acc3 * inverse, 448)
        tl.store(partial_lse + row, lse_log2, mask=head_valid)
        tl.store(partial_scale + row, tl.zeros_like(lse_log2) + amax, mask=head_valid)

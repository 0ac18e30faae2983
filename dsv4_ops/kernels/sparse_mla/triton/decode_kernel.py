"""Sparse MLA decode in Triton: one split of the keys of a token."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.rope import inverse_rope, load_angles
from dsv4_ops.kernels.common.triton_compat import EMULATE
from dsv4_ops.kernels.sparse_mla.triton.mainloop import (
    LINES,
    again,
    attend,
    denominator,
    load_keys,
    load_queries,
    log2_sum,
    no_sums,
    prefetch_keys,
    store_heads,
)


@triton.jit
def rows_of(
    unit, swa_units, stop, swa, extra, SIZES: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr
):
    """The keys of a block that begins with ``unit``, as ``load_keys`` takes them.

    A block ends where its split does, or the window. Unsigned, a slot below 0 is past every block
    of the cache, and divisions are shifts. ``swa`` and ``extra``: cache, stride of its blocks,
    their number, the token's list, its stride and its length. SIZES: SWA_BLOCK_SIZE,
    EXTRA_BLOCK_SIZE, HAS_EXTRA and PAGED."""
    SWA_BLOCK_SIZE: tl.constexpr = SIZES[0]
    EXTRA_BLOCK_SIZE: tl.constexpr = SIZES[1]
    HAS_EXTRA: tl.constexpr = SIZES[2]
    PAGED: tl.constexpr = SIZES[3]
    swa_cache, swa_page_stride, swa_blocks, swa_slots, swa_step, swa_len = swa
    extra_cache, extra_page_stride, extra_blocks, extra_slots, extra_step, extra_len = extra
    in_window = unit < swa_units
    before = tl.where(in_window, 0, swa_units)
    column = (unit - before) * UNIT + tl.arange(0, KEYS)
    length, entry, step, offset = swa_len, swa_slots, swa_step, column
    if HAS_EXTRA:
        length = tl.where(in_window, swa_len, extra_len)
        entry = tl.where(in_window, swa_slots, extra_slots)
        step = tl.where(in_window, swa_step, extra_step)
        if PAGED:
            offset = tl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    if UNIT < KEYS:
        end = tl.where(in_window, tl.minimum(stop, swa_units), stop)
        length = tl.minimum(length, (end - before) * UNIT)
    wanted = column < length
    found = tl.load(entry + offset.to(tl.int64) * step, mask=wanted, other=-1).to(tl.uint32)
    page, row = found // SWA_BLOCK_SIZE, found % SWA_BLOCK_SIZE
    cache, page_stride, blocks, block_size = swa_cache, swa_page_stride, swa_blocks, SWA_BLOCK_SIZE
    if HAS_EXTRA:
        if PAGED:
            page = tl.where(in_window, page, found)
            row = tl.where(in_window, row, (column % EXTRA_BLOCK_SIZE).to(tl.uint32))
        else:
            page = tl.where(in_window, page, found // EXTRA_BLOCK_SIZE)
            row = tl.where(in_window, row, found % EXTRA_BLOCK_SIZE)
        cache = tl.where(in_window, swa_cache, extra_cache)
        page_stride = tl.where(in_window, swa_page_stride, extra_page_stride)
        blocks = tl.where(in_window, swa_blocks, extra_blocks)
        block_size = tl.where(in_window, SWA_BLOCK_SIZE, EXTRA_BLOCK_SIZE)
    exists = page < blocks
    page = tl.where(exists, page, 0).to(tl.int64)
    return cache, page_stride, page, tl.where(exists, row, 0), exists, block_size


_LOG2_E = tl.constexpr(1.4426950408889634)

_MIN_SCALE, _MAX_SCALE = tl.constexpr(1e-30), tl.constexpr(1e37)
"""Scales of a partial result are between them: their inverses are ordinary float32 values."""


@triton.jit
def _amax(values):
    """Amax of all heads: for one per head Triton gives the loop layouts that spill. NaN is left
    out."""
    magnitude = tl.abs(values)
    if EMULATE:  # numpy's maximum returns NaN where the hardware's returns the number
        magnitude = tl.where(magnitude != magnitude, 0.0, magnitude)
    return tl.max(magnitude)


@triton.jit
def _scale_of(amax):
    scale = tl.minimum(tl.maximum(amax, _MIN_SCALE), _MAX_SCALE)
    return tl.where(amax == float("inf"), 1.0, scale)  # beside infinite ones as they are


@triton.jit
def scale_of_partial(values):
    """What the values of a partial result are stored as multiples of."""
    return _scale_of(_amax(values))


@triton.jit
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
    HEADS: tl.constexpr, KEYS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one token for a tile of heads.

    The window's keys come first, then those of the extra cache; splits are of whole units of keys.
    A token of one split is finished here, with inverse RoPE if INVERSE_ROPE; of the others the
    normalised sums go to ``partial`` as multiples of ``partial_scale``. With PAGED,
    ``extra_indices`` is a block table; with HAS_PLAN the plan names token, split and number of
    splits."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < num_heads
    if HAS_PLAN:
        tile = plan + tl.program_id(0).to(tl.int64) * plan_stride
        token = tl.load(tile).to(tl.int64)
        split = tl.load(tile + plan_column_stride)
        splits = tl.load(tile + 2 * plan_column_stride)
        first = tl.load(tile + 3 * plan_column_stride)
        fits = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        real = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & fits
        if not real:
            return
        offset = first + split
    else:
        token = (tl.program_id(0) // splits).to(tl.int64)
        split = tl.program_id(0) % splits
        offset = tl.program_id(0)
    heads = q + token * q_stride + head[:, None].to(tl.int64) * q_head_stride
    queries = load_queries(heads, there, q_dim_stride)
    sums = no_sums(HEADS)
    asked = tl.zeros((KEYS, LINES), dtype=tl.int32)
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
        # one loop over both sources: two would hold the sums in registers twice
        following = unit + KEYS // UNIT
        if UNIT < KEYS:
            crosses = (unit < swa_units) & (following > swa_units)
            following = tl.minimum(tl.where(crosses, swa_units, following), stop)
        rows = rows_of(unit, swa_units, stop, swa, extra, SIZES, KEYS, UNIT)
        keys = load_keys(rows, FORMAT)
        ahead = rows_of(following, swa_units, stop, swa, extra, SIZES, KEYS, UNIT)
        asked += prefetch_keys(ahead, following < stop, FORMAT)
        sums = attend(queries, sums, keys, rows[4], scale, unit >= 0)
        unit = following
    if (UNIT < KEYS) & (unit < stop):  # the odd unit, in half the time of a block
        rows = rows_of(unit, swa_units, stop, swa, extra, SIZES, UNIT, UNIT)
        keys = load_keys(rows, FORMAT)
        sums = attend(queries, sums, keys, rows[4], scale, unit >= 0)

    head = again(tl.program_id(1) + tl.zeros_like(head)) * HEADS + tl.arange(0, HEADS)
    there = (head < num_heads) & (tl.sum(tl.sum(asked, axis=1), axis=0) == 0)  # that: always
    out0, out1, out2, out3, row_max, row_sum = sums
    log2_total = log2_sum(row_max, row_sum)
    if splits == 1:
        if INVERSE_ROPE:  # on their way while the other values are stored
            position = tl.load(positions + token * positions_stride)
            known, cos, sin = load_angles(cos_sin_cache, position, num_positions, out3.shape[1])
        sink = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
        if HAS_SINK:
            sink = tl.load(attn_sink + head, mask=there, other=0.0) * _LOG2_E
        factor = 1.0 / denominator(row_max, row_sum, sink)[:, None]
        target = out + (token * num_heads + head[:, None]) * HEAD_DIM
        store_heads(target, there, out0 * factor, 0)
        store_heads(target, there, out1 * factor, 256)
        store_heads(target, there, out2 * factor, 384)
        rope = out3 * factor
        if INVERSE_ROPE:
            rope = inverse_rope(rope, known, cos, sin)
        store_heads(target, there, rope, 448)
        tl.store(lse + token * num_heads + head, log2_total / _LOG2_E, mask=there)
    else:
        inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        amax = tl.maximum(_amax(out3 * inverse), _amax(out2 * inverse))
        amax = tl.maximum(amax, _amax(out1 * inverse))
        amax = tl.maximum(amax, _amax(out0 * inverse))
        amax = _scale_of(amax)
        inverse *= 1.0 / amax
        row = offset.to(tl.int64) * num_heads + head
        dst = partial + row[:, None] * HEAD_DIM
        store_heads(dst, there, out0 * inverse, 0)
        store_heads(dst, there, out1 * inverse, 256)
        store_heads(dst, there, out2 * inverse, 384)
        store_heads(dst, there, out3 * inverse, 448)
        tl.store(partial_lse + row, log2_total, mask=there)
        tl.store(partial_scale + row, tl.zeros_like(log2_total) + amax, mask=there)

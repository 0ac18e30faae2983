"""Sparse MLA decode in Triton: one split of the keys of a token."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.rope import load_angles, turn_back
from dsv4_ops.kernels.sparse_mla.triton.mainloop import (
    LINES,
    again,
    attend,
    denominator,
    load_heads,
    load_keys,
    log2_sum,
    prefetch_keys,
    store_heads,
)


@triton.jit
def rows_of(
    unit,
    swa_units,
    stop,
    swa_cache,
    swa_page_stride,
    swa_blocks,
    swa_slots,
    swa_step,
    swa_len,
    extra_cache,
    extra_page_stride,
    extra_blocks,
    extra_slots,
    extra_step,
    extra_len,
    SWA_BLOCK_SIZE: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAGED: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Cache and stride of its pages, page and row of the keys of a block that begins with ``unit``,
    whether they exist, and the size of the pages. A block ends where its split does, or the window.
    Unsigned, a slot below 0 is past every page, and divisions are shifts."""
    in_window = unit < swa_units
    before = tl.where(in_window, 0, swa_units)
    column = (unit - before) * UNIT + tl.arange(0, KEYS)
    length, entry, step, place = swa_len, swa_slots, swa_step, column
    if HAS_EXTRA:
        length = tl.where(in_window, swa_len, extra_len)
        entry = tl.where(in_window, swa_slots, extra_slots)
        step = tl.where(in_window, swa_step, extra_step)
        if PAGED:
            place = tl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
    if UNIT < KEYS:
        end = tl.where(in_window, tl.minimum(stop, swa_units), stop)
        length = tl.minimum(length, (end - before) * UNIT)
    wanted = column < length
    found = tl.load(entry + place.to(tl.int64) * step, mask=wanted, other=-1).to(tl.uint32)
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


@triton.jit
def load_block(
    unit,
    swa_units,
    stop,
    swa_cache,
    swa_page_stride,
    swa_blocks,
    swa_slots,
    swa_step,
    swa_len,
    extra_cache,
    extra_page_stride,
    extra_blocks,
    extra_slots,
    extra_step,
    extra_len,
    SWA_BLOCK_SIZE: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAGED: tl.constexpr,
    ROW: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The four tiles of the keys of a block, and whether each exists."""
    cache, page_stride, page, row, exists, block_size = rows_of(
        unit,
        swa_units,
        stop,
        swa_cache,
        swa_page_stride,
        swa_blocks,
        swa_slots,
        swa_step,
        swa_len,
        extra_cache,
        extra_page_stride,
        extra_blocks,
        extra_slots,
        extra_step,
        extra_len,
        SWA_BLOCK_SIZE,
        EXTRA_BLOCK_SIZE,
        HAS_EXTRA,
        PAGED,
        KEYS,
        UNIT,
    )
    k0, k1, k2, k3 = load_keys(
        cache,
        page_stride,
        page,
        row,
        exists,
        block_size,
        ROW,
        CODE_DIM,
        QUANT_BLOCK,
        SCALE_BYTES,
        EMULATE,
    )
    return k0, k1, k2, k3, exists


_LOG2_E = tl.constexpr(1.4426950408889634)

_LEAST_PEAK, _MOST_PEAK = tl.constexpr(1e-30), tl.constexpr(1e37)
"""Scales of a partial result are between them: their inverses are ordinary float32 values."""


@triton.jit
def _peak(values, EMULATE: tl.constexpr):
    """The largest magnitude, of all heads: for one per head Triton gives the loop layouts that
    spill. NaN is left out."""
    magnitude = tl.abs(values)
    if EMULATE:  # numpy's maximum returns NaN where the hardware's returns the number
        magnitude = tl.where(magnitude != magnitude, 0.0, magnitude)
    return tl.max(magnitude)


@triton.jit
def split_keys_kernel(
    q,
    q_stride,
    q_head_stride,
    q_dim_stride,
    out,
    lse,
    partial,
    partial_lse,
    partial_peak,
    attn_sink,
    swa_cache,
    swa_page_stride,
    swa_blocks,
    swa_indices,
    swa_stride,
    swa_column_stride,
    swa_lens,
    swa_len_stride,
    swa_width,
    extra_cache,
    extra_page_stride,
    extra_blocks,
    extra_indices,
    extra_stride,
    extra_column_stride,
    extra_lens,
    extra_len_stride,
    extra_width,
    req_indices,
    req_stride,
    num_reqs,
    plan,
    plan_stride,
    plan_column_stride,
    positions,
    positions_stride,
    cos_sin_cache,
    num_positions,
    room,
    num_tokens,
    num_heads,
    splits,
    SOFTMAX_SCALE: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    EXTRA_BLOCK_SIZE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_PLAN: tl.constexpr,
    TURNED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One split of the keys of one token for a tile of heads. The window's keys come first, then
    those of the extra cache; splits are cut between units of keys. A token of one split is finished
    here, with TURNED rotated back too; of the others the normalised sums go to ``partial`` as
    multiples of ``partial_peak``. With PAGED, ``extra_indices`` is a block table; with HAS_PLAN the
    plan names token, split and number of splits."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < num_heads
    if HAS_PLAN:
        piece = plan + tl.program_id(0).to(tl.int64) * plan_stride
        token = tl.load(piece).to(tl.int64)
        split = tl.load(piece + plan_column_stride)
        splits = tl.load(piece + 2 * plan_column_stride)
        first = tl.load(piece + 3 * plan_column_stride)
        fits = (splits == 1) | ((first >= 0) & (first <= room - splits))
        real = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & fits
        if not real:
            return
        place = first + split
    else:
        token = (tl.program_id(0) // splits).to(tl.int64)
        split = tl.program_id(0) % splits
        place = tl.program_id(0)
    heads = q + token * q_stride + head[:, None].to(tl.int64) * q_head_stride
    q0 = load_heads(heads, there, q_dim_stride, 0, 256)
    q1 = load_heads(heads, there, q_dim_stride, 256, 128)
    q2 = load_heads(heads, there, q_dim_stride, 384, 64)
    q3 = load_heads(heads, there, q_dim_stride, 448, 64)
    out0 = tl.zeros((HEADS, 256), dtype=tl.float32)
    out1 = tl.zeros((HEADS, 128), dtype=tl.float32)
    out2 = tl.zeros((HEADS, 64), dtype=tl.float32)
    out3 = tl.zeros((HEADS, 64), dtype=tl.float32)
    largest = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
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
        k0, k1, k2, k3, exists = load_block(
            unit,
            swa_units,
            stop,
            swa_cache,
            swa_page_stride,
            swa_blocks,
            swa_indices + token * swa_stride,
            swa_column_stride,
            swa_len,
            extra_cache,
            extra_page_stride,
            extra_blocks,
            extra_indices + (request if PAGED else token) * extra_stride,
            extra_column_stride,
            extra_len,
            SWA_BLOCK_SIZE,
            EXTRA_BLOCK_SIZE,
            HAS_EXTRA,
            PAGED,
            ROW,
            CODE_DIM,
            QUANT_BLOCK,
            SCALE_BYTES,
            KEYS,
            UNIT,
            EMULATE,
        )
        next_cache, next_stride, next_page, next_row, next_exists, next_size = rows_of(
            following,
            swa_units,
            stop,
            swa_cache,
            swa_page_stride,
            swa_blocks,
            swa_indices + token * swa_stride,
            swa_column_stride,
            swa_len,
            extra_cache,
            extra_page_stride,
            extra_blocks,
            extra_indices + (request if PAGED else token) * extra_stride,
            extra_column_stride,
            extra_len,
            SWA_BLOCK_SIZE,
            EXTRA_BLOCK_SIZE,
            HAS_EXTRA,
            PAGED,
            KEYS,
            UNIT,
        )
        asked += prefetch_keys(
            next_cache,
            next_stride,
            next_page,
            next_row,
            next_exists & (following < stop),
            next_size,
            ROW,
            ROW_BYTES,
            SCALE_BYTES,
            EMULATE,
        )
        out0, out1, out2, out3, largest, total = attend(
            q0,
            q1,
            q2,
            q3,
            out0,
            out1,
            out2,
            out3,
            largest,
            total,
            k0,
            k1,
            k2,
            k3,
            exists,
            scale,
            unit >= 0,
            EMULATE,
        )
        unit = following
    if (UNIT < KEYS) & (unit < stop):  # the odd unit, in half the time of a block
        k0, k1, k2, k3, exists = load_block(
            unit,
            swa_units,
            stop,
            swa_cache,
            swa_page_stride,
            swa_blocks,
            swa_indices + token * swa_stride,
            swa_column_stride,
            swa_len,
            extra_cache,
            extra_page_stride,
            extra_blocks,
            extra_indices + (request if PAGED else token) * extra_stride,
            extra_column_stride,
            extra_len,
            SWA_BLOCK_SIZE,
            EXTRA_BLOCK_SIZE,
            HAS_EXTRA,
            PAGED,
            ROW,
            CODE_DIM,
            QUANT_BLOCK,
            SCALE_BYTES,
            UNIT,
            UNIT,
            EMULATE,
        )
        out0, out1, out2, out3, largest, total = attend(
            q0,
            q1,
            q2,
            q3,
            out0,
            out1,
            out2,
            out3,
            largest,
            total,
            k0,
            k1,
            k2,
            k3,
            exists,
            scale,
            unit >= 0,
            EMULATE,
        )

    head = again(tl.program_id(1) + tl.zeros_like(head), EMULATE) * HEADS + tl.arange(0, HEADS)
    there = (head < num_heads) & (tl.sum(tl.sum(asked, axis=1), axis=0) == 0)  # that: always
    log2_total = log2_sum(largest, total)
    if splits == 1:
        if TURNED:  # on their way while the other values are stored
            position = tl.load(positions + token * positions_stride)
            known, cos, sin = load_angles(cos_sin_cache, position, num_positions, out3.shape[1])
        sink = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
        if HAS_SINK:
            sink = tl.load(attn_sink + head, mask=there, other=0.0) * _LOG2_E
        factor = 1.0 / denominator(largest, total, sink)[:, None]
        target = out + (token * num_heads + head[:, None]) * HEAD_DIM
        store_heads(target, there, out0 * factor, 0, EMULATE)
        store_heads(target, there, out1 * factor, 256, EMULATE)
        store_heads(target, there, out2 * factor, 384, EMULATE)
        rope = out3 * factor
        if TURNED:
            rope = turn_back(rope, known, cos, sin, EMULATE)
        store_heads(target, there, rope, 448, EMULATE)
        tl.store(lse + token * num_heads + head, log2_total / _LOG2_E, mask=there)
    else:
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
        peak = tl.maximum(_peak(out3 * inverse, EMULATE), _peak(out2 * inverse, EMULATE))
        peak = tl.maximum(peak, _peak(out1 * inverse, EMULATE))
        peak = tl.maximum(peak, _peak(out0 * inverse, EMULATE))
        scale = tl.minimum(tl.maximum(peak, _LEAST_PEAK), _MOST_PEAK)
        peak = tl.where(peak == float("inf"), 1.0, scale)  # beside infinite ones as they are
        inverse *= 1.0 / peak
        row = place.to(tl.int64) * num_heads + head
        dst = partial + row[:, None] * HEAD_DIM
        store_heads(dst, there, out0 * inverse, 0, EMULATE)
        store_heads(dst, there, out1 * inverse, 256, EMULATE)
        store_heads(dst, there, out2 * inverse, 384, EMULATE)
        store_heads(dst, there, out3 * inverse, 448, EMULATE)
        tl.store(partial_lse + row, log2_total, mask=there)
        tl.store(partial_peak + row, tl.zeros_like(log2_total) + peak, mask=there)

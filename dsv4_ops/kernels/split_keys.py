"""Sparse attention with the keys of a token cut into splits, and the kernel that joins them."""

import triton
import triton.language as tl

from dsv4_ops.kernels.attend import (  # by name: Inductor copies kernels, not modules
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
from dsv4_ops.kernels.fp8 import round_to_bf16
from dsv4_ops.kernels.rotation import load_angles, load_tail_angles, rotate_tail, turn_back

_LOG2_E = tl.constexpr(1.4426950408889634)

_LEAST_PEAK, _MOST_PEAK = tl.constexpr(1e-30), tl.constexpr(1e37)
"""Scales of a partial result are between them: their inverses are ordinary float32 values."""


@triton.jit
def _rows_of(
    tile,
    swa_tiles,
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
):
    """Cache and stride of its pages, page and row of every key of a block, whether it exists, and
    the size of the pages. Unsigned, a slot below 0 is past every page, and divisions are shifts."""
    in_window = tile < swa_tiles
    column = tl.where(in_window, tile, tile - swa_tiles) * KEYS + tl.arange(0, KEYS)
    length, entry, step, place = swa_len, swa_slots, swa_step, column
    if HAS_EXTRA:
        length = tl.where(in_window, swa_len, extra_len)
        entry = tl.where(in_window, swa_slots, extra_slots)
        step = tl.where(in_window, swa_step, extra_step)
        if PAGED:
            place = tl.where(in_window, column, column // EXTRA_BLOCK_SIZE)
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
    EMULATE: tl.constexpr,
):
    """One split of the keys of one token for a tile of heads. The window's blocks of keys come
    first, then those of the extra cache. A token of one split is finished here, with TURNED rotated
    back too; of the others the normalised sums go to ``partial`` as multiples of ``partial_peak``.
    With PAGED, ``extra_indices`` is a block table; with HAS_PLAN the plan names token, split and
    number of splits."""
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
    swa_tiles = (swa_len + KEYS - 1) // KEYS
    tiles = (swa_tiles + (extra_len + KEYS - 1) // KEYS).to(tl.int64)
    tile = (tiles * split // splits).to(tl.int32)
    stop = (tiles * (split + 1) // splits).to(tl.int32)
    while tile < stop:
        # one loop over both sources: two would hold the sums in registers twice
        cache, page_stride, page, row, exists, block_size = _rows_of(
            tile,
            swa_tiles,
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
        next_cache, next_stride, next_page, next_row, next_exists, next_size = _rows_of(
            tile + 1,
            swa_tiles,
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
        )
        asked += prefetch_keys(
            next_cache,
            next_stride,
            next_page,
            next_row,
            next_exists & (tile + 1 < stop),
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
            tile >= 0,
            EMULATE,
        )
        tile += 1

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
        goal = partial + row[:, None] * HEAD_DIM
        store_heads(goal, there, out0 * inverse, 0, EMULATE)
        store_heads(goal, there, out1 * inverse, 256, EMULATE)
        store_heads(goal, there, out2 * inverse, 384, EMULATE)
        store_heads(goal, there, out3 * inverse, 448, EMULATE)
        tl.store(partial_lse + row, log2_total, mask=there)
        tl.store(partial_peak + row, tl.zeros_like(log2_total) + peak, mask=there)


@triton.jit
def join_splits_kernel(
    out,
    lse,
    partial,
    partial_lse,
    partial_peak,
    attn_sink,
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
    HAS_SINK: tl.constexpr,
    HAS_PLAN: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The splits of one token and head, weighed by their sums, SPLITS at a time; nothing to do for
    tokens of one split. With HAS_PLAN a program per piece, and the first of a token joins all; with
    TURNED the result is rounded and its last ROPE values are rotated back."""
    head = tl.program_id(1)
    if HAS_PLAN:
        piece = plan + tl.program_id(0).to(tl.int64) * plan_stride
        token = tl.load(piece).to(tl.int64)
        split = tl.load(piece + plan_column_stride)
        splits = tl.load(piece + 2 * plan_column_stride)
        place = tl.load(piece + 3 * plan_column_stride).to(tl.int64)
        real = (token >= 0) & (token < num_tokens) & (split == 0)
        real &= (place >= 0) & (place <= room - splits)
        splits = tl.where(real, splits, 1)
    else:
        token = tl.program_id(0).to(tl.int64)
        place = token * splits
    if splits > 1:
        if TURNED:  # ahead of what takes as long to arrive
            position = tl.load(positions + token * positions_stride)
            position = tl.where(position >= 0, position, num_positions)
            known, cos, sin = load_tail_angles(
                cos_sin_cache, position, num_positions, HEAD_DIM, HEAD_DIM, ROPE
            )
        dim = tl.arange(0, HEAD_DIM)
        summed = tl.zeros((HEAD_DIM,), dtype=tl.float32)
        largest = tl.full((), float("-inf"), dtype=tl.float32)
        total = tl.zeros((), dtype=tl.float32)
        first = 0
        while first < splits:
            part = first + tl.arange(0, SPLITS)
            there = part < splits
            row = (place + part) * num_heads + head
            logs = tl.load(partial_lse + row, mask=there, other=float("-inf"))
            parts = partial + row[:, None] * HEAD_DIM + dim[None, :]
            loaded = tl.load(parts, mask=there[:, None], other=0.0).to(tl.float32)
            peaks = tl.load(partial_peak + row, mask=there, other=0.0)
            highest = tl.maximum(largest, tl.max(logs, axis=0))
            origin = tl.where(highest == float("-inf"), 0.0, highest)
            factor, weights = tl.exp2(largest - origin), tl.exp2(logs - origin)
            total = total * factor + tl.sum(weights, axis=0)
            summed = summed * factor + tl.sum(loaded * (weights * peaks)[:, None], axis=0)
            largest = highest
            first += SPLITS
        sink = float("-inf")
        if HAS_SINK:
            sink = tl.load(attn_sink + head) * _LOG2_E
        below = denominator(largest, total, sink)
        goal = token * num_heads + head
        values = round_to_bf16(summed / below, EMULATE)
        if TURNED:
            turned = rotate_tail(values.to(tl.float32), known, cos, sin, HEAD_DIM, EMULATE, True)
            values = round_to_bf16(turned, EMULATE)
        tl.store(out + goal * HEAD_DIM + dim, values)
        tl.store(lse + goal, log2_sum(largest, total) / _LOG2_E)

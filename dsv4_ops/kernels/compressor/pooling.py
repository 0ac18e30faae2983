"""What becomes of one window: its rows read, joined, normalised, rotated and stored."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import quantize, round_to_bf16  # by name: Inductor copies kernels
from dsv4_ops.kernels.common.paging import find_real, place_slots
from dsv4_ops.kernels.common.rope import rotate_tail

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_finishing(
    slot, position, request, num_reqs, num_blocks, RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Which tokens are the last of a window whose row has a place. They are loaded by the kernel,
    all three at once."""
    _page, _row, exists = place_slots(slot, num_blocks, BLOCK_SIZE)
    real = find_real(position, request, num_reqs)
    place = tl.where(real, position, 0).to(tl.int32)
    return exists & real & (place % RATIO == RATIO - 1)


@triton.jit
def _is_fresh(
    token,
    request,
    position,
    positions,
    position_stride,
    req_indices,
    request_stride,
    NUM_ROWS: tl.constexpr,
):
    """Whether all rows of the window that ``token`` finishes are of the tokens before it."""
    back = tl.arange(0, NUM_ROWS)
    near = (position >= back) & (token >= back)
    other = tl.where(near, token - back, 0).to(tl.int64)
    place = tl.load(positions + other * position_stride, mask=near, other=-1)
    owner = tl.load(req_indices + other * request_stride, mask=near, other=-1)
    fresh = near & (place == position - back) & (owner == request)
    return tl.sum(fresh.to(tl.int32), axis=0) == NUM_ROWS


@triton.jit
def _read_fresh_rows(
    row,
    token,
    kv_score,
    kv_stride,
    ape,
    first_channel,
    RATIO: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    """What ``_read_rows`` reads of a window whose rows are all of this call: half as many
    instructions, which bound a prefill as much as memory does."""
    NEXT: tl.constexpr = 2 if row.shape[1] > 1 else 1
    first = kv_score + (token - (NUM_ROWS - 1)).to(tl.int64) * kv_stride
    offset = (row.to(tl.int64) * kv_stride)[:, :, None]
    row, dim = row[:, :, None], first_channel + tl.arange(0, DIM)[None, None, :]
    column = tl.where(row < RATIO, 0, WIDTH - HEAD_DIM) + dim  # left in the window before
    start = tl.max_contiguous(first + (offset + column), [1, NEXT, VALUES])
    bias = tl.max_contiguous(ape + row % RATIO * WIDTH + column, [1, NEXT, VALUES])
    return tl.load(start), tl.load(start + WIDTH) + tl.load(bias)


@triton.jit
def _read_rows(
    row,
    token,
    request,
    position,
    kv_score,
    kv_stride,
    ape,
    states,
    state_page_stride,
    num_state_blocks,
    state_block_table,
    table_stride,
    column_stride,
    state_columns,
    positions,
    position_stride,
    req_indices,
    request_stride,
    first_channel,
    RATIO: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """kv and biased score [DEPTH, GROUPS, DIM], from ``first_channel`` on, of ``row`` [DEPTH,
    GROUPS] of the window that ``token`` finishes; 0 and -inf where the row does not exist. With
    ONE_PAGE the states of a group are on one page."""
    back = NUM_ROWS - 1 - row
    source = position - back
    wanted = (back >= 0) & (source >= 0)
    near = wanted & (token >= back)
    other = tl.where(near, token - back, 0).to(tl.int64)
    # all three loads at once: one latency, though the table is not needed for a fresh row
    other_position = tl.load(positions + other * position_stride, mask=near, other=-1)
    other_request = tl.load(req_indices + other * request_stride, mask=near, other=-1)
    place = tl.where(wanted, source, 0).to(tl.uint32)  # divided by shifts
    if ONE_PAGE:
        block = tl.max(place, axis=0)[None, :] // STATE_BLOCK
    else:
        block = place // STATE_BLOCK
    block = block.to(tl.int64)
    entry = state_block_table + request * table_stride + block * column_stride
    page = tl.load(entry, mask=block < state_columns, other=-1)
    fresh = near & (other_position == source) & (other_request == request)
    there = fresh | (wanted & (page >= 0) & (page < num_state_blocks))
    old = page.to(tl.int64) * state_page_stride + (place % STATE_BLOCK).to(tl.int64) * (2 * WIDTH)
    # in two dimensions so far: in three every thread would look up its rows four times
    NEXT: tl.constexpr = 2 if row.shape[1] > 1 else 1
    offset = tl.where(fresh, other * kv_stride, old)[:, :, None]
    row, dim = row[:, :, None], first_channel + tl.arange(0, DIM)[None, None, :]
    column = tl.where(row < RATIO, 0, WIDTH - HEAD_DIM) + dim
    fresh, there = fresh[:, :, None], there[:, :, None] & (dim < HEAD_DIM)
    start = tl.where(fresh, kv_score + offset, states + offset) + column
    start = tl.max_contiguous(start, [1, NEXT, VALUES])
    bias = tl.max_contiguous(ape + row % RATIO * WIDTH + column, [1, NEXT, VALUES])
    kv = tl.load(start, mask=there, other=0.0)
    score = tl.load(start + WIDTH, mask=there, other=float("-inf"))
    return kv, score + tl.load(bias, mask=there & fresh, other=0.0)


@triton.jit
def _exp2(values, EMULATE: tl.constexpr):
    """Powers of two in one instruction, and 0 for those below 2^-126."""
    if EMULATE:
        return tl.exp2(values)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _accumulate(kv, score, largest, total, summed, EMULATE: tl.constexpr):
    """An online softmax over the first dimension, which lies within a thread; ``largest`` times
    log2(e)."""
    highest = tl.maximum(largest, tl.max(score, axis=0) * _LOG2_E)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    kept = _exp2(largest - anchor, EMULATE)
    weight = _exp2(score * _LOG2_E - anchor[None], EMULATE)
    total = total * kept + tl.sum(weight, axis=0)
    summed = summed * kept + tl.sum(weight * kv, axis=0)
    return highest, total, summed


@triton.jit
def _join_groups(largest, total, summed, EMULATE: tl.constexpr):
    """Weighted sums [DIM] of the rows that the groups have read."""
    highest = tl.max(largest, axis=0)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    share = _exp2(largest - anchor[None], EMULATE)
    return _sum_groups(summed * share) / _sum_groups(total * share)


@triton.jit
def _sum_groups(values):
    """Sums [DIM] over up to 64 groups, neighbours first: the groups may lie in lanes or in warps,
    and where they do decides the order of Triton's own sum, and so the last bit."""
    for _ in tl.static_range(6):
        if values.shape[0] > 1:
            pairs = tl.reshape(values, (values.shape[0] // 2, 2, values.shape[1]))
            values = tl.sum(pairs, axis=1)
    return tl.reshape(values, (values.shape[1],))


@triton.jit
def pool_window(
    token,
    request,
    position,
    kv_score,
    kv_stride,
    ape,
    states,
    state_page_stride,
    num_state_blocks,
    state_block_table,
    table_stride,
    column_stride,
    state_columns,
    positions,
    position_stride,
    req_indices,
    request_stride,
    first_channel,
    RATIO: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUES: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Weighted sums [DIM], from ``first_channel`` on, of the window that ``token`` finishes. DEPTH
    consecutive rows and VALUES channels lie in a thread; GROUPS groups of threads meet at the
    end."""
    ROWS: tl.constexpr = DEPTH * GROUPS * CHUNKS
    EXACT: tl.constexpr = ROWS == NUM_ROWS and HEAD_DIM % DIM == 0
    first_row = tl.arange(0, GROUPS)[None, :] * DEPTH + tl.arange(0, DEPTH)[:, None]
    largest = tl.full((GROUPS, DIM), float("-inf"), tl.float32)
    total = tl.zeros((GROUPS, DIM), tl.float32)
    summed = tl.zeros((GROUPS, DIM), tl.float32)
    is_fresh = EXACT and _is_fresh(
        token,
        request,
        position,
        positions,
        position_stride,
        req_indices,
        request_stride,
        ROWS,
    )
    for chunk in tl.range(CHUNKS):
        row = first_row + chunk * (DEPTH * GROUPS)
        if is_fresh:
            kv, score = _read_fresh_rows(
                row,
                token,
                kv_score,
                kv_stride,
                ape,
                first_channel,
                RATIO,
                NUM_ROWS,
                WIDTH,
                HEAD_DIM,
                DIM,
                VALUES,
            )
        else:
            kv, score = _read_rows(
                row,
                token,
                request,
                position,
                kv_score,
                kv_stride,
                ape,
                states,
                state_page_stride,
                num_state_blocks,
                state_block_table,
                table_stride,
                column_stride,
                state_columns,
                positions,
                position_stride,
                req_indices,
                request_stride,
                first_channel,
                RATIO,
                NUM_ROWS,
                WIDTH,
                HEAD_DIM,
                DIM,
                STATE_BLOCK,
                VALUES,
                ONE_PAGE,
            )
        largest, total, summed = _accumulate(kv, score, largest, total, summed, EMULATE)
    return _join_groups(largest, total, summed, EMULATE)


@triton.jit
def _store_row(
    values,
    page_start,
    row,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FLOAT_SCALES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One row of a quantised cache from fp32 ``values`` [HEAD_DIM]."""
    blocks = tl.reshape(values, (HEAD_DIM // QUANT_BLOCK, QUANT_BLOCK))
    blocks = round_to_bf16(blocks, EMULATE)
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)
    dim = group[:, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, :]
    codes, scale = quantize(blocks.to(tl.float32), EMULATE)
    data = page_start + row * DATA_BYTES
    tl.store(data + dim, codes, mask=dim < CODE_DIM)
    if CODE_DIM < HEAD_DIM:
        target = (data + CODE_DIM).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(target + (dim - CODE_DIM), blocks, mask=dim >= CODE_DIM)
    scales = page_start + BLOCK_SIZE * DATA_BYTES + row * SCALE_BYTES
    if FLOAT_SCALES:
        tl.store(scales.to(tl.pointer_type(tl.int32), bitcast=True) + group, scale << 23)
    else:
        padded = tl.where(group < CODE_DIM // QUANT_BLOCK, scale, 0).to(tl.uint8)
        tl.store(scales + group, padded, mask=group < SCALE_BYTES)


@triton.jit
def finish_row(
    values,
    weights,
    known,
    cos,
    sin,
    slot,
    k_cache,
    page_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FLOAT_SCALES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Norm and rotation of ``values`` [DIM], into the slot, with what ``load_tail_angles`` has
    loaded."""
    channel = tl.arange(0, DIM)
    values = tl.where(channel < HEAD_DIM, values, 0.0)
    mean = tl.sum(values * values, axis=0) / HEAD_DIM
    values = values * (1.0 / tl.sqrt_rn(mean + EPS)) * weights
    if ROPE > 0:
        values = rotate_tail(values, known, cos, sin, DIM, EMULATE)
    page_start = k_cache + slot // BLOCK_SIZE * page_stride
    if QUANT_BLOCK > 0:
        _store_row(
            values,
            page_start,
            slot % BLOCK_SIZE,
            BLOCK_SIZE,
            HEAD_DIM,
            CODE_DIM,
            QUANT_BLOCK,
            DATA_BYTES,
            SCALE_BYTES,
            FLOAT_SCALES,
            EMULATE,
        )
    else:
        target = page_start + slot % BLOCK_SIZE * ROW_STRIDE + channel
        if k_cache.dtype.element_ty == tl.bfloat16:
            tl.store(target, round_to_bf16(values, EMULATE), mask=channel < HEAD_DIM)
        else:
            tl.store(target, values, mask=channel < HEAD_DIM)

"""What becomes of one window: its rows read, joined, normalised, rotated and stored."""

import triton
import triton.language as tl

from dsv4_ops.kernels.fp8 import quantize, round_to_bf16  # by name: Inductor copies kernels
from dsv4_ops.kernels.pages import locate_positions
from dsv4_ops.kernels.rotation import rotate_tail

ABSENT, STORED, FRESH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where a row of a window is: nowhere, in the states, in this call."""


@triton.jit
def read_rows(
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
):
    """kv and biased score [DEPTH, GROUPS, DIM], from ``first_channel`` on, of ``row`` [DEPTH,
    GROUPS] of the window that ``token`` finishes; 0 and -inf where the row does not exist."""
    back = (NUM_ROWS - 1 - row).to(tl.int64)
    source = position - back
    wanted = (back >= 0) & (source >= 0)
    fresh = wanted & (token >= back)
    other = tl.where(fresh, token - back, 0)
    # all three loads at once: one latency, though the table is not needed for a fresh row
    other_position = tl.load(positions + other * position_stride, mask=fresh, other=-1)
    other_request = tl.load(req_indices + other * request_stride, mask=fresh, other=-1)
    page, state_row, stored = locate_positions(
        state_block_table,
        table_stride,
        column_stride,
        request,
        source,
        wanted,
        state_columns,
        num_state_blocks,
        STATE_BLOCK,
    )
    fresh = fresh & (other_position == source) & (other_request == request)
    old = page * state_page_stride + state_row * (2 * WIDTH)
    # in two dimensions so far: in three every thread would look up its rows four times
    offset = tl.where(fresh, other * kv_stride, old)[:, :, None]
    kind = tl.where(fresh, FRESH, tl.where(stored, STORED, ABSENT))[:, :, None]
    row, dim = row[:, :, None], first_channel + tl.arange(0, DIM)[None, None, :]
    column = tl.where(row < RATIO, 0, WIDTH - HEAD_DIM) + dim  # left in the window before
    start = tl.where(kind == FRESH, kv_score + offset, states + offset) + column
    there = (kind != ABSENT) & (dim < HEAD_DIM)
    kv = tl.load(start, mask=there, other=0.0)
    score = tl.load(start + WIDTH, mask=there, other=float("-inf"))
    biased = (kind == FRESH) & (dim < HEAD_DIM)
    return kv, score + tl.load(ape + row % RATIO * WIDTH + column, mask=biased, other=0.0)


@triton.jit
def accumulate(kv, score, largest, total, summed):
    """An online softmax over the first dimension, which lies within a thread."""
    highest = tl.maximum(largest, tl.max(score, axis=0))
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    kept = tl.exp(largest - anchor)
    weight = tl.exp(score - anchor[None])
    total = total * kept + tl.sum(weight, axis=0)
    summed = summed * kept + tl.sum(weight * kv, axis=0)
    return highest, total, summed


@triton.jit
def store_row(
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
def join_groups(largest, total, summed):
    """Weighted sums [DIM] of the rows that the groups have read."""
    highest = tl.max(largest, axis=0)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp(largest - anchor[None])
    return tl.sum(summed * share, axis=0) / tl.sum(total * share, axis=0)


@triton.jit
def finish_row(
    values,
    position,
    slot,
    norm_weight,
    cos_sin_cache,
    num_positions,
    k_cache,
    page_stride,
    RATIO: tl.constexpr,
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
    """Norm and rotation of ``values`` [DIM] of the window that ends at ``position``, into its
    slot."""
    channel = tl.arange(0, DIM)
    values = tl.where(channel < HEAD_DIM, values, 0.0)
    weights = tl.load(norm_weight + channel, mask=channel < HEAD_DIM, other=0.0)
    mean = tl.sum(values * values, axis=0) / HEAD_DIM
    values = values * (1.0 / tl.sqrt_rn(mean + EPS)) * weights
    if ROPE > 0:
        first = position // RATIO * RATIO
        values = rotate_tail(
            values, cos_sin_cache, first, num_positions, HEAD_DIM, DIM, ROPE, EMULATE
        )
    page_start = k_cache + slot // BLOCK_SIZE * page_stride
    if QUANT_BLOCK > 0:
        store_row(
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

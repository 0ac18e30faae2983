"""Windows of many rows: each program reads a few channels of one, and a second kernel finishes the
rows, because only the norm needs all channels."""

import triton
import triton.language as tl

from dsv4_ops.kernels.pages import place_slots  # by name: Inductor copies kernels
from dsv4_ops.kernels.windows import accumulate, finish_row, join_groups, read_rows


@triton.jit
def pool_windows_kernel(
    kv_score,
    kv_stride,
    ape,
    states,
    state_page_stride,
    num_state_blocks,
    state_block_table,
    table_stride,
    column_stride,
    num_reqs,
    state_columns,
    positions,
    position_stride,
    req_indices,
    request_stride,
    num_blocks,
    slot_mapping,
    slot_stride,
    num_tokens,
    pooled,
    RATIO: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Weighted sums of CHANNELS channels of every window that a token finishes, to the row of that
    token in ``pooled`` [num_tokens, HEAD_DIM]."""
    first_channel = tl.program_id(1) * CHANNELS
    first_row = tl.arange(0, DEPTH)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    channel = first_channel + tl.arange(0, CHANNELS)
    lane = tl.arange(0, TOKENS)
    block = tl.program_id(0)
    while block < num_tokens:
        candidate = block + lane * tl.num_programs(0)
        index = candidate.to(tl.int64)
        slot = tl.load(slot_mapping + index * slot_stride, mask=candidate < num_tokens, other=-1)
        _page, _row, finishes = place_slots(slot, num_blocks, BLOCK_SIZE)
        place = tl.load(positions + index * position_stride, mask=finishes, other=-1)
        owner = tl.load(req_indices + index * request_stride, mask=finishes, other=-1)
        finishes = finishes & (place >= 0) & (place < 2147483647)
        finishes = finishes & (owner >= 0) & (owner < num_reqs)
        finishes = finishes & (tl.where(finishes, place, 0) % RATIO == RATIO - 1)
        left = tl.sum(finishes.to(tl.int32), axis=0)
        while left > 0:
            chosen = tl.min(tl.where(finishes, lane, TOKENS), axis=0)
            finishes = finishes & (lane != chosen)
            left -= 1
            token = (block + chosen * tl.num_programs(0)).to(tl.int64)
            position = tl.load(positions + token * position_stride)
            request = tl.load(req_indices + token * request_stride).to(tl.int64)
            largest = tl.full((GROUPS, CHANNELS), float("-inf"), tl.float32)
            total = tl.zeros((GROUPS, CHANNELS), tl.float32)
            summed = tl.zeros((GROUPS, CHANNELS), tl.float32)
            for chunk in tl.range(CHUNKS):
                row = first_row + chunk * (DEPTH * GROUPS)
                kv, score = read_rows(
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
                    CHANNELS,
                    STATE_BLOCK,
                )
                largest, total, summed = accumulate(kv, score, largest, total, summed)
            values = join_groups(largest, total, summed)
            tl.store(pooled + token * HEAD_DIM + channel, values, mask=channel < HEAD_DIM)
        block += TOKENS * tl.num_programs(0)


@triton.jit
def insert_pooled_kernel(
    pooled,
    num_reqs,
    positions,
    position_stride,
    req_indices,
    request_stride,
    norm_weight,
    cos_sin_cache,
    num_positions,
    k_cache,
    page_stride,
    num_blocks,
    slot_mapping,
    slot_stride,
    num_tokens,
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
    TOKENS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Norm, rotation and store of every window that a token finishes."""
    channel = tl.arange(0, DIM)
    lane = tl.arange(0, TOKENS)
    block = tl.program_id(0)
    while block < num_tokens:
        candidate = block + lane * tl.num_programs(0)
        index = candidate.to(tl.int64)
        slot = tl.load(slot_mapping + index * slot_stride, mask=candidate < num_tokens, other=-1)
        _page, _row, finishes = place_slots(slot, num_blocks, BLOCK_SIZE)
        place = tl.load(positions + index * position_stride, mask=finishes, other=-1)
        owner = tl.load(req_indices + index * request_stride, mask=finishes, other=-1)
        finishes = finishes & (place >= 0) & (place < 2147483647)
        finishes = finishes & (owner >= 0) & (owner < num_reqs)
        finishes = finishes & (tl.where(finishes, place, 0) % RATIO == RATIO - 1)
        left = tl.sum(finishes.to(tl.int32), axis=0)
        while left > 0:
            chosen = tl.min(tl.where(finishes, lane, TOKENS), axis=0)
            finishes = finishes & (lane != chosen)
            left -= 1
            token = (block + chosen * tl.num_programs(0)).to(tl.int64)
            position = tl.load(positions + token * position_stride)
            values = tl.load(
                pooled + token * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0
            )
            goal = tl.load(slot_mapping + token * slot_stride)
            finish_row(
                values,
                position,
                goal,
                norm_weight,
                cos_sin_cache,
                num_positions,
                k_cache,
                page_stride,
                RATIO,
                HEAD_DIM,
                DIM,
                ROPE,
                EPS,
                BLOCK_SIZE,
                ROW_STRIDE,
                CODE_DIM,
                QUANT_BLOCK,
                DATA_BYTES,
                SCALE_BYTES,
                FLOAT_SCALES,
                EMULATE,
            )
        block += TOKENS * tl.num_programs(0)

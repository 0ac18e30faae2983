"""Windows of many rows: each program reads a few channels of one, and a second kernel finishes the
rows, because only the norm needs all channels. Both may save states too: the memory has little to
do while programs look for windows, and while they finish them."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.rope import load_tail_angles
from dsv4_ops.kernels.compressor.pooling import find_finishing, finish_row, pool_window
from dsv4_ops.kernels.compressor.save_states import (  # by name: Inductor copies kernels
    find_role,
    save_role,
)


@triton.jit
def pool_windows_kernel(
    kv_score, kv_stride,
    ape,
    states, state_page_stride, num_state_blocks,
    state_block_table, table_stride, column_stride, num_reqs, state_columns,
    positions, position_stride,
    req_indices, request_stride,
    num_blocks,
    slot_mapping, slot_stride, num_tokens,
    state_slots, state_slot_stride, num_early,
    pooled,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr, THREADS: tl.constexpr,
    SAVE: tl.constexpr, TOKENS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Weighted sums of CHANNELS channels of every window that a token finishes, to the row of that
    token in ``pooled`` [num_tokens, HEAD_DIM]; extra programs save states where SAVE has
    tokens, of the first ``num_early`` tokens."""
    RATIO: tl.constexpr = WINDOW[1]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    PARTS: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    scores = (kv_score, kv_stride, 1)
    saved = (states, state_page_stride, num_state_blocks)
    state_table = (state_block_table, table_stride, column_stride, state_columns)
    own = (state_slots, state_slot_stride)
    requests = (positions, position_stride, req_indices, request_stride, num_reqs)
    inputs = (scores, ape, saved, state_table, requests)
    program, part, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    tile, block, part, programs = find_role(
        program, part, programs, num_tokens, num_early, SAVE, PARTS, APART
    )
    save_role(tile, 0, num_early, scores, ape, saved, own, requests, WINDOW, SAVE)
    first_channel = part * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    lane = tl.arange(0, TOKENS)
    while block < num_tokens:
        candidate = block + lane * programs
        given, each = candidate < num_tokens, candidate.to(tl.int64)
        slots = tl.load(slot_mapping + each * slot_stride, mask=given, other=-1)
        found = tl.load(positions + each * position_stride, mask=given, other=-1)
        owners = tl.load(req_indices + each * request_stride, mask=given, other=-1)
        finishes = find_finishing(slots, found, owners, num_reqs, num_blocks, RATIO, BLOCK_SIZE)
        left = tl.sum(finishes.to(tl.int32), axis=0)
        while left > 0:
            chosen = tl.min(tl.where(finishes, lane, TOKENS), axis=0)
            finishes = finishes & (lane != chosen)
            left -= 1
            token = block + chosen * programs
            index = token.to(tl.int64)
            if SAVE[0] > 0:  # in one warp: a load is another wait ahead of the rows
                position = tl.sum(tl.where(lane == chosen, found, 0), axis=0).to(tl.int32)
                request = tl.sum(tl.where(lane == chosen, owners, 0), axis=0).to(tl.int64)
            else:  # in two: sums over them are barriers
                position = tl.load(positions + index * position_stride).to(tl.int32)
                request = tl.load(req_indices + index * request_stride).to(tl.int64)
            values = pool_window(
                token, request, position, inputs, first_channel, WINDOW, CHANNELS, THREADS
            )
            tl.store(pooled + index * HEAD_DIM + channel, values, mask=channel < HEAD_DIM)
        block += TOKENS * programs


@triton.jit
def insert_pooled_kernel(
    pooled, num_reqs,
    positions, position_stride,
    req_indices, request_stride,
    norm_weight,
    cos_sin_cache, num_positions,
    k_cache, page_stride, num_blocks,
    slot_mapping, slot_stride, num_tokens,
    kv_score, kv_stride,
    ape,
    states, state_page_stride, num_state_blocks,
    state_slots, state_slot_stride, num_early,
    ROW_STRIDE: tl.constexpr, WINDOW: tl.constexpr, FINISH: tl.constexpr, FORMAT: tl.constexpr,
    SAVE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Norm, rotation and store of every window that a token finishes; extra programs save states
    where SAVE has tokens, of the tokens from ``num_early`` on."""
    RATIO: tl.constexpr = WINDOW[1]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    DIM: tl.constexpr = FINISH[0]
    ROPE: tl.constexpr = FINISH[1]
    cache = (k_cache, page_stride, num_blocks, ROW_STRIDE)
    scores = (kv_score, kv_stride, 1)
    saved = (states, state_page_stride, num_state_blocks)
    own = (state_slots, state_slot_stride)
    requests = (positions, position_stride)
    program, part, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    tile, block, _part, programs = find_role(
        program, part, programs, num_tokens, num_tokens - num_early, SAVE, 1, 1
    )
    save_role(tile, num_early, num_tokens, scores, ape, saved, own, requests, WINDOW, SAVE)
    channel = tl.arange(0, DIM)
    lane = tl.arange(0, TOKENS)
    while block < num_tokens:
        candidate = block + lane * programs
        given, each = candidate < num_tokens, candidate.to(tl.int64)
        slots = tl.load(slot_mapping + each * slot_stride, mask=given, other=-1)
        found = tl.load(positions + each * position_stride, mask=given, other=-1)
        owners = tl.load(req_indices + each * request_stride, mask=given, other=-1)
        finishes = find_finishing(slots, found, owners, num_reqs, num_blocks, RATIO, FORMAT[0])
        left = tl.sum(finishes.to(tl.int32), axis=0)
        while left > 0:
            chosen = tl.min(tl.where(finishes, lane, TOKENS), axis=0)
            finishes = finishes & (lane != chosen)
            left -= 1
            index = (block + chosen * programs).to(tl.int64)
            slot = tl.load(slot_mapping + index * slot_stride)
            position = tl.load(positions + index * position_stride).to(tl.int32)
            source = pooled + index * HEAD_DIM + channel
            values = tl.load(source, mask=channel < HEAD_DIM, other=0.0)
            weights = tl.load(norm_weight + channel, mask=channel < HEAD_DIM, other=0.0)
            rotation = 0, 0, 0
            if ROPE > 0:
                first = position.to(tl.uint32) // RATIO * RATIO
                angles = (cos_sin_cache, num_positions)
                rotation = load_tail_angles(angles, first.to(tl.int32), HEAD_DIM, DIM, ROPE)
            finish_row(values, weights, rotation, slot, cache, FINISH, FORMAT)
        block += TOKENS * programs

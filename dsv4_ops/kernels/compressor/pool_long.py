"""Compress long windows in two kernels. A program of the first kernel pools a few channels of a
window. The second kernel normalises, rotates and stores rows; it is separate because the norm needs
all channels. Extra programs of both kernels may save states, because the programs that pool and
insert leave the memory almost idle."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.rope import load_tail_angles
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.compressor.pooling import completes_window, finish_row, pool_window
from dsv4_ops.kernels.compressor.save_states import (  # by name: Inductor copies no modules
    assign_role,
    save_assigned_tile,
)


@triton.jit(do_not_specialize=SIZES)
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
    SAVE: tl.constexpr, TOKENS: tl.constexpr, SPACING: tl.constexpr,
):  # fmt: skip
    """Pool CHANNELS channels of every window that a token completes, into the token's row of
    ``pooled`` [num_tokens, HEAD_DIM]. If SAVE has tokens, extra programs save the states of the
    first ``num_early`` tokens."""
    wait_for_previous_kernel()
    RATIO: tl.constexpr = WINDOW[1]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    SAVE_TOKENS: tl.constexpr = SAVE[0]
    PARTS: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    scores = (kv_score, kv_stride, 1)
    state_cache = (states, state_page_stride, num_state_blocks)
    state_table = (state_block_table, table_stride, column_stride, state_columns)
    requests = (positions, position_stride, req_indices, request_stride, num_reqs)
    inputs = (scores, ape, state_cache, state_table, requests)
    program, part, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    tile, first_token, part, programs = assign_role(
        program, part, programs, num_tokens, num_early, SAVE, PARTS, SPACING
    )
    save_assigned_tile(
        tile, 0, num_early, scores, ape, state_cache,
        (state_slots, state_slot_stride), (positions, position_stride), WINDOW, SAVE,
    )  # fmt: skip
    first_channel = part * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS)
    lane = tl.arange(0, TOKENS)
    while first_token < num_tokens:
        tokens = first_token + lane * programs
        in_batch, tokens = tokens < num_tokens, tokens.to(tl.int64)
        token_slots = tl.load(slot_mapping + tokens * slot_stride, mask=in_batch, other=-1)
        token_positions = tl.load(positions + tokens * position_stride, mask=in_batch, other=-1)
        token_requests = tl.load(req_indices + tokens * request_stride, mask=in_batch, other=-1)
        completes = completes_window(
            token_slots, token_positions, token_requests, num_reqs, num_blocks, RATIO, BLOCK_SIZE
        )
        windows = tl.sum(completes.to(tl.int32), axis=0)
        while windows > 0:
            window_lane = tl.min(tl.where(completes, lane, TOKENS), axis=0)
            completes = completes & (lane != window_lane)
            windows -= 1
            token = first_token + window_lane * programs
            index = token.to(tl.int64)
            if SAVE_TOKENS > 0:  # the program has one warp: sums are faster than loads
                selected = lane == window_lane
                position = tl.sum(tl.where(selected, token_positions, 0), axis=0).to(tl.int32)
                request = tl.sum(tl.where(selected, token_requests, 0), axis=0).to(tl.int64)
            else:  # the program has several warps: a sum would need a barrier
                position = tl.load(positions + index * position_stride).to(tl.int32)
                request = tl.load(req_indices + index * request_stride).to(tl.int64)
            values = pool_window(
                token, request, position, inputs, first_channel, WINDOW, CHANNELS, THREADS
            )
            tl.store(pooled + index * HEAD_DIM + channel, values, mask=channel < HEAD_DIM)
        first_token += TOKENS * programs


@triton.jit(do_not_specialize=SIZES)
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
    """Normalise, rotate and store the row of every window that a token completes. If SAVE has
    tokens, extra programs save the states of the tokens from ``num_early`` on."""
    wait_for_previous_kernel()
    RATIO: tl.constexpr = WINDOW[1]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    DIM: tl.constexpr = FINISH[0]
    ROPE: tl.constexpr = FINISH[1]
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    cache = (k_cache, page_stride, num_blocks, ROW_STRIDE)
    scores = (kv_score, kv_stride, 1)
    state_cache = (states, state_page_stride, num_state_blocks)
    program, part, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    tile, first_token, _part, programs = assign_role(
        program, part, programs, num_tokens, num_tokens - num_early, SAVE, 1, 1
    )
    save_assigned_tile(
        tile, num_early, num_tokens, scores, ape, state_cache,
        (state_slots, state_slot_stride), (positions, position_stride), WINDOW, SAVE,
    )  # fmt: skip
    channel = tl.arange(0, DIM)
    lane = tl.arange(0, TOKENS)
    while first_token < num_tokens:
        tokens = first_token + lane * programs
        in_batch, tokens = tokens < num_tokens, tokens.to(tl.int64)
        token_slots = tl.load(slot_mapping + tokens * slot_stride, mask=in_batch, other=-1)
        token_positions = tl.load(positions + tokens * position_stride, mask=in_batch, other=-1)
        token_requests = tl.load(req_indices + tokens * request_stride, mask=in_batch, other=-1)
        completes = completes_window(
            token_slots, token_positions, token_requests, num_reqs, num_blocks, RATIO, BLOCK_SIZE
        )
        windows = tl.sum(completes.to(tl.int32), axis=0)
        while windows > 0:
            window_lane = tl.min(tl.where(completes, lane, TOKENS), axis=0)
            completes = completes & (lane != window_lane)
            windows -= 1
            index = (first_token + window_lane * programs).to(tl.int64)
            slot = tl.load(slot_mapping + index * slot_stride)
            position = tl.load(positions + index * position_stride).to(tl.int32)
            source = pooled + index * HEAD_DIM + channel
            values = tl.load(source, mask=channel < HEAD_DIM, other=0.0)
            weights = tl.load(norm_weight + channel, mask=channel < HEAD_DIM, other=0.0)
            rotation = 0, 0, 0
            if ROPE > 0:
                window_position = (position.to(tl.uint32) // RATIO * RATIO).to(tl.int32)
                angles = (cos_sin_cache, num_positions)
                rotation = load_tail_angles(angles, window_position, HEAD_DIM, DIM, ROPE)
            finish_row(values, weights, rotation, slot, cache, FINISH, FORMAT)
        first_token += TOKENS * programs

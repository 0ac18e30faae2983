"""Compress short windows: one program pools a window and stores its row."""

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


@triton.jit
def compress_and_insert(
    program, programs, inputs, state_slots, norm_weight, angles, cache, slots,
    WINDOW: tl.constexpr, FINISH: tl.constexpr, FORMAT: tl.constexpr, THREADS: tl.constexpr,
    SAVE: tl.constexpr, TOKENS: tl.constexpr, SPACING: tl.constexpr,
):  # fmt: skip
    """Run one of ``programs`` programs: scan every ``programs``-th token, and compress the windows
    that those tokens complete. In a prefill, windows end at evenly spaced tokens, so programs that
    scan tokens far apart share the windows evenly."""
    RATIO: tl.constexpr = WINDOW[1]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    DIM: tl.constexpr = FINISH[0]
    ROPE: tl.constexpr = FINISH[1]
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    scores, ape, states, _, requests = inputs
    positions, position_stride, req_indices, request_stride, num_reqs = requests
    slot_mapping, slot_stride, num_tokens = slots
    _, _, num_blocks, _ = cache
    lane = tl.arange(0, TOKENS)
    channel = tl.arange(0, DIM)
    tile, first_token, _part, programs = assign_role(
        program, 0, programs, num_tokens, num_tokens, SAVE, 1, SPACING
    )
    save_assigned_tile(
        tile, 0, num_tokens,
        scores, ape, states, state_slots, (positions, position_stride), WINDOW, SAVE,
    )  # fmt: skip
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
            slot = tl.load(slot_mapping + index * slot_stride)
            position = tl.load(positions + index * position_stride).to(tl.int32)
            request = tl.load(req_indices + index * request_stride).to(tl.int64)
            rotation = 0, 0, 0  # load the angles before the rows, so as to wait only once
            if ROPE > 0:
                window_position = (position.to(tl.uint32) // RATIO * RATIO).to(tl.int32)
                rotation = load_tail_angles(angles, window_position, HEAD_DIM, DIM, ROPE)
            values = pool_window(token, request, position, inputs, 0, WINDOW, DIM, THREADS)
            weights = tl.load(norm_weight + channel, mask=channel < HEAD_DIM, other=0.0)
            finish_row(values, weights, rotation, slot, cache, FINISH, FORMAT)
        first_token += TOKENS * programs


@triton.jit(do_not_specialize=SIZES)
def compress_and_insert_kernel(
    kv_score, kv_stride,
    ape,
    states, state_page_stride, num_state_blocks,
    state_block_table, table_stride, column_stride, num_reqs, state_columns,
    positions, position_stride,
    req_indices, request_stride,
    norm_weight,
    cos_sin_cache, num_positions,
    k_cache, page_stride, num_blocks,
    slot_mapping, slot_stride, num_tokens,
    state_slots, state_slot_stride,
    ROW_STRIDE: tl.constexpr, WINDOW: tl.constexpr, FINISH: tl.constexpr, FORMAT: tl.constexpr,
    THREADS: tl.constexpr, SAVE: tl.constexpr, TOKENS: tl.constexpr, SPACING: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel()
    inputs = (
        (kv_score, kv_stride, 1),
        ape,
        (states, state_page_stride, num_state_blocks),
        (state_block_table, table_stride, column_stride, state_columns),
        (positions, position_stride, req_indices, request_stride, num_reqs),
    )
    compress_and_insert(
        tl.program_id(0), tl.num_programs(0), inputs,
        (state_slots, state_slot_stride), norm_weight, (cos_sin_cache, num_positions),
        (k_cache, page_stride, num_blocks, ROW_STRIDE), (slot_mapping, slot_stride, num_tokens),
        WINDOW, FINISH, FORMAT, THREADS, SAVE, TOKENS, SPACING,
    )  # fmt: skip

"""Windows of few rows, each finished by one program."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.rope import load_tail_angles
from dsv4_ops.kernels.compressor.pooling import find_finishing, finish_row, pool_window
from dsv4_ops.kernels.compressor.save_states import (  # by name: Inductor copies kernels
    find_role,
    save_role,
)


@triton.jit
def compress_and_insert(
    program, programs, inputs, state_slots, norm_weight, angles, cache, slots,
    WINDOW: tl.constexpr, FINISH: tl.constexpr, FORMAT: tl.constexpr, THREADS: tl.constexpr,
    SAVE: tl.constexpr, TOKENS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """What the program number ``program`` of ``programs`` does: tokens far apart, as the tokens
    that finish a window are evenly spaced in a prefill."""
    RATIO: tl.constexpr = WINDOW[1]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    DIM: tl.constexpr = FINISH[0]
    ROPE: tl.constexpr = FINISH[1]
    scores, ape, states, _, requests = inputs
    positions, position_stride, req_indices, request_stride, num_reqs = requests
    slot_mapping, slot_stride, num_tokens = slots
    lane = tl.arange(0, TOKENS)
    channel = tl.arange(0, DIM)
    tile, block, _part, programs = find_role(
        program, 0, programs, num_tokens, num_tokens, SAVE, 1, APART
    )
    save_role(tile, 0, num_tokens, scores, ape, states, state_slots, requests, WINDOW, SAVE)
    while block < num_tokens:
        candidate = block + lane * programs
        given, each = candidate < num_tokens, candidate.to(tl.int64)
        found = tl.load(slot_mapping + each * slot_stride, mask=given, other=-1)
        seen = tl.load(positions + each * position_stride, mask=given, other=-1)
        owners = tl.load(req_indices + each * request_stride, mask=given, other=-1)
        finishes = find_finishing(found, seen, owners, num_reqs, cache[2], RATIO, FORMAT[0])
        left = tl.sum(finishes.to(tl.int32), axis=0)
        while left > 0:
            chosen = tl.min(tl.where(finishes, lane, TOKENS), axis=0)
            finishes = finishes & (lane != chosen)
            left -= 1
            token = block + chosen * programs
            index = token.to(tl.int64)
            slot = tl.load(slot_mapping + index * slot_stride)
            position = tl.load(positions + index * position_stride).to(tl.int32)
            request = tl.load(req_indices + index * request_stride).to(tl.int64)
            rotation = 0, 0, 0  # read before the rows, to wait once
            if ROPE > 0:
                first = position.to(tl.uint32) // RATIO * RATIO
                rotation = load_tail_angles(angles, first.to(tl.int32), HEAD_DIM, DIM, ROPE)
            values = pool_window(token, request, position, inputs, 0, WINDOW, DIM, THREADS)
            weights = tl.load(norm_weight + channel, mask=channel < HEAD_DIM, other=0.0)
            finish_row(values, weights, rotation, slot, cache, FINISH, FORMAT)
        block += TOKENS * programs


@triton.jit
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
    THREADS: tl.constexpr, SAVE: tl.constexpr, TOKENS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
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
        WINDOW, FINISH, FORMAT, THREADS, SAVE, TOKENS, APART,
    )  # fmt: skip

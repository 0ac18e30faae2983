"""Write everything that a C4 layer writes before it selects rows, in one launch instead of four.

The four parts are independent: compress for the main cache, compress for the indexer's cache,
normalise queries and insert window rows, and quantise the indexer's queries. A part mostly waits
for its longest chain of dependent loads, so the parts overlap well.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.sizes import SIZES_BUT_TOKENS
from dsv4_ops.kernels.compressor.pool_short import compress_and_insert
from dsv4_ops.kernels.indexer.quantize_q import (  # by name: Inductor copies no modules
    quantize_queries,
)
from dsv4_ops.kernels.rope.qnorm_rope_insert import normalise_and_insert


@triton.jit(do_not_specialize=SIZES_BUT_TOKENS)
def insert_c4_step_kernel(
    q, q_stride, q_head_stride, q_dim_stride,
    q_out, num_heads,
    kv, kv_stride, kv_dim_stride,
    swa_cache, swa_page_stride, swa_blocks,
    swa_slots, swa_slot_stride, num_slots,
    kv_score, score_stride,
    ape,
    states, state_page_stride, num_state_blocks,
    norm_weight,
    k_cache, page_stride, num_blocks,
    indexer_kv_score, indexer_score_stride,
    indexer_ape,
    indexer_states, indexer_state_page_stride, num_indexer_state_blocks,
    indexer_norm_weight,
    indexer_cache, indexer_page_stride, num_indexer_blocks,
    indexer_q, indexer_q_stride, indexer_head_stride, indexer_dim_stride, num_indexer_heads,
    weights, weight_stride, weight_head_stride,
    codes, weights_out,
    state_block_table, table_stride, column_stride, num_reqs, state_columns,
    state_slots, state_slot_stride,
    positions, position_stride,
    req_indices, request_stride,
    cos_sin_cache, num_positions,
    slot_mapping, slot_stride, num_tokens,
    programs, indexer_programs, row_programs,
    EPS: tl.constexpr, SOFTMAX_SCALE: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr,
    FINISH: tl.constexpr, FORMAT: tl.constexpr, THREADS: tl.constexpr, SAVE: tl.constexpr,
    INDEXER_WINDOW: tl.constexpr, INDEXER_FINISH: tl.constexpr, INDEXER_FORMAT: tl.constexpr,
    INDEXER_THREADS: tl.constexpr, INDEXER_SAVE: tl.constexpr, SWA_FORMAT: tl.constexpr,
    TOKENS: tl.constexpr, SPACING: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    INDEXER_HEADS: tl.constexpr,
):  # fmt: skip
    """Assign each program to one of the four parts. Programs that compress windows come first,
    because they have the longest chains of loads."""
    wait_for_previous_kernel()
    INDEXER_DIM: tl.constexpr = INDEXER_FORMAT[1]
    CONVERTS: tl.constexpr = INDEXER_FORMAT[7]
    program = tl.program_id(0)
    table = (state_block_table, table_stride, column_stride, state_columns)
    requests = (positions, position_stride, req_indices, request_stride, num_reqs)
    slots = (slot_mapping, slot_stride, num_tokens)
    saved_slots = (state_slots, state_slot_stride)
    angles = (cos_sin_cache, num_positions)
    rope = (cos_sin_cache, ROPE, 1, num_positions)
    state_cache = (states, state_page_stride, num_state_blocks)
    inputs = ((kv_score, score_stride, 1), ape, state_cache, table, requests)
    cache = (k_cache, page_stride, num_blocks, 0)
    indexer_scores = (indexer_kv_score, indexer_score_stride, 1)
    indexer_state_cache = (indexer_states, indexer_state_page_stride, num_indexer_state_blocks)
    indexer_inputs = (indexer_scores, indexer_ape, indexer_state_cache, table, requests)
    indexer_k_cache = (indexer_cache, indexer_page_stride, num_indexer_blocks, 0)
    if program < programs:
        compress_and_insert(
            program, programs, inputs, saved_slots, norm_weight, angles, cache, slots,
            WINDOW, FINISH, FORMAT, THREADS, SAVE, TOKENS, SPACING,
        )  # fmt: skip
    elif program < programs + indexer_programs:
        compress_and_insert(
            program - programs, indexer_programs, indexer_inputs, saved_slots, indexer_norm_weight,
            angles, indexer_k_cache, slots,
            INDEXER_WINDOW, INDEXER_FINISH, INDEXER_FORMAT, INDEXER_THREADS, INDEXER_SAVE,
            TOKENS, SPACING,
        )  # fmt: skip
    elif program < programs + indexer_programs + row_programs:
        q_rows = (q, q_stride, q_head_stride, q_dim_stride, q_out, num_heads)
        kv_rows = (kv, kv_stride, kv_dim_stride)
        swa = (swa_cache, swa_page_stride, swa_blocks, 0)
        swa_mapping = (swa_slots, swa_slot_stride, num_slots)
        normalise_and_insert(
            program - (programs + indexer_programs), q_rows, kv_rows, swa, swa_mapping,
            (positions, position_stride), rope,
            EPS, SWA_FORMAT, HEADS, KEYS,
        )  # fmt: skip
    else:
        queries = (
            indexer_q, indexer_q_stride, indexer_head_stride, indexer_dim_stride, num_indexer_heads
        )  # fmt: skip
        head_weights = (weights, weight_stride, weight_head_stride)
        out = (codes, weights_out)
        quantize_queries(
            program - (programs + indexer_programs + row_programs), queries, head_weights,
            (positions, position_stride), rope, out,
            SOFTMAX_SCALE, (ROPE, False, True), INDEXER_DIM, INDEXER_HEADS, CONVERTS,
        )  # fmt: skip

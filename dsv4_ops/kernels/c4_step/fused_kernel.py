"""All that a C4 layer writes before it selects, in one launch: four kernels that do not depend on
each other, and each alone takes about as long as its longest chain of loads."""

import triton
import triton.language as tl

from dsv4_ops.kernels.compressor.pool_short import compress_and_insert
from dsv4_ops.kernels.indexer.quantize_q import quantize_queries  # by name: Inductor copies kernels
from dsv4_ops.kernels.rope.qnorm_rope_insert import normalise_and_insert


@triton.jit
def insert_c4_step_kernel(
    q,
    q_stride,
    q_head_stride,
    q_dim_stride,
    q_out,
    num_heads,
    kv,
    kv_stride,
    kv_dim_stride,
    swa_cache,
    swa_page_stride,
    swa_blocks,
    swa_slots,
    swa_slot_stride,
    num_slots,
    kv_score,
    score_stride,
    ape,
    states,
    state_page_stride,
    num_state_blocks,
    norm_weight,
    k_cache,
    page_stride,
    num_blocks,
    indexer_kv_score,
    indexer_score_stride,
    indexer_ape,
    indexer_states,
    indexer_state_page_stride,
    num_indexer_state_blocks,
    indexer_norm_weight,
    indexer_cache,
    indexer_page_stride,
    num_indexer_blocks,
    indexer_q,
    indexer_q_stride,
    indexer_head_stride,
    indexer_dim_stride,
    num_indexer_heads,
    weights,
    weight_stride,
    weight_head_stride,
    codes,
    weights_out,
    state_block_table,
    table_stride,
    column_stride,
    num_reqs,
    state_columns,
    state_slots,
    state_slot_stride,
    positions,
    position_stride,
    req_indices,
    request_stride,
    cos_sin_cache,
    num_positions,
    slot_mapping,
    slot_stride,
    num_tokens,
    programs,
    indexer_programs,
    row_programs,
    EPS: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    RATIO: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROPE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    SWA_BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    VALUES: tl.constexpr,
    SAVE_TOKENS: tl.constexpr,
    SAVE_COLUMNS: tl.constexpr,
    SAVE_PARTS: tl.constexpr,
    INDEXER_WIDTH: tl.constexpr,
    INDEXER_DIM: tl.constexpr,
    INDEXER_CODE_DIM: tl.constexpr,
    INDEXER_QUANT_BLOCK: tl.constexpr,
    INDEXER_DATA_BYTES: tl.constexpr,
    INDEXER_SCALE_BYTES: tl.constexpr,
    INDEXER_VALUES: tl.constexpr,
    INDEXER_SAVE_TOKENS: tl.constexpr,
    INDEXER_SAVE_COLUMNS: tl.constexpr,
    INDEXER_SAVE_PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    APART: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    INDEXER_HEADS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """The windows come first: their chains of loads are the longest."""
    program = tl.program_id(0)
    table = (state_block_table, table_stride, column_stride, state_columns)
    own_slots = (state_slots, state_slot_stride)
    requests = (positions, position_stride, req_indices, request_stride, num_reqs)
    slots = (slot_mapping, slot_stride, num_tokens)
    angles = (cos_sin_cache, num_positions)
    rope = (cos_sin_cache, ROPE, 1, num_positions)
    main_states = (states, state_page_stride, num_state_blocks)
    inputs = ((kv_score, score_stride, 1), ape, main_states, table, requests)
    cache = (k_cache, page_stride, num_blocks, 0)
    FINISH: tl.constexpr = (DIM, ROPE, EPS)
    FORMAT: tl.constexpr = (BLOCK_SIZE, DIM, CODE_DIM, QUANT_BLOCK, DATA_BYTES, SCALE_BYTES, False)
    WINDOW: tl.constexpr = (STATE_BLOCK, RATIO, WIDTH, NUM_ROWS, DIM)
    THREADS: tl.constexpr = (CHUNKS, DEPTH, GROUPS, VALUES, ONE_PAGE)
    SAVE: tl.constexpr = (SAVE_TOKENS, SAVE_COLUMNS, SAVE_PARTS)
    keys_scores = (indexer_kv_score, indexer_score_stride, 1)
    keys_states = (indexer_states, indexer_state_page_stride, num_indexer_state_blocks)
    keys_inputs = (keys_scores, indexer_ape, keys_states, table, requests)
    keys_cache = (indexer_cache, indexer_page_stride, num_indexer_blocks, 0)
    KEYS_FINISH: tl.constexpr = (INDEXER_DIM, ROPE, EPS)
    KEYS_FORMAT: tl.constexpr = (
        BLOCK_SIZE, INDEXER_DIM, INDEXER_CODE_DIM, INDEXER_QUANT_BLOCK,
        INDEXER_DATA_BYTES, INDEXER_SCALE_BYTES, True,
    )  # fmt: skip
    KEYS_WINDOW: tl.constexpr = (STATE_BLOCK, RATIO, INDEXER_WIDTH, NUM_ROWS, INDEXER_DIM)
    KEYS_THREADS: tl.constexpr = (CHUNKS, DEPTH, GROUPS, INDEXER_VALUES, ONE_PAGE)
    KEYS_SAVE: tl.constexpr = (INDEXER_SAVE_TOKENS, INDEXER_SAVE_COLUMNS, INDEXER_SAVE_PARTS)
    if program < programs:
        compress_and_insert(
            program, programs, inputs, own_slots, norm_weight, angles, cache, slots,
            WINDOW, FINISH, FORMAT, THREADS, SAVE, TOKENS, APART, EMULATE,
        )  # fmt: skip
    elif program < programs + indexer_programs:
        compress_and_insert(
            program - programs, indexer_programs, keys_inputs, own_slots, indexer_norm_weight,
            angles, keys_cache, slots,
            KEYS_WINDOW, KEYS_FINISH, KEYS_FORMAT, KEYS_THREADS, KEYS_SAVE, TOKENS, APART, EMULATE,
        )  # fmt: skip
    elif program < programs + indexer_programs + row_programs:
        q_rows = (q, q_stride, q_head_stride, q_dim_stride, q_out, num_heads)
        kv_rows = (kv, kv_stride, kv_dim_stride)
        swa = (swa_cache, swa_page_stride, swa_blocks, 0)
        swa_own = (swa_slots, swa_slot_stride, num_slots)
        SWA: tl.constexpr = (
            SWA_BLOCK_SIZE, DIM, CODE_DIM, QUANT_BLOCK, DATA_BYTES, SCALE_BYTES, False
        )  # fmt: skip
        normalise_and_insert(
            program - (programs + indexer_programs), q_rows, kv_rows, swa, swa_own, requests, rope,
            EPS, SWA, HEADS, KEYS, EMULATE,
        )  # fmt: skip
    else:
        queries = (
            indexer_q, indexer_q_stride, indexer_head_stride, indexer_dim_stride, num_indexer_heads
        )  # fmt: skip
        scaled = (weights, weight_stride, weight_head_stride)
        out = (codes, weights_out)
        quantize_queries(
            program - (programs + indexer_programs + row_programs), queries, scaled, requests,
            rope, out, SOFTMAX_SCALE, ROPE, INDEXER_DIM, INDEXER_HEADS, EMULATE,
        )  # fmt: skip

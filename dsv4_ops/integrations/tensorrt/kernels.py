"""Triton kernels of the plugins. Each kernel fuses stages that TensorRT cannot fuse."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import round_to_bf16
from dsv4_ops.kernels.common.rope import load_tail_angles, rotate_tail
from dsv4_ops.kernels.common.triton_compat import EMULATE


@triton.jit
def apply_rope_kernel(
    x,
    positions,
    cos_sin_cache,
    rows_per_token,
    num_positions,
    out,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Rotate one row of x [tokens, rows_per_token, DIM] per program; rows at positions outside of
    the table do not change."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row // rows_per_token)
    position = tl.where(position < 0, num_positions, position)
    column = row * DIM + tl.arange(0, DIM)
    values = tl.load(x + column).to(tl.float32)
    rotation = load_tail_angles((cos_sin_cache, num_positions), position, DIM, DIM, ROPE)
    rotated = rotate_tail(values, rotation, DIM, INVERSE)
    if out.dtype.element_ty == tl.bfloat16:
        rotated = round_to_bf16(rotated)
    tl.store(out + column, rotated.to(out.dtype.element_ty))


@triton.jit
def combine_topk_swa_kernel(
    topk_indices,
    positions,
    req_indices,
    seq_lens,
    gather_lens,
    columns,
    num_reqs,
    indices,
    lens,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``reference.indices.combine_topk_swa_indices`` in 64-bit integers, with one program
    per token."""
    token = tl.program_id(0).to(tl.int64)
    position, request = tl.load(positions + token), tl.load(req_indices + token)
    valid = (position >= 0) & (position < 2**31 - 1) & (request >= 0) & (request < num_reqs)
    request = tl.where(valid, request, 0)
    length = tl.where(valid, position + 1, 0)
    selected = tl.minimum(length // RATIO, TOPK)
    window = tl.minimum(length, WINDOW)
    gathered = tl.load(gather_lens + request, mask=valid, other=0).to(tl.int64)
    first = tl.load(seq_lens + request, mask=valid, other=0).to(tl.int64) - gathered
    base = request.to(tl.int64) * ROWS
    fitting = 2**31 - base
    # column c of the window is row c + shift of the request's rows
    shift = OFFSET + length - window - first - selected
    begin = tl.maximum(selected, OFFSET - shift)
    stop = OFFSET + tl.minimum(gathered, ROWS - OFFSET)
    stop = tl.minimum(tl.minimum(stop, fitting) - shift, selected + window)
    column = tl.arange(0, BLOCK).to(tl.int64)
    mask = column < selected
    chosen = tl.load(topk_indices + token * columns + column, mask=mask, other=-1).to(tl.int64)
    exists = (chosen >= 0) & (chosen < OFFSET) & (chosen < fitting)
    index = tl.where(exists, chosen + base, -1)
    index = tl.where((column >= begin) & (column < stop), column + base + shift, index)
    tl.store(indices + token * WIDTH + column, index.to(tl.int32), mask=column < WIDTH)
    tl.store(lens + token, (selected + window).to(tl.int32))


@triton.jit
def indexer_logits_kernel(
    q,
    weights,
    k_cache,
    lens,
    req_indices,
    block_table,
    num_reqs,
    max_blocks,
    num_blocks,
    out,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Compute ``reference.indexer.indexer_logits`` for plain keys, with one program per token and
    block of ROWS rows."""
    spans = (NUM_ROWS + ROWS - 1) // ROWS
    token = (tl.program_id(0) // spans).to(tl.int64)
    row = tl.program_id(0) % spans * ROWS + tl.arange(0, ROWS)
    request = tl.load(req_indices + token).to(tl.int64)
    real = (request >= 0) & (request < num_reqs)
    count = tl.where(real, tl.load(lens + token), 0)
    column = row // BLOCK_SIZE
    wanted = (row < count) & (row < NUM_ROWS) & (column < max_blocks)
    entry = block_table + tl.where(real, request, 0) * max_blocks + column
    page = tl.load(entry, mask=wanted, other=-1).to(tl.int64)
    exists = (page >= 0) & (page < num_blocks)
    dim = tl.arange(0, DIM)[None, :]
    key = (page * BLOCK_SIZE + row % BLOCK_SIZE)[:, None] * DIM + dim
    keys = tl.load(k_cache + key, mask=exists[:, None], other=0.0)
    head = tl.arange(0, HEADS)
    there = head < NUM_HEADS
    query = (token * NUM_HEADS + head)[:, None] * DIM + dim
    queries = tl.load(q + query, mask=there[:, None], other=0.0)
    weight = tl.load(weights + token * NUM_HEADS + head, mask=there, other=0.0)
    if EMULATE:  # Triton's interpreter would multiply the bit patterns of bfloat16 values
        keys, queries = keys.to(tl.float32), queries.to(tl.float32)
    products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    score = tl.sum(tl.where(there[None, :], products * weight[None, :], 0.0), axis=1)
    score = tl.where(exists, score, float("-inf"))
    tl.store(out + token * NUM_ROWS + row, score, mask=row < NUM_ROWS)

"""Process one window: read its rows, pool them, then normalise, rotate and store the result.

Groups of arguments, in addition to the groups of ``kernels.common``:

- ``scores``: ``kv_score``, its row stride and its column stride;
- ``states``: the cache of states, its block stride and its number of blocks;
- ``inputs``: ``scores``, ``ape``, ``states``, the block table of the states, and ``requests``;
- ``WINDOW``: rows per block of states, compression ratio, columns of half a state, rows per window,
  and head dimension;
- ``THREADS``: how a window's rows are split over threads: number of chunks of rows, consecutive
  rows per thread, groups of threads, consecutive channels per thread, and whether the states of a
  thread's rows are in one block;
- ``FINISH``: the head dimension rounded up to a power of two, the number of values at the end of a
  row that are rotated, and the epsilon of the norm;
- ``SAVE``: tokens and columns of a tile of states, and tiles per row; with 0 tokens, nothing is
  saved.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    quantize,
    round_to,
    round_to_bf16,
)
from dsv4_ops.kernels.common.paging import locate_slots, valid_tokens
from dsv4_ops.kernels.common.rope import rotate_tail
from dsv4_ops.kernels.common.triton_compat import EMULATE

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def completes_window(
    slot, position, request, num_reqs, num_blocks, RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Return which tokens complete a window and have a slot for its compressed row."""
    _page, _row, slot_valid = locate_slots(slot, num_blocks, BLOCK_SIZE)
    valid = valid_tokens(position, request, num_reqs)
    position = tl.where(valid, position, 0).to(tl.int32)
    return slot_valid & valid & (position % RATIO == RATIO - 1)


@triton.jit
def _is_in_batch(token, request, position, requests, NUM_ROWS: tl.constexpr):
    """Return whether this batch has all rows of the window that ``token`` completes: the rows of
    ``token`` and of the tokens directly before ``token``."""
    positions, position_stride, req_indices, request_stride, _ = requests
    distance = tl.arange(0, NUM_ROWS)
    mask = (position >= distance) & (token >= distance)
    row_token = tl.where(mask, token - distance, 0).to(tl.int64)
    row_position = tl.load(positions + row_token * position_stride, mask=mask, other=-1)
    row_request = tl.load(req_indices + row_token * request_stride, mask=mask, other=-1)
    in_batch = mask & (row_position == position - distance) & (row_request == request)
    return tl.sum(in_batch.to(tl.int32), axis=0) == NUM_ROWS


@triton.jit
def _read_batch_rows(
    row, token, inputs, first_channel,
    WINDOW: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Read rows as ``_read_rows`` does, for a window that is wholly in this batch. This function
    needs half of the instructions of ``_read_rows``. A prefill is bound by instructions as much as
    by memory."""
    RATIO: tl.constexpr = WINDOW[1]
    WIDTH: tl.constexpr = WINDOW[2]
    NUM_ROWS: tl.constexpr = WINDOW[3]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    scores, ape, _, _, _ = inputs
    kv_score, kv_stride, _ = scores
    NEXT: tl.constexpr = 2 if row.shape[1] > 1 else 1
    first = kv_score + (token - (NUM_ROWS - 1)).to(tl.int64) * kv_stride
    offset = (row.to(tl.int64) * kv_stride)[:, :, None]
    row, dim = row[:, :, None], first_channel + tl.arange(0, DIM)[None, None, :]
    # rows of the previous window have their values in the first columns; compute the column by a
    # product, because Triton 3.9 treats the result of ``tl.where`` as unaligned
    column = (row >= RATIO).to(tl.int32) * (WIDTH - HEAD_DIM) + dim
    start = tl.max_contiguous(first + (offset + column), [1, NEXT, VALUES])
    bias = tl.max_contiguous(ape + row % RATIO * WIDTH + column, [1, NEXT, VALUES])
    return tl.load(start), tl.load(start + WIDTH) + tl.load(bias)


@triton.jit
def _read_rows(
    row, token, request, position, inputs, first_channel,
    WINDOW: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return kv and biased scores, both [DEPTH, GROUPS, DIM], of rows of the window that ``token``
    completes: DIM channels from ``first_channel`` on. ``row`` [DEPTH, GROUPS] holds the indices of
    the rows in the window. A row that does not exist has a kv of 0 and a score of -inf."""
    STATE_BLOCK: tl.constexpr = WINDOW[0]
    RATIO: tl.constexpr = WINDOW[1]
    WIDTH: tl.constexpr = WINDOW[2]
    NUM_ROWS: tl.constexpr = WINDOW[3]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    scores, ape, states, state_table, requests = inputs
    kv_score, kv_stride, _ = scores
    state_cache, state_page_stride, num_state_blocks = states
    block_table, table_stride, column_stride, max_blocks = state_table
    positions, position_stride, req_indices, request_stride, _ = requests
    distance = NUM_ROWS - 1 - row
    row_position = position - distance
    in_window = (distance >= 0) & (row_position >= 0)
    has_token = in_window & (token >= distance)
    row_token = tl.where(has_token, token - distance, 0).to(tl.int64)
    # issue these three loads at once, so as to wait once; rows in the batch need no table entry
    token_position = tl.load(positions + row_token * position_stride, mask=has_token, other=-1)
    token_request = tl.load(req_indices + row_token * request_stride, mask=has_token, other=-1)
    index = tl.where(in_window, row_position, 0).to(tl.uint32)  # divisions of uint32 are shifts
    if ONE_BLOCK:
        block = tl.max(index, axis=0)[None, :] // STATE_BLOCK
    else:
        block = index // STATE_BLOCK
    block = block.to(tl.int64)
    entry = block_table + request * table_stride + block * column_stride
    page = tl.load(entry, mask=block < max_blocks, other=-1)
    in_batch = has_token & (token_position == row_position) & (token_request == request)
    row_valid = in_batch | (in_window & (page >= 0) & (page < num_state_blocks))
    state_offset = page.to(tl.int64) * state_page_stride
    state_offset += (index % STATE_BLOCK).to(tl.int64) * (2 * WIDTH)
    # two dimensions up to here: with three, a thread would look up each row four times
    NEXT: tl.constexpr = 2 if row.shape[1] > 1 else 1
    offset = tl.where(in_batch, row_token * kv_stride, state_offset)[:, :, None]
    row, dim = row[:, :, None], first_channel + tl.arange(0, DIM)[None, None, :]
    column = (row >= RATIO).to(tl.int32) * (WIDTH - HEAD_DIM) + dim
    in_batch, mask = in_batch[:, :, None], row_valid[:, :, None] & (dim < HEAD_DIM)
    start = tl.where(in_batch, kv_score + offset, state_cache + offset) + column
    start = tl.max_contiguous(start, [1, NEXT, VALUES])
    bias = tl.max_contiguous(ape + row % RATIO * WIDTH + column, [1, NEXT, VALUES])
    kv = tl.load(start, mask=mask, other=0.0)
    score = tl.load(start + WIDTH, mask=mask, other=float("-inf"))
    # states already include the bias
    return kv, score + tl.load(bias, mask=mask & in_batch, other=0.0)


@triton.jit
def _exp2(values):
    """Return powers of two, in one instruction. Results below 2^-126 become 0."""
    if EMULATE:
        return tl.exp2(values)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _accumulate(kv, score, row_max, row_sum, acc):
    """Add rows to the online softmax over the first dimension, which lies within a thread.
    ``row_max`` includes the factor log2(e)."""
    new_max = tl.maximum(row_max, tl.max(score, axis=0) * _LOG2_E)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = _exp2(row_max - finite_max)
    p = _exp2(score * _LOG2_E - finite_max[None])
    row_sum = row_sum * alpha + tl.sum(p, axis=0)
    acc = acc * alpha + tl.sum(p * kv, axis=0)
    return new_max, row_sum, acc


@triton.jit
def _combine_groups(row_max, row_sum, acc):
    """Combine the online softmaxes of the thread groups; return the pooled values [DIM]."""
    new_max = tl.max(row_max, axis=0)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = _exp2(row_max - finite_max[None])
    return _sum_groups(acc * alpha) / _sum_groups(row_sum * alpha)


@triton.jit
def _sum_groups(values):
    """Add up to 64 groups pairwise, adjacent groups first; return [DIM]. The order of ``tl.sum``,
    and so the last bits of the result, would depend on whether groups are lanes or warps."""
    for _ in tl.static_range(6):
        if values.shape[0] > 1:
            pairs = tl.reshape(values, (values.shape[0] // 2, 2, values.shape[1]))
            values = tl.sum(pairs, axis=1)
    return tl.reshape(values, (values.shape[1],))


@triton.jit
def pool_window(
    token, request, position, inputs, first_channel,
    WINDOW: tl.constexpr, DIM: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Return DIM pooled values, from ``first_channel`` on, of the window that ``token`` completes.
    A thread pools DEPTH consecutive rows and VALUES channels at a time. The results of the GROUPS
    groups of threads are combined at the end."""
    NUM_ROWS: tl.constexpr = WINDOW[3]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    CHUNKS: tl.constexpr = THREADS[0]
    DEPTH: tl.constexpr = THREADS[1]
    GROUPS: tl.constexpr = THREADS[2]
    VALUES: tl.constexpr = THREADS[3]
    ONE_BLOCK: tl.constexpr = THREADS[4]
    _, _, _, _, requests = inputs
    ROWS: tl.constexpr = DEPTH * GROUPS * CHUNKS
    EXACT: tl.constexpr = ROWS == NUM_ROWS and HEAD_DIM % DIM == 0
    first_row = tl.arange(0, GROUPS)[None, :] * DEPTH + tl.arange(0, DEPTH)[:, None]
    row_max = tl.full((GROUPS, DIM), float("-inf"), tl.float32)
    row_sum = tl.zeros((GROUPS, DIM), tl.float32)
    acc = tl.zeros((GROUPS, DIM), tl.float32)
    is_in_batch = EXACT and _is_in_batch(token, request, position, requests, ROWS)
    for chunk in tl.range(CHUNKS):
        row = first_row + chunk * (DEPTH * GROUPS)
        if is_in_batch:
            kv, score = _read_batch_rows(row, token, inputs, first_channel, WINDOW, DIM, VALUES)
        else:
            kv, score = _read_rows(
                row, token, request, position, inputs, first_channel,
                WINDOW, DIM, VALUES, ONE_BLOCK,
            )  # fmt: skip
        row_max, row_sum, acc = _accumulate(kv, score, row_max, row_sum, acc)
    return _combine_groups(row_max, row_sum, acc)


@triton.jit
def _store_row(values, page_start, row, FORMAT: tl.constexpr):
    """Quantise fp32 ``values`` [HEAD_DIM] and store them as one row of a page."""
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    SCALE_BYTES: tl.constexpr = FORMAT[5]
    FLOAT_SCALES: tl.constexpr = FORMAT[6]
    CONVERTS: tl.constexpr = FORMAT[7]
    blocks = tl.reshape(values, (HEAD_DIM // QUANT_BLOCK, QUANT_BLOCK))
    blocks = round_to_bf16(blocks)
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)
    dim = group[:, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, :]
    codes, scale = quantize(blocks.to(tl.float32), CONVERTS)
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
    values, weights, rotation, slot, cache,
    FINISH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Normalise pooled ``values`` [DIM], rotate them, and store them in ``slot``. ``rotation`` is
    the result of ``load_tail_angles``."""
    DIM: tl.constexpr = FINISH[0]
    ROPE: tl.constexpr = FINISH[1]
    EPS: tl.constexpr = FINISH[2]
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    k_cache, page_stride, _, row_stride = cache
    channel = tl.arange(0, DIM)
    values = tl.where(channel < HEAD_DIM, values, 0.0)
    mean = tl.sum(values * values, axis=0) / HEAD_DIM
    values = values * (1.0 / tl.sqrt_rn(mean + EPS)) * weights
    if ROPE > 0:
        values = rotate_tail(values, rotation, DIM)
    page_start = k_cache + slot // BLOCK_SIZE * page_stride
    if QUANT_BLOCK > 0:
        _store_row(values, page_start, slot % BLOCK_SIZE, FORMAT)
    else:
        target = page_start + slot % BLOCK_SIZE * row_stride + channel
        stored = round_to(values, k_cache.dtype.element_ty)
        tl.store(target, stored, mask=channel < HEAD_DIM)

"""What becomes of one window: its rows read, pooled, normalised, rotated and stored.

Groups of arguments beside those of ``kernels.common``:

- ``scores``: ``kv_score``, its stride and that of its columns;
- ``inputs``: ``scores``, ``ape``, ``states``, ``table`` of the states, and ``requests``;
- ``WINDOW``: rows of a block of states, compression ratio, columns of half a state, rows of a
  window, head dimension;
- ``THREADS``: how rows lie in threads: chunks, depth, groups, channels, and whether the states of a
  group are in one block.
"""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels
    quantize,
    round_to,
    round_to_bf16,
)
from dsv4_ops.kernels.common.paging import place_slots, valid_tokens
from dsv4_ops.kernels.common.rope import rotate_tail
from dsv4_ops.kernels.common.triton_compat import EMULATE

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_finishing(
    slot, position, request, num_reqs, num_blocks, RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Which tokens are the last of a window whose row has a slot. They are loaded by the kernel,
    all three at once."""
    _page, _row, exists = place_slots(slot, num_blocks, BLOCK_SIZE)
    real = valid_tokens(position, request, num_reqs)
    index = tl.where(real, position, 0).to(tl.int32)
    return exists & real & (index % RATIO == RATIO - 1)


@triton.jit
def _is_fresh(token, request, position, requests, NUM_ROWS: tl.constexpr):
    """Whether all rows of the window that ``token`` finishes are of the tokens before it."""
    back = tl.arange(0, NUM_ROWS)
    near = (position >= back) & (token >= back)
    other = tl.where(near, token - back, 0).to(tl.int64)
    before = tl.load(requests[0] + other * requests[1], mask=near, other=-1)
    owner = tl.load(requests[2] + other * requests[3], mask=near, other=-1)
    fresh = near & (before == position - back) & (owner == request)
    return tl.sum(fresh.to(tl.int32), axis=0) == NUM_ROWS


@triton.jit
def _read_fresh_rows(
    row, token, inputs, first_channel,
    WINDOW: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """What ``_read_rows`` reads of a window whose rows are all of this call: half as many
    instructions, which bound a prefill as much as memory does."""
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
    column = tl.where(row < RATIO, 0, WIDTH - HEAD_DIM) + dim  # left in the window before
    start = tl.max_contiguous(first + (offset + column), [1, NEXT, VALUES])
    bias = tl.max_contiguous(ape + row % RATIO * WIDTH + column, [1, NEXT, VALUES])
    return tl.load(start), tl.load(start + WIDTH) + tl.load(bias)


@triton.jit
def _read_rows(
    row, token, request, position, inputs, first_channel,
    WINDOW: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """kv and biased score [DEPTH, GROUPS, DIM], from ``first_channel`` on, of ``row`` [DEPTH,
    GROUPS] of the window that ``token`` finishes; 0 and -inf where the row does not exist."""
    STATE_BLOCK: tl.constexpr = WINDOW[0]
    RATIO: tl.constexpr = WINDOW[1]
    WIDTH: tl.constexpr = WINDOW[2]
    NUM_ROWS: tl.constexpr = WINDOW[3]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    scores, ape, states, state_table, requests = inputs
    kv_score, kv_stride, _ = scores
    back = NUM_ROWS - 1 - row
    source = position - back
    wanted = (back >= 0) & (source >= 0)
    near = wanted & (token >= back)
    other = tl.where(near, token - back, 0).to(tl.int64)
    # all three loads at once: one latency, though the table is not needed for a fresh row
    other_position = tl.load(requests[0] + other * requests[1], mask=near, other=-1)
    other_request = tl.load(requests[2] + other * requests[3], mask=near, other=-1)
    index = tl.where(wanted, source, 0).to(tl.uint32)  # divided by shifts
    if ONE_BLOCK:
        block = tl.max(index, axis=0)[None, :] // STATE_BLOCK
    else:
        block = index // STATE_BLOCK
    block = block.to(tl.int64)
    entry = state_table[0] + request * state_table[1] + block * state_table[2]
    page = tl.load(entry, mask=block < state_table[3], other=-1)
    fresh = near & (other_position == source) & (other_request == request)
    there = fresh | (wanted & (page >= 0) & (page < states[2]))
    old = page.to(tl.int64) * states[1] + (index % STATE_BLOCK).to(tl.int64) * (2 * WIDTH)
    # in two dimensions so far: in three every thread would look up its rows four times
    NEXT: tl.constexpr = 2 if row.shape[1] > 1 else 1
    offset = tl.where(fresh, other * kv_stride, old)[:, :, None]
    row, dim = row[:, :, None], first_channel + tl.arange(0, DIM)[None, None, :]
    column = tl.where(row < RATIO, 0, WIDTH - HEAD_DIM) + dim
    fresh, there = fresh[:, :, None], there[:, :, None] & (dim < HEAD_DIM)
    start = tl.where(fresh, kv_score + offset, states[0] + offset) + column
    start = tl.max_contiguous(start, [1, NEXT, VALUES])
    bias = tl.max_contiguous(ape + row % RATIO * WIDTH + column, [1, NEXT, VALUES])
    kv = tl.load(start, mask=there, other=0.0)
    score = tl.load(start + WIDTH, mask=there, other=float("-inf"))
    return kv, score + tl.load(bias, mask=there & fresh, other=0.0)


@triton.jit
def _exp2(values):
    """Powers of two in one instruction, and 0 for those below 2^-126."""
    if EMULATE:
        return tl.exp2(values)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _accumulate(kv, score, row_max, row_sum, summed):
    """An online softmax over the first dimension, which lies within a thread; ``row_max`` times
    log2(e)."""
    highest = tl.maximum(row_max, tl.max(score, axis=0) * _LOG2_E)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    kept = _exp2(row_max - origin)
    weight = _exp2(score * _LOG2_E - origin[None])
    row_sum = row_sum * kept + tl.sum(weight, axis=0)
    summed = summed * kept + tl.sum(weight * kv, axis=0)
    return highest, row_sum, summed


@triton.jit
def _combine_groups(row_max, row_sum, summed):
    """Weighted sums [DIM] of the rows that the groups have read."""
    highest = tl.max(row_max, axis=0)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    share = _exp2(row_max - origin[None])
    return _sum_groups(summed * share) / _sum_groups(row_sum * share)


@triton.jit
def _sum_groups(values):
    """Sums [DIM] over up to 64 groups, neighbours first: the groups may lie in lanes or in warps,
    and where they do decides the order of Triton's own sum, and so the last bit."""
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
    """Weighted sums [DIM], from ``first_channel`` on, of the window that ``token`` finishes. DEPTH
    consecutive rows and VALUES channels lie in a thread; GROUPS groups of threads meet at the
    end."""
    NUM_ROWS: tl.constexpr = WINDOW[3]
    HEAD_DIM: tl.constexpr = WINDOW[4]
    CHUNKS: tl.constexpr = THREADS[0]
    DEPTH: tl.constexpr = THREADS[1]
    GROUPS: tl.constexpr = THREADS[2]
    VALUES: tl.constexpr = THREADS[3]
    ROWS: tl.constexpr = DEPTH * GROUPS * CHUNKS
    EXACT: tl.constexpr = ROWS == NUM_ROWS and HEAD_DIM % DIM == 0
    first_row = tl.arange(0, GROUPS)[None, :] * DEPTH + tl.arange(0, DEPTH)[:, None]
    row_max = tl.full((GROUPS, DIM), float("-inf"), tl.float32)
    row_sum = tl.zeros((GROUPS, DIM), tl.float32)
    summed = tl.zeros((GROUPS, DIM), tl.float32)
    is_fresh = EXACT and _is_fresh(token, request, position, inputs[4], ROWS)
    for chunk in tl.range(CHUNKS):
        row = first_row + chunk * (DEPTH * GROUPS)
        if is_fresh:
            kv, score = _read_fresh_rows(row, token, inputs, first_channel, WINDOW, DIM, VALUES)
        else:
            kv, score = _read_rows(
                row, token, request, position, inputs, first_channel,
                WINDOW, DIM, VALUES, THREADS[4],
            )  # fmt: skip
        row_max, row_sum, summed = _accumulate(kv, score, row_max, row_sum, summed)
    return _combine_groups(row_max, row_sum, summed)


@triton.jit
def _store_row(values, page_start, row, FORMAT: tl.constexpr):
    """One row of a quantised cache from fp32 ``values`` [HEAD_DIM]."""
    HEAD_DIM: tl.constexpr = FORMAT[1]
    CODE_DIM: tl.constexpr = FORMAT[2]
    QUANT_BLOCK: tl.constexpr = FORMAT[3]
    DATA_BYTES: tl.constexpr = FORMAT[4]
    SCALE_BYTES: tl.constexpr = FORMAT[5]
    blocks = tl.reshape(values, (HEAD_DIM // QUANT_BLOCK, QUANT_BLOCK))
    blocks = round_to_bf16(blocks)
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)
    dim = group[:, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, :]
    codes, scale = quantize(blocks.to(tl.float32))
    data = page_start + row * DATA_BYTES
    tl.store(data + dim, codes, mask=dim < CODE_DIM)
    if CODE_DIM < HEAD_DIM:
        target = (data + CODE_DIM).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(target + (dim - CODE_DIM), blocks, mask=dim >= CODE_DIM)
    scales = page_start + FORMAT[0] * DATA_BYTES + row * SCALE_BYTES
    if FORMAT[6]:
        tl.store(scales.to(tl.pointer_type(tl.int32), bitcast=True) + group, scale << 23)
    else:
        padded = tl.where(group < CODE_DIM // QUANT_BLOCK, scale, 0).to(tl.uint8)
        tl.store(scales + group, padded, mask=group < SCALE_BYTES)


@triton.jit
def finish_row(
    values, weights, rotation, slot, cache,
    FINISH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of ``values`` [DIM], into the slot, with what ``load_tail_angles`` has
    loaded. FINISH: dimension of the head in threads, values that are rotated, and the norm's
    epsilon."""
    DIM: tl.constexpr = FINISH[0]
    BLOCK_SIZE: tl.constexpr = FORMAT[0]
    HEAD_DIM: tl.constexpr = FORMAT[1]
    k_cache, page_stride, _, row_stride = cache
    channel = tl.arange(0, DIM)
    values = tl.where(channel < HEAD_DIM, values, 0.0)
    mean = tl.sum(values * values, axis=0) / HEAD_DIM
    values = values * (1.0 / tl.sqrt_rn(mean + FINISH[2])) * weights
    if FINISH[1] > 0:
        values = rotate_tail(values, rotation, DIM)
    page_start = k_cache + slot // BLOCK_SIZE * page_stride
    if FORMAT[3] > 0:
        _store_row(values, page_start, slot % BLOCK_SIZE, FORMAT)
    else:
        target = page_start + slot % BLOCK_SIZE * row_stride + channel
        stored = round_to(values, k_cache.dtype.element_ty)
        tl.store(target, stored, mask=channel < HEAD_DIM)

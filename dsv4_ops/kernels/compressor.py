"""Kernel and launcher of the compressor: a finished window becomes a cache row, read once."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.kernels.fp8 import quantize, round_to_bf16  # by name: Inductor copies kernels
from dsv4_ops.kernels.launch import EMULATE, Launch
from dsv4_ops.kernels.pages import locate_positions, locate_slots
from dsv4_ops.kernels.rotation import rotate_tail

VALUES = 4
"""Consecutive channels of a thread: 16 bytes."""

DEPTH = 8
"""Most rows of a short window that a thread reads at a time: all of C4's."""

LONG_DEPTH, STAGES = 2, 3
"""Rows of a long window that a thread reads at a time, and reads that are under way at once."""

MAX_WARPS = 16

ABSENT, STORED, FRESH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where a row of a window is: nowhere, in the states, in this call."""

SHORT_WINDOW = 32
"""Most rows of a window that is short: it takes less than a look at a token does."""

SHORT_TOKENS, LONG_TOKENS = 4, 64
"""Tokens that a program looks at together."""

SHORT_PROGRAMS, LONG_PROGRAMS = 8 * 132 + 1, 132 + 1
"""Programs below which each gets fewer tokens; odd."""


@triton.jit
def _read_rows(
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
    RATIO: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """kv and biased score [DEPTH, GROUPS, DIM] of ``row`` [DEPTH, GROUPS] of the window that
    ``token`` finishes; 0 and -inf where the row does not exist."""
    back = (NUM_ROWS - 1 - row).to(tl.int64)
    source = position - back
    wanted = (back >= 0) & (source >= 0)
    fresh = wanted & (token >= back)
    other = tl.where(fresh, token - back, 0)
    # all three loads at once: one latency, though the table is not needed for a fresh row
    other_position = tl.load(positions + other * position_stride, mask=fresh, other=-1)
    other_request = tl.load(req_indices + other * request_stride, mask=fresh, other=-1)
    page, state_row, stored = locate_positions(
        state_block_table,
        table_stride,
        column_stride,
        request,
        source,
        wanted,
        state_columns,
        num_state_blocks,
        STATE_BLOCK,
    )
    fresh = fresh & (other_position == source) & (other_request == request)
    old = page * state_page_stride + state_row * (2 * WIDTH)
    # in two dimensions so far: in three every thread would look up its rows four times
    offset = tl.where(fresh, other * kv_stride, old)[:, :, None]
    kind = tl.where(fresh, FRESH, tl.where(stored, STORED, ABSENT))[:, :, None]
    row, dim = row[:, :, None], tl.arange(0, DIM)[None, None, :]
    column = tl.where(row < RATIO, 0, WIDTH - HEAD_DIM) + dim  # left in the window before
    start = tl.where(kind == FRESH, kv_score + offset, states + offset) + column
    there = (kind != ABSENT) & (dim < HEAD_DIM)
    kv = tl.load(start, mask=there, other=0.0)
    score = tl.load(start + WIDTH, mask=there, other=float("-inf"))
    biased = (kind == FRESH) & (dim < HEAD_DIM)
    return kv, score + tl.load(ape + row % RATIO * WIDTH + column, mask=biased, other=0.0)


@triton.jit
def _accumulate(kv, score, largest, total, summed):
    """An online softmax over the first dimension, which lies within a thread."""
    highest = tl.maximum(largest, tl.max(score, axis=0))
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    kept = tl.exp(largest - anchor)
    weight = tl.exp(score - anchor[None])
    total = total * kept + tl.sum(weight, axis=0)
    summed = summed * kept + tl.sum(weight * kv, axis=0)
    return highest, total, summed


@triton.jit
def _store(
    values,
    page_start,
    row,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FLOAT_SCALES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One row of a quantised cache from fp32 ``values`` [HEAD_DIM]."""
    blocks = tl.reshape(values, (HEAD_DIM // QUANT_BLOCK, QUANT_BLOCK))
    blocks = round_to_bf16(blocks, EMULATE)
    group = tl.arange(0, HEAD_DIM // QUANT_BLOCK)
    dim = group[:, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, :]
    codes, scale = quantize(blocks.to(tl.float32), EMULATE)
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
def compress_and_insert_kernel(
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
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    EPS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    CODE_DIM: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FLOAT_SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Tokens far apart per program, as the tokens that finish a window are evenly spaced in a
    prefill; every row of a window in the registers of GROUPS groups of threads, which meet at the
    end."""
    lane = tl.arange(0, TOKENS)
    first_row = tl.arange(0, DEPTH)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    block = tl.program_id(0)
    while block < num_tokens:
        candidate = block + lane * tl.num_programs(0)
        _page, _row, finishes = locate_slots(
            slot_mapping, slot_stride, candidate, num_tokens, num_blocks, BLOCK_SIZE
        )
        index = candidate.to(tl.int64)
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
            largest = tl.full((GROUPS, DIM), float("-inf"), tl.float32)
            total = tl.zeros((GROUPS, DIM), tl.float32)
            summed = tl.zeros((GROUPS, DIM), tl.float32)
            for chunk in tl.range(CHUNKS, num_stages=STAGES):
                row = first_row + chunk * (DEPTH * GROUPS)
                kv, score = _read_rows(
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
                    RATIO,
                    NUM_ROWS,
                    WIDTH,
                    HEAD_DIM,
                    DIM,
                    STATE_BLOCK,
                )
                largest, total, summed = _accumulate(kv, score, largest, total, summed)
            highest = tl.max(largest, axis=0)
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            share = tl.exp(largest - anchor[None])
            values = tl.sum(summed * share, axis=0) / tl.sum(total * share, axis=0)
            channel = tl.arange(0, DIM)
            values = tl.where(channel < HEAD_DIM, values, 0.0)
            weights = tl.load(norm_weight + channel, mask=channel < HEAD_DIM, other=0.0)
            mean = tl.sum(values * values, axis=0) / HEAD_DIM
            values = values * (1.0 / tl.sqrt_rn(mean + EPS)) * weights
            if ROPE > 0:
                first = position // RATIO * RATIO
                values = rotate_tail(
                    values, cos_sin_cache, first, num_positions, HEAD_DIM, DIM, ROPE, EMULATE
                )
            slot = tl.load(slot_mapping + token * slot_stride)
            page_start = k_cache + slot // BLOCK_SIZE * page_stride
            if QUANT_BLOCK > 0:
                _store(
                    values,
                    page_start,
                    slot % BLOCK_SIZE,
                    BLOCK_SIZE,
                    HEAD_DIM,
                    CODE_DIM,
                    QUANT_BLOCK,
                    DATA_BYTES,
                    SCALE_BYTES,
                    FLOAT_SCALES,
                    EMULATE,
                )
            else:
                target = page_start + slot % BLOCK_SIZE * ROW_STRIDE + channel
                if k_cache.dtype.element_ty == tl.bfloat16:
                    tl.store(target, round_to_bf16(values, EMULATE), mask=channel < HEAD_DIM)
                else:
                    tl.store(target, values, mask=channel < HEAD_DIM)
        block += TOKENS * tl.num_programs(0)


def compress_and_insert(
    launch: Launch,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    states: torch.Tensor,
    state_block_table: torch.Tensor,
    positions: torch.Tensor,
    req_indices: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> None:
    width, head_dim = int(ape.shape[1]), int(norm_weight.shape[0])
    checks = Checks("compress_and_insert")
    checks.page_start("states", states, StateLayout(state_block_size, max(2 * width, 1)))
    quantized = _quantized(layout, block_size)
    if quantized is not None:
        checks.page_start("k_cache", k_cache, quantized)
    num_tokens, num_reqs = positions.shape[0], state_block_table.shape[0]
    if num_tokens == 0 or num_reqs == 0 or k_cache.shape[0] == 0 or head_dim == 0:
        return
    if kv_score.stride(1) != 1:
        kv_score = kv_score.contiguous()
    num_rows = compress_ratio * (2 if overlap else 1)
    shape = _shape_of_program(num_rows, head_dim)
    launch(compress_and_insert_kernel)[_programs(num_tokens, num_rows, shape["TOKENS"]),](
        kv_score,
        kv_score.stride(0),
        ape.contiguous(),
        states,
        states.stride(0),
        states.shape[0],
        state_block_table,
        state_block_table.stride(0),
        state_block_table.stride(1),
        num_reqs,
        state_block_table.shape[1],
        positions,
        positions.stride(0),
        req_indices,
        req_indices.stride(0),
        norm_weight.contiguous(),
        cos_sin_cache.contiguous(),
        cos_sin_cache.shape[0],
        k_cache,
        k_cache.stride(0),
        k_cache.shape[0],
        slot_mapping,
        slot_mapping.stride(0),
        num_tokens,
        RATIO=compress_ratio,
        NUM_ROWS=num_rows,
        WIDTH=width,
        HEAD_DIM=head_dim,
        ROPE=int(cos_sin_cache.shape[1]),
        EPS=float(eps),
        STATE_BLOCK=state_block_size,
        BLOCK_SIZE=block_size,
        ROW_STRIDE=0 if quantized else int(k_cache.stride(1)),
        CODE_DIM=quantized.code_dim if quantized else 0,
        QUANT_BLOCK=quantized.quant_block if quantized else 0,
        DATA_BYTES=quantized.data_bytes if quantized else 0,
        SCALE_BYTES=quantized.scale_bytes if quantized else 0,
        FLOAT_SCALES=layout == IndexerLayout.tag,
        EMULATE=EMULATE,
        **shape,
    )


def _quantized(layout: str, block_size: int) -> QuantizedLayout | None:
    if layout == MainLayout.tag:
        return MainLayout(block_size)
    return IndexerLayout(block_size) if layout == IndexerLayout.tag else None


def _shape_of_program(num_rows: int, head_dim: int) -> dict[str, int]:
    """How the rows of a window lie in the threads of a program."""
    dim, rows = triton.next_power_of_2(head_dim), triton.next_power_of_2(num_rows)
    depth = min(rows, DEPTH if rows <= SHORT_WINDOW else LONG_DEPTH)
    row_warps = max(dim // (32 * VALUES), 1)
    groups = min(rows // depth, max(MAX_WARPS // row_warps, 1))
    return {
        "DIM": dim,
        "DEPTH": depth,
        "GROUPS": groups,
        "CHUNKS": rows // (depth * groups),
        "STAGES": min(rows // (depth * groups), STAGES),
        "TOKENS": SHORT_TOKENS if rows <= SHORT_WINDOW else LONG_TOKENS,
        "num_warps": min(row_warps * groups, MAX_WARPS),
    }


def _programs(num_tokens: int, num_rows: int, tokens: int) -> int:
    """Programs, an odd number where there are fewer than tokens: those that finish a window, an
    even number of tokens apart, then are of different programs."""
    least = SHORT_PROGRAMS if num_rows <= SHORT_WINDOW else LONG_PROGRAMS
    odd = (num_tokens + tokens - 1) // tokens // 2 * 2 + 1
    return torch.sym_min(num_tokens, torch.sym_max(odd, least))

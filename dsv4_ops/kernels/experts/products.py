"""The two products of routed experts, whose weights are read once for each block of rows, or for
two."""

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import WEIGHT_BLOCK, round_up
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels
    multiply_add,
    round_to_bf16,
)
from dsv4_ops.kernels.common.weights import (
    bf16_activations,
    byte_rows,
    multiply_fp4,
    multiply_fp8,
    place_of,
    reordered,
    scale_rows,
    step_of,
    tile_rows,
)
from dsv4_ops.kernels.experts.activations import can_round, round_rows
from dsv4_ops.kernels.experts.plan import PAIR, expert_plan
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.experts import combine

TILES = {
    4: {16: (64, 4, 3), 32: (128, 8, 3), 64: (64, 4, 3), 128: (128, 8, 3)},
    8: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 3), 128: (128, 8, 2)},
    16: {16: (64, 4, 4), 32: (64, 4, 4), 64: (128, 8, 3), 128: (256, 8, 3)},
}
"""By the bits of a weight and the rows of a block: rows of the weight per program, warps, and steps
under way. FP4's blocks of 128 need 226 KB of shared memory, of 64 113, of 32 82; bf16's of 64
145."""

PAIR_STAGES = {(4, 16): 2, (4, 32): 2, (8, 16): 2, (16, 16): 3, (16, 32): 3}
"""By the bits and the rows of a block, steps under way of a program that has two blocks of an
expert and reads its weight once for both. They are so few that shared memory is that of one block,
but for FP8, whose programs hold 17 KB. Where routing is even, hardly an expert has two blocks."""

STEPS = {16: 128, 32: 128, 64: 128, 128: 64}
"""Values of K of a step of bf16 weights, by the rows of a block."""

_LARGE_SHARED = ((9, 0), (10, 0), (10, 3))
"""GPUs with as much."""

_BITS = {torch.float8_e4m3fn: 8, torch.bfloat16: 16}
"""Of a value of a weight; other dtypes hold FP4."""

_FEW_BITS = {16: 13, 32: 28, 64: 56}

MEAN_ROWS = {4: _FEW_BITS, 8: _FEW_BITS, 16: {16: 5, 32: 16, 64: 40}}
"""By the bits, rows of an expert, on average, up to which a block holds so many; beyond, 128."""

MOST_ROWS = 128

SYMBOLIC_ROWS = {4: 32, 8: 32, 16: 64}
"""By the bits, rows of a block where their number is a symbol."""

SMALL_ROWS = 32
"""Rows of a block at most on GPUs with less shared memory."""


@triton.jit
def _rows_of(inside, first, SIZE: tl.constexpr, GATED: tl.constexpr):
    """Rows of a weight by their place in a tile, and which exist: all in turn, or of 16 8 of the
    gate and 8 of up, from ``first`` on. A warp of the matrix unit has 16."""
    if GATED:
        unit = first + inside // 16 * 8 + inside % 8
        given = unit < SIZE // 2
        row = unit + inside // 8 % 2 * (SIZE // 2)
    else:
        row = first + inside
        given = row < SIZE
    return tl.where(given, row, 0).to(tl.int64), given


@triton.jit
def _multiply_bf16(
    weight, x,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, TOKENS]: products of addresses [ROWS, 1] of a weight's rows with those of
    ``x`` [TOKENS, 1], each with which rows exist."""
    rows, given = weight
    x_rows, x_given = x
    k = tl.arange(0, STEP)[None, :]
    sums = tl.zeros((ROWS, x_rows.shape[0]), tl.float32)
    for first in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        if MASKED:
            there = first + k < WIDTH
            tile = tl.load(rows + first + k, mask=given & there, other=0.0)
            x_tile = tl.load(x_rows + first + k, mask=x_given & there, other=0.0)
        else:
            tile = tl.load(rows + first + k)
            x_tile = tl.load(x_rows + first + k, mask=x_given, other=0.0)
        sums = multiply_add(tile, tl.trans(x_tile), sums)
    return sums


@triton.jit
def _expert_sums(
    weight, scale, x, expert, first,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Products of rows of an expert's weight, [SIZE, WIDTH], with rows of ``x``."""
    codes, code_expert_stride, code_row_stride = weight
    scales, scale_expert_stride, scale_row_stride, scale_stride = scale
    ROWS: tl.constexpr = TILE[0]
    WARPS: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    MASKED: tl.constexpr = TILE[3]
    if BITS == 16:
        row, given = _rows_of(tl.arange(0, ROWS), first, SIZE, GATED)
        rows = codes + expert * code_expert_stride + row[:, None] * code_row_stride
        return _multiply_bf16((rows, given[:, None]), x, ROWS, WIDTH, TILE[4], STAGES, MASKED)
    row, given = _rows_of(tile_rows(ROWS, WARPS), first, SIZE, GATED)
    codes = codes + expert * code_expert_stride + row[:, None] * code_row_stride
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    scales = scales + expert * scale_expert_stride
    if BITS == 4:
        weight = (words, given[:, None], WIDTH // 8)
        scale = scales + row * scale_row_stride
        steps = (0, (WIDTH + 255) // 256)
        return multiply_fp4(weight, scale, x, steps, ROWS, WARPS, STAGES, MASKED)
    row, exists = _rows_of(tl.arange(0, ROWS), first, SIZE, GATED)  # as the sums have them
    return multiply_fp8(
        (words, given[:, None], WIDTH // 4),
        (scales + row // 128 * scale_row_stride, scale_stride, exists),
        x, (None, 0), (0, WIDTH // 128),
        ROWS, WARPS, STAGES, MASKED, ORDERED=True,
    )  # fmt: skip


@triton.jit
def _gate_up(
    x, weight, scale, out, place,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, HELD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of ``HELD`` rows: those of a block of ``TOKENS``, or of two from it on."""
    x, x_stride, topk = x
    out, out_stride = out
    sorted_rows, block, expert, first = place
    ROWS: tl.constexpr = TILE[0]
    slot = block.to(tl.int64) * TOKENS + tl.arange(0, HELD)
    row = tl.load(sorted_rows + slot)
    token = tl.where(row >= 0, row // topk, 0).to(tl.int64)
    x_rows = (x + token[:, None] * x_stride, (row >= 0)[:, None])
    sums = _expert_sums(
        weight, scale, x_rows, expert.to(tl.int64), first, 2 * SIZE, WIDTH, BITS, True, TILE
    )
    parts = tl.reshape(sums, (ROWS // 16, 2, 8, HELD))
    gate, up = tl.split(tl.permute(parts, (0, 2, 3, 1)))
    gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    act = tl.reshape(gate / (1 + tl.exp(-gate)) * up, (ROWS // 2, HELD))
    unit = first + tl.arange(0, ROWS // 2)
    unit = place_of(unit, BITS == 4) if BITS < 16 else unit
    tl.store(out + slot[None, :] * out_stride + unit[:, None], round_to_bf16(act))


@triton.jit
def gate_up_kernel(
    x, x_stride,
    topk, sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_stride,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, PAIR_TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * (TILE[0] // 2)
    expert = tl.load(expert_of_block + block)
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows, target = (x, x_stride, topk), (out, out_stride)
    if (expert >= 0) & (expert < PAIR):
        _gate_up(
            rows, weight, scale, target, (sorted_rows, block, expert, first),
            LIMIT, SIZE, WIDTH, BITS, TOKENS, TOKENS, TILE,
        )  # fmt: skip
    if PAIR_TILE is not None:
        if expert >= PAIR:
            _gate_up(
                rows, weight, scale, target, (sorted_rows, block, expert - PAIR, first),
                LIMIT, SIZE, WIDTH, BITS, TOKENS, 2 * TOKENS, PAIR_TILE,
            )  # fmt: skip


@triton.jit
def _down(
    x, weight, scale, out, place,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    HELD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of as many rows, whose products go to their places in ``out``."""
    x, x_stride = x
    sorted_rows, block, expert, first = place
    ROWS: tl.constexpr = TILE[0]
    slot = block.to(tl.int64) * TOKENS + tl.arange(0, HELD)
    row = tl.load(sorted_rows + slot)
    x_rows = (x + slot[:, None] * x_stride, (row >= 0)[:, None])
    sums = _expert_sums(
        weight, scale, x_rows, expert.to(tl.int64), first, SIZE, WIDTH, BITS, False, TILE
    )
    column = first + tl.arange(0, ROWS)[None, :]
    target = out + row.to(tl.int64)[:, None] * SIZE + column
    tl.store(target, tl.trans(sums), mask=(row >= 0)[:, None] & (column < SIZE))


@triton.jit
def down_kernel(
    x, x_stride,
    sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, PAIR_TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * TILE[0]
    expert = tl.load(expert_of_block + block)
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    if (expert >= 0) & (expert < PAIR):
        _down(
            (x, x_stride), weight, scale, out, (sorted_rows, block, expert, first),
            SIZE, WIDTH, BITS, TOKENS, TOKENS, TILE,
        )  # fmt: skip
    if PAIR_TILE is not None:
        if expert >= PAIR:
            _down(
                (x, x_stride), weight, scale, out, (sorted_rows, block, expert - PAIR, first),
                SIZE, WIDTH, BITS, TOKENS, 2 * TOKENS, PAIR_TILE,
            )  # fmt: skip


def block_rows(num_rows: int, num_experts: int, bits: int) -> int:
    """Rows of a block."""
    if not isinstance(num_rows, int):
        return SYMBOLIC_ROWS[bits]
    mean = num_rows / num_experts
    return next((rows for rows, most in MEAN_ROWS[bits].items() if mean <= most), MOST_ROWS)


def experts(
    launch: Launcher,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    *,
    swiglu_limit: float,
    activations: str,
    impl: str = "auto",
) -> torch.Tensor:
    num_tokens, topk = topk_ids.shape
    num_experts, rows, _ = (int(size) for size in gate_up.shape)
    width, size, num_rows = int(x.shape[1]), rows // 2, num_tokens * topk
    if num_rows == 0:
        return x.new_zeros((num_tokens, width))
    bits = _BITS.get(gate_up.dtype, 4)
    tokens = block_rows(num_rows, num_experts, bits)
    if launch.capability(x.device) not in (None, *_LARGE_SHARED):
        tokens = min(tokens, SMALL_ROWS)
    tile = TILES[bits][tokens]
    stages = PAIR_STAGES.get((bits, tokens), 0)
    plan = expert_plan(
        launch, topk_ids, num_experts=num_experts, block_size=tokens, pairs=stages > 0
    )
    capacity = plan.expert_of_block.shape[0]
    step = STEPS[tokens] if bits == 16 else step_of(bits == 4)
    padded = round_up(size, max(step, WEIGHT_BLOCK))
    act = x.new_empty((capacity * tokens, padded))
    ordered = _ordered(bf16_activations(x, activations), bits)
    tiles = padded // (tile[0] // 2)
    masked = padded != size or width % step != 0
    launch(gate_up_kernel)[capacity * tiles,](
        ordered, ordered.stride(0),
        topk, plan.sorted_rows, plan.expert_of_block,
        *_addressed(gate_up, gate_up_scale, bits),
        act, padded,
        LIMIT=float(swiglu_limit), SIZE=size, WIDTH=width, BITS=bits, TOKENS=tokens,
        **_tiles(tile, stages, masked, step), TILES=tiles, num_warps=tile[1],
    )  # fmt: skip
    if activations == "fp8" and can_round(launch.capability(x.device)):
        round_rows(launch, act, plan.sorted_rows)
    else:
        act = bf16_activations(act, activations)
    out = x.new_empty((num_rows, width), dtype=torch.float32)
    tiles = triton.cdiv(width, tile[0])
    masked = width % tile[0] != 0 or size % step != 0
    launch(down_kernel)[capacity * tiles,](
        act, padded,
        plan.sorted_rows, plan.expert_of_block,
        *_addressed(down, down_scale, bits),
        out,
        SIZE=width, WIDTH=size, BITS=bits, TOKENS=tokens,
        **_tiles(tile, stages, masked, step), TILES=tiles, num_warps=tile[1],
    )  # fmt: skip
    return combine(out.view(num_tokens, topk, width), topk_weights, topk_ids, gate_up, x)


def _tiles(
    tile: tuple[int, int, int], stages: int, masked: bool, step: int
) -> dict[str, tuple[Any, ...] | None]:
    """Of a program of one block and, with ``stages``, of one that has two."""
    rest = (masked, step)
    return {"TILE": (*tile, *rest), "PAIR_TILE": (*tile[:2], stages, *rest) if stages else None}


def _ordered(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Activations in the order of K in which kernels multiply them, with dense rows."""
    if bits < 16:
        return reordered(x, bits == 4)
    return x if x.stride(1) == 1 else x.contiguous()


def _addressed(weight: torch.Tensor, scale: torch.Tensor | None, bits: int) -> tuple[Any, ...]:
    """A weight and its scales as kernels take them, each with its strides."""
    if scale is None:
        weight = weight if weight.stride(2) == 1 else weight.contiguous()
        return (weight, *weight.stride()[:2], weight, 0, 0, 0)
    weight, scale = byte_rows(weight), scale_rows(scale, bits == 4)
    return (weight, *weight.stride()[:2], scale, *scale.stride())

"""The two products of routed experts, whose weights are read once for each block of rows, or for
two."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import WEIGHT_BLOCK, round_up
from dsv4_ops.kernels.common.dequant_gemm import (
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
from dsv4_ops.kernels.common.fp4_codes import (  # by name: Inductor copies kernels
    code_offset,
    has_nan,
    multiply_fp4_codes,
    multiply_fp4_codes_by_blocks,
    ordered_codes,
    scale_offset,
)
from dsv4_ops.kernels.common.fp8 import (
    multiply_add,
    round_to,
    round_to_bf16,
)
from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.experts.activations import (
    can_round,
    order_scales,
    quantize_ordered,
    round_rows,
)
from dsv4_ops.kernels.experts.plan import PAIR, expert_plan
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.linear.block_gemm import CAPABILITY
from dsv4_ops.reference.experts import combine
from dsv4_ops.reference.linear import quantized

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

LISTED, PART = 128, 16
"""Programs that one looks through for those whose scales were out of reach, and rows that it
multiplies at a time: kernels of their own, so that the others need no registers for those."""

_LARGE_SHARED = ((9, 0), (10, 0), (10, 3))
"""GPUs with as much."""

_BITS = {torch.float8_e4m3fn: 8, torch.bfloat16: 16}
"""Of a value of a weight; other dtypes hold FP4."""

_FEW_BITS = {16: 13, 32: 28, 64: 56}

MEAN_ROWS = {4: _FEW_BITS, 8: _FEW_BITS, 16: {16: 5, 32: 16, 64: 40}}
"""By the bits, rows of an expert, on average, up to which a block holds so many; beyond, 128."""

MOST_ROWS = 128

CODE_ROWS, CODE_TILE, CODE_PAIR_STAGES = 32, (64, 4, 4), 3
"""Rows of a block of FP4 whose activations are multiplied as codes, its ``TILES`` and
``PAIR_STAGES``: 59 and 67 KB and at most 168 registers, so that three programs fit an SM."""

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
    weight, scale, x, x_scale, expert, first,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr, CODES: tl.constexpr, BY_BLOCKS: tl.constexpr, TILE: tl.constexpr,
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
    if CODES:  # or Triton might load fewer bytes at a time, and pack other words
        codes = tl.multiple_of(codes, [16, 16])
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    scales = scales + expert * scale_expert_stride
    if BITS == 4:
        weight = (words, given[:, None], WIDTH // 8)
        scale = scales + row * scale_row_stride
        steps = (0, (WIDTH + 255) // 256)
        if BY_BLOCKS:
            return multiply_fp4_codes_by_blocks(
                weight, scale, x, x_scale, steps, ROWS, WARPS, MASKED
            )
        elif CODES:
            return multiply_fp4_codes(
                weight, scale, x, x_scale, steps, ROWS, WARPS, STAGES, MASKED, TOKENS
            )
        else:  # Triton would compile what is behind a branch that returns
            return multiply_fp4(weight, scale, x, steps, ROWS, WARPS, STAGES, MASKED)
    row, exists = _rows_of(tl.arange(0, ROWS), first, SIZE, GATED)  # as the sums have them
    return multiply_fp8(
        (words, given[:, None], WIDTH // 4),
        (scales + row // 128 * scale_row_stride, scale_stride, exists),
        x, (None, 0), (0, WIDTH // 128),
        ROWS, WARPS, STAGES, MASKED, ORDERED=True,
    )  # fmt: skip


@triton.jit
def _rows_at(
    x, row, given, place,
    TOKENS: tl.constexpr, HELD: tl.constexpr, CODES: tl.constexpr, BY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows of activations and their scales, as products take them: those of a block, or of its
    places from one on."""
    x, x_stride, x_scale, scale_stride = x
    block, part = place
    block = tl.cast(block, tl.int64)
    rows = x + row.to(tl.int64)[:, None] * x_stride
    if CODES:
        rows = rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    if BY_BLOCKS:
        inside = part + tl.arange(0, HELD)
        scales = x_scale.to(tl.pointer_type(tl.int16), bitcast=True) + block * TOKENS
        scales += inside // TOKENS * TOKENS + scale_offset(inside % TOKENS, TOKENS)
        return (rows, given[:, None]), (scales, 2 * scale_stride)
    else:
        return (rows, given[:, None]), (x_scale + block * (TOKENS // 2), scale_stride)


@triton.jit
def _gate_up(
    x, weight, scale, out, place,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, CODES: tl.constexpr, BY_BLOCKS: tl.constexpr, HELD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A tile of ``HELD`` rows: those of a block of ``TOKENS``, of two from it on, or of a part of
    one. Returns the products, gates and ups."""
    x, topk = x
    out, out_stride = out
    sorted_rows, block, part, expert, first = place
    ROWS: tl.constexpr = TILE[0]
    slot = tl.cast(block, tl.int64) * TOKENS + part + tl.arange(0, HELD)
    row = tl.load(sorted_rows + slot)
    token = tl.where(row >= 0, row // topk, 0)
    rows, of_rows = _rows_at(x, token, row >= 0, (block, part), TOKENS, HELD, CODES, BY_BLOCKS)
    sums = _expert_sums(
        weight, scale, rows, of_rows, expert.to(tl.int64), first,
        2 * SIZE, WIDTH, BITS, True, TOKENS, CODES, BY_BLOCKS, TILE,
    )  # fmt: skip
    parts = tl.reshape(sums, (ROWS // 16, 2, 8, HELD))
    gate, up = tl.split(tl.permute(parts, (0, 2, 3, 1)))
    gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    act = tl.reshape(gate / (1 + tl.exp(-gate)) * up, (ROWS // 2, HELD))
    unit = first + tl.arange(0, ROWS // 2)
    if CODES:
        unit = code_offset(unit)
    elif BITS < 16:
        unit = place_of(unit, BITS == 4)
    tl.store(out + slot[None, :] * out_stride + unit[:, None], round_to_bf16(act))
    return sums


@triton.jit
def gate_up_kernel(
    x, x_stride, x_scale, x_scale_stride,
    topk, sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_stride, out_of_reach,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, CODES: tl.constexpr, TILE: tl.constexpr, PAIR_TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Multiply gates and ups. With ``CODES``, write which programs met NaN, which
    ``gate_up_by_blocks_kernel`` does again, to ``out_of_reach``."""
    block = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * (TILE[0] // 2)
    expert = tl.load(expert_of_block + block)
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows, target = ((x, x_stride, x_scale, x_scale_stride), topk), (out, out_stride)
    if CODES:
        tl.store(out_of_reach + tl.program_id(0), 0)
    if (expert >= 0) & (expert < PAIR):
        sums = _gate_up(
            rows, weight, scale, target, (sorted_rows, block, 0, expert, first),
            LIMIT, SIZE, WIDTH, BITS, TOKENS, CODES, False, TOKENS, TILE,
        )  # fmt: skip
        if CODES:
            tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(sums))
    if PAIR_TILE is not None:
        if expert >= PAIR:
            sums = _gate_up(
                rows, weight, scale, target, (sorted_rows, block, 0, expert - PAIR, first),
                LIMIT, SIZE, WIDTH, BITS, TOKENS, CODES, False, 2 * TOKENS, PAIR_TILE,
            )  # fmt: skip
            if CODES:
                tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(sums))


@triton.jit
def gate_up_by_blocks_kernel(
    x, x_stride, x_scale, x_scale_stride,
    topk, sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_stride, out_of_reach, num_programs,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Do programs of ``gate_up_kernel`` again that met NaN, ``PART`` rows at a time. Neighbours,
    which have the same rows, go to different programs."""
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows, target = ((x, x_stride, x_scale, x_scale_stride), topk), (out, out_stride)
    step = tl.num_programs(0)
    listed = tl.program_id(0) + tl.arange(0, LISTED) * step
    if tl.max(tl.load(out_of_reach + listed, mask=listed < num_programs, other=0)) > 0:
        for program in range(tl.program_id(0), num_programs, step):
            if tl.load(out_of_reach + program) > 0:
                block, first = program // TILES, program % TILES * (TILE[0] // 2)
                expert = tl.load(expert_of_block + block)
                held = tl.where(expert >= PAIR, 2 * TOKENS, TOKENS)
                expert = tl.where(expert >= PAIR, expert - PAIR, expert)
                for part in range(0, held, PART):
                    _gate_up(
                        rows, weight, scale, target, (sorted_rows, block, part, expert, first),
                        LIMIT, SIZE, WIDTH, 4, TOKENS, True, True, PART, TILE,
                    )  # fmt: skip


@triton.jit
def _down(
    x, weight, scale, out, place,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    CODES: tl.constexpr, BY_BLOCKS: tl.constexpr, HELD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of as many rows, whose products go to their places in ``out``."""
    sorted_rows, block, part, expert, first = place
    ROWS: tl.constexpr = TILE[0]
    slot = tl.cast(block, tl.int64) * TOKENS + part + tl.arange(0, HELD)
    given = tl.load(sorted_rows + slot) >= 0
    rows, of_rows = _rows_at(x, slot, given, (block, part), TOKENS, HELD, CODES, BY_BLOCKS)
    sums = _expert_sums(
        weight, scale, rows, of_rows, expert.to(tl.int64), first,
        SIZE, WIDTH, BITS, False, TOKENS, CODES, BY_BLOCKS, TILE,
    )  # fmt: skip
    # not the load from before, whose result would take registers in between
    row = tl.load(sorted_rows + slot, cache_modifier=".cg")
    column = first + tl.arange(0, ROWS)[:, None]
    target = out + row.to(tl.int64)[None, :] * SIZE + column
    values = round_to(sums, out.dtype.element_ty)
    tl.store(target, values, mask=(row >= 0)[None, :] & (column < SIZE))
    return sums


@triton.jit
def down_kernel(
    x, x_stride, x_scale, x_scale_stride,
    sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_of_reach,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    CODES: tl.constexpr, TILE: tl.constexpr, PAIR_TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Multiply by the second weight, as ``gate_up_kernel`` does by the first."""
    block = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * TILE[0]
    expert = tl.load(expert_of_block + block)
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows = (x, x_stride, x_scale, x_scale_stride)
    if CODES:
        tl.store(out_of_reach + tl.program_id(0), 0)
    if (expert >= 0) & (expert < PAIR):
        sums = _down(
            rows, weight, scale, out, (sorted_rows, block, 0, expert, first),
            SIZE, WIDTH, BITS, TOKENS, CODES, False, TOKENS, TILE,
        )  # fmt: skip
        if CODES:
            tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(sums))
    if PAIR_TILE is not None:
        if expert >= PAIR:
            sums = _down(
                rows, weight, scale, out, (sorted_rows, block, 0, expert - PAIR, first),
                SIZE, WIDTH, BITS, TOKENS, CODES, False, 2 * TOKENS, PAIR_TILE,
            )  # fmt: skip
            if CODES:
                tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(sums))


@triton.jit
def down_by_blocks_kernel(
    x, x_stride, x_scale, x_scale_stride,
    sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_of_reach, num_programs,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Do programs of ``down_kernel`` again, as ``gate_up_by_blocks_kernel`` does."""
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows = (x, x_stride, x_scale, x_scale_stride)
    step = tl.num_programs(0)
    listed = tl.program_id(0) + tl.arange(0, LISTED) * step
    if tl.max(tl.load(out_of_reach + listed, mask=listed < num_programs, other=0)) > 0:
        for program in range(tl.program_id(0), num_programs, step):
            if tl.load(out_of_reach + program) > 0:
                block, first = program // TILES, program % TILES * TILE[0]
                expert = tl.load(expert_of_block + block)
                held = tl.where(expert >= PAIR, 2 * TOKENS, TOKENS)
                expert = tl.where(expert >= PAIR, expert - PAIR, expert)
                for part in range(0, held, PART):
                    _down(
                        rows, weight, scale, out, (sorted_rows, block, part, expert, first),
                        SIZE, WIDTH, 4, TOKENS, True, True, PART, TILE,
                    )  # fmt: skip


class Blocks(NamedTuple):
    """How rows are divided among programs.

    Args:
        rows: Rows of a block.
        tile: Rows of the weight per program, warps, and steps under way.
        stages: Steps under way of a program of two blocks; 0 without any.
        codes: Whether FP8 codes are multiplied, and not the values that they stand for.
    """

    rows: int
    tile: tuple[int, int, int]
    stages: int
    codes: bool


def blocks_of(
    num_rows: int, num_experts: int, bits: int, *, codes: bool = False, most: int = MOST_ROWS
) -> Blocks:
    """Of ``num_rows`` rows of all experts; ``codes`` if codes can be multiplied."""
    rows = SYMBOLIC_ROWS[bits]
    if isinstance(num_rows, int):
        mean = num_rows / num_experts
        rows = next((held for held, limit in MEAN_ROWS[bits].items() if mean <= limit), MOST_ROWS)
    if codes and rows >= CODE_ROWS:
        return Blocks(CODE_ROWS, CODE_TILE, CODE_PAIR_STAGES, True)
    rows = min(rows, most)
    return Blocks(rows, TILES[bits][rows], PAIR_STAGES.get((bits, rows), 0), False)


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
    capability = launch.capability(x.device)
    blocks = blocks_of(
        num_rows,
        num_experts,
        bits,
        codes=activations == "fp8" and _multiplies_codes(launch, gate_up, down, bits, capability),
        most=MOST_ROWS if capability in (None, *_LARGE_SHARED) else SMALL_ROWS,
    )
    tokens, tile = blocks.rows, blocks.tile
    plan = expert_plan(
        launch, topk_ids, num_experts=num_experts, block_size=tokens, pairs=blocks.stages > 0
    )
    capacity = plan.expert_of_block.shape[0]
    step = STEPS[tokens] if bits == 16 else step_of(bits == 4)
    padded = round_up(size, max(step, WEIGHT_BLOCK))
    act = x.new_empty((capacity * tokens, padded))
    tiles = padded // (tile[0] // 2)
    masked = padded != size or width % step != 0
    arguments = (
        *_inputs(launch, x, activations, bits, topk, plan.sorted_rows, blocks),
        topk, plan.sorted_rows, plan.expert_of_block,
        *_addressed(gate_up, gate_up_scale, bits),
        act, padded,
    )  # fmt: skip
    sizes = {"LIMIT": float(swiglu_limit), "SIZE": size, "WIDTH": width}
    kernels = gate_up_kernel, gate_up_by_blocks_kernel
    _launch(
        launch, kernels, capacity * tiles, arguments, sizes, bits, blocks, (masked, step), tiles
    )
    # FP8 activations are rounded to 4 bits, their products to 8: half of what the sum has to read
    dtype = torch.bfloat16 if blocks.codes else torch.float32
    out = x.new_empty((num_rows, width), dtype=dtype)
    tiles = triton.cdiv(width, tile[0])
    masked = width % tile[0] != 0 or size % step != 0
    arguments = (
        *_between(launch, act, activations, plan.sorted_rows, blocks),
        plan.sorted_rows, plan.expert_of_block,
        *_addressed(down, down_scale, bits),
        out,
    )  # fmt: skip
    sizes = {"SIZE": width, "WIDTH": size}
    kernels = down_kernel, down_by_blocks_kernel
    _launch(
        launch, kernels, capacity * tiles, arguments, sizes, bits, blocks, (masked, step), tiles
    )
    return combine(out.view(num_tokens, topk, width), topk_weights, topk_ids, gate_up, x)


def _multiplies_codes(
    launch: Launcher,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bits: int,
    capability: tuple[int, int] | None,
) -> bool:
    """Whether kernels multiply FP4 by codes here: their code tiles need loads of 16 bytes.
    Addresses are not known while a graph is traced, and Inductor sees to them."""
    if bits != 4 or not (capability == CAPABILITY or (INTERPRETED and capability is None)):
        return False
    return launch.opaque_gluon or (launch.is_aligned(gate_up) and launch.is_aligned(down))


def _launch(
    launch: Launcher,
    kernels: tuple[Any, Any],
    programs: int,
    arguments: tuple[Any, ...],
    sizes: dict[str, Any],
    bits: int,
    blocks: Blocks,
    rest: tuple[bool, int],
    tiles: int,
) -> None:
    """Launch a product, and another kernel for those of its programs that met NaN."""
    kernel, exact_kernel = kernels
    row_scales = arguments[2]  # int32; nobody reads it without codes
    out_of_reach = row_scales.new_empty((programs,)) if blocks.codes else row_scales
    tile = (*blocks.tile, *rest)
    pair = (*blocks.tile[:2], blocks.stages, *rest) if blocks.stages else None
    launch(kernel)[programs,](
        *arguments, out_of_reach,
        **sizes, BITS=bits, TOKENS=blocks.rows, CODES=blocks.codes, TILE=tile, PAIR_TILE=pair,
        TILES=tiles, num_warps=blocks.tile[1],
    )  # fmt: skip
    if blocks.codes:
        launch(exact_kernel)[(programs + LISTED - 1) // LISTED,](
            *arguments, out_of_reach, programs,
            **sizes, TOKENS=blocks.rows, TILE=tile, TILES=tiles, LISTED=LISTED, PART=PART,
            num_warps=blocks.tile[1],
        )  # fmt: skip


def _inputs(
    launch: Launcher,
    x: torch.Tensor,
    activations: str,
    bits: int,
    topk: int,
    sorted_rows: torch.Tensor,
    blocks: Blocks,
) -> tuple[Any, ...]:
    """Return the rows that ``gate_up_kernel`` reads, and their scales, which it reads with codes
    only; each with a stride."""
    if blocks.codes:
        codes, scales = quantized(x)
        ordered = ordered_codes(codes)
        row_scales = order_scales(launch, scales, topk, sorted_rows, blocks.rows)
        return ordered, ordered.stride(0), row_scales, row_scales.stride(0)
    rows = _ordered(bf16_activations(x, activations), bits)
    return rows, rows.stride(0), sorted_rows, 0


def _between(
    launch: Launcher,
    act: torch.Tensor,
    activations: str,
    sorted_rows: torch.Tensor,
    blocks: Blocks,
) -> tuple[Any, ...]:
    """Do programs of ``down_kernel`` again, as ``gate_up_by_blocks_kernel`` does."""
    if blocks.codes:
        codes, row_scales = quantize_ordered(launch, act, sorted_rows, blocks.rows)
        return codes, codes.stride(0), row_scales, row_scales.stride(0)
    if activations == "fp8" and can_round(launch.capability(act.device)):
        round_rows(launch, act, sorted_rows)
    else:
        act = bf16_activations(act, activations)
    return act, act.stride(0), sorted_rows, 0


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

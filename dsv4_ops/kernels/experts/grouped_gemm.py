"""The two grouped GEMMs of routed experts. A program reads a tile of a weight once, for one or two
blocks of rows."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import WEIGHT_BLOCK, round_up
from dsv4_ops.core.types import ExpertPlan
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.dequant_gemm import (
    bf16_activations,
    byte_rows,
    multiply_fp4,
    multiply_fp8,
    reordered_offset,
    scale_rows,
    step_size,
    tile_rows,
)
from dsv4_ops.kernels.common.fp4_codes import (  # by name: Inductor copies no modules
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
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.experts.activations import (
    order_scales,
    quantize_ordered,
    round_rows,
)
from dsv4_ops.kernels.experts.combine import combine
from dsv4_ops.kernels.experts.plan import PAIR, expert_plan, plan_and_reorder
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.common import dense
from dsv4_ops.reference.linear import quantized

TILES = {
    4: {16: (64, 4, 3), 32: (128, 8, 3), 64: (64, 4, 3), 128: (128, 8, 3)},
    8: {16: (64, 4, 2), 32: (64, 4, 2), 64: (64, 4, 3), 128: (128, 8, 2)},
    16: {16: (64, 4, 4), 32: (64, 4, 4), 64: (128, 8, 3), 128: (256, 8, 3)},
}
"""Weight rows per program, warps and pipeline stages, keyed by the bits of a weight and then by the
rows of a block. With FP4 weights, blocks of 128, 64 and 32 rows need 226, 113 and 82 KB of shared
memory; with bf16 weights, blocks of 64 rows need 145 KB."""

PAIR_STAGES = {(4, 16): 2, (4, 32): 2, (8, 16): 2, (16, 16): 3, (16, 32): 3}
"""Pipeline stages of a program that reads a weight once for two blocks of an expert, keyed by
weight bits and rows per block. With so few stages, two blocks need no more shared memory than one
block, except with FP8 weights, for which two blocks need only 17 KB in all. With even routing, few
experts have two blocks, so few programs run with these stages."""

STEPS = {16: 128, 32: 128, 64: 128, 128: 64}
"""Columns of K per step with bf16 weights, keyed by the rows of a block."""

FLAGS, PART_ROWS = 128, 16
"""Number of flags that a program of a ``_by_blocks_kernel`` checks, and number of rows that it
multiplies at a time. These kernels are separate, so that the main kernels need fewer registers."""

_BITS = {torch.float8_e4m3fn: 8, torch.bfloat16: 16}
"""Bits of a weight, keyed by dtype. Weights of other dtypes are FP4."""

_NARROW_MEAN_ROWS = {16: 13, 32: 28, 64: 56}

MEAN_ROWS = {4: _NARROW_MEAN_ROWS, 8: _NARROW_MEAN_ROWS, 16: {16: 5, 32: 16, 64: 40}}
"""For each number of weight bits and each block size: the maximum mean number of rows per expert at
which this block size is chosen. With more rows than in any entry, the block size is MAX_ROWS."""

MAX_ROWS = 128

CODE_ROWS, CODE_TILE, CODE_PAIR_STAGES = 32, (64, 4, 4), 3
"""Block size, tile, and stages for two blocks, if kernels multiply codes. A program needs 59 KB of
shared memory, or 67 KB for two blocks, and at most 168 registers per thread, so an SM can run three
programs."""

SYMBOLIC_ROWS = {4: 32, 8: 32, 16: 64}
"""Block size for a symbolic number of rows, keyed by weight bits."""

ROWS_BY_SHARED = {226 * 1024: MAX_ROWS, 145 * 1024: 64, 0: 32}
"""Maximum block size, keyed by the shared memory per program, in bytes, that the GPU must allow."""


@triton.jit
def _weight_rows(offset, n_start, SIZE: tl.constexpr, GATED: tl.constexpr):
    """Return the weight rows at the offsets of a tile, and which of them exist. With GATED, 8 gate
    rows alternate with the 8 up rows that match them, so that a warp, which computes 16 rows, has
    both."""
    if GATED:
        unit = n_start + offset // 16 * 8 + offset % 8
        mask = unit < SIZE // 2
        row = unit + offset // 8 % 2 * (SIZE // 2)
    else:
        row = n_start + offset
        mask = row < SIZE
    return tl.where(mask, row, 0).to(tl.int64), mask


@triton.jit
def _multiply_bf16(
    weight, x,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return the product of weight rows and activations, float32 [ROWS, COLUMNS]. ``weight`` and
    ``x`` hold addresses, [ROWS, 1] and [COLUMNS, 1], and masks of the rows that exist."""
    rows, row_mask = weight
    x_rows, x_mask = x
    k = tl.arange(0, STEP)[None, :]
    acc = tl.zeros((ROWS, x_rows.shape[0]), tl.float32)
    for k_start in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        if MASKED:
            k_mask = k_start + k < WIDTH
            tile = tl.load(rows + k_start + k, mask=row_mask & k_mask, other=0.0)
            x_tile = tl.load(x_rows + k_start + k, mask=x_mask & k_mask, other=0.0)
        else:
            tile = tl.load(rows + k_start + k)
            x_tile = tl.load(x_rows + k_start + k, mask=x_mask, other=0.0)
        acc = multiply_add(tile, tl.trans(x_tile), acc)
    return acc


@triton.jit
def _expert_gemm(
    weight, scale, x, x_scale, expert, n_start,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr, CODES: tl.constexpr, BY_BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the product of a tile of an expert's weight [SIZE, WIDTH] and rows of ``x``."""
    codes, code_expert_stride, code_row_stride = weight
    scales, scale_expert_stride, scale_row_stride, scale_stride = scale
    ROWS: tl.constexpr = TILE[0]
    WARPS: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    MASKED: tl.constexpr = TILE[3]
    STEP: tl.constexpr = TILE[4]
    if BITS == 16:
        row, mask = _weight_rows(tl.arange(0, ROWS), n_start, SIZE, GATED)
        rows = codes + expert * code_expert_stride + row[:, None] * code_row_stride
        return _multiply_bf16((rows, mask[:, None]), x, ROWS, WIDTH, STEP, STAGES, MASKED)
    row, mask = _weight_rows(tile_rows(ROWS, WARPS), n_start, SIZE, GATED)
    codes = codes + expert * code_expert_stride + row[:, None] * code_row_stride
    if CODES:  # _code_tile packs adjacent words, so Triton must load 16 bytes at a time
        codes = tl.multiple_of(codes, [16, 16])
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    scales = scales + expert * scale_expert_stride
    if BITS == 4:
        weight = (words, mask[:, None], WIDTH // 8)
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
        else:  # needed: Triton also compiles the code that follows a branch with ``return``
            return multiply_fp4(weight, scale, x, steps, ROWS, WARPS, STAGES, MASKED)
    row, row_mask = _weight_rows(tl.arange(0, ROWS), n_start, SIZE, GATED)  # rows of the product
    return multiply_fp8(
        (words, mask[:, None], WIDTH // 4),
        (scales + row // 128 * scale_row_stride, scale_stride, row_mask),
        x, (None, 0), (0, WIDTH // 128),
        ROWS, WARPS, STAGES, MASKED, ORDERED=True,
    )  # fmt: skip


@triton.jit
def _activation_rows(
    x, row, mask, block, start,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, CODES: tl.constexpr, BY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return ``x`` and ``x_scale`` for ``_expert_gemm``: the addresses of the activations, and of
    the scales of ``block``. With BY_BLOCKS, scales begin at row ``start`` of the block."""
    x, x_stride, x_scale, scale_stride = x
    block = tl.cast(block, tl.int64)
    rows = x + row.to(tl.int64)[:, None] * x_stride
    if CODES:
        rows = rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    if BY_BLOCKS:
        offset = start + tl.arange(0, COLUMNS)
        scales = x_scale.to(tl.pointer_type(tl.int16), bitcast=True) + block * TOKENS
        scales += offset // TOKENS * TOKENS + scale_offset(offset % TOKENS, TOKENS)
        return (rows, mask[:, None]), (scales, 2 * scale_stride)
    else:
        return (rows, mask[:, None]), (x_scale + block * (TOKENS // 2), scale_stride)


@triton.jit
def _gate_up(
    x, weight, scale, out, work,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, CODES: tl.constexpr, BY_BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute and store a tile of activations; return its product, whose rows are gates and ups.

    Args:
        x: Rows and their scales, each with a stride, and the experts per token.
        weight, scale: Weights and scales, with their strides.
        out: Activations and the stride of their rows.
        work: ``sorted_rows``, a block, the tile's first row in the block, the block's expert, and
            the tile's first unit.
        TOKENS: Rows of a block.
        COLUMNS: Rows of ``x`` in the tile: one block, two blocks, or part of a block.
        TILE: Weight rows, warps, stages, whether a tile reaches past the weight, and K per step.
    """
    x, topk = x
    out, out_stride = out
    sorted_rows, block, start, expert, n_start = work
    ROWS: tl.constexpr = TILE[0]
    slot = tl.cast(block, tl.int64) * TOKENS + start + tl.arange(0, COLUMNS)
    row = tl.load(sorted_rows + slot)
    token = tl.where(row >= 0, row // topk, 0)
    rows, row_scales = _activation_rows(
        x, token, row >= 0, block, start, TOKENS, COLUMNS, CODES, BY_BLOCKS
    )
    acc = _expert_gemm(
        weight, scale, rows, row_scales, expert.to(tl.int64), n_start,
        2 * SIZE, WIDTH, BITS, True, TOKENS, CODES, BY_BLOCKS, TILE,
    )  # fmt: skip
    parts = tl.reshape(acc, (ROWS // 16, 2, 8, COLUMNS))
    gate, up = tl.split(tl.permute(parts, (0, 2, 3, 1)))
    gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    act = tl.reshape(gate / (1 + tl.exp(-gate)) * up, (ROWS // 2, COLUMNS))
    unit = n_start + tl.arange(0, ROWS // 2)
    if CODES:
        unit = code_offset(unit)
    elif BITS < 16:
        unit = reordered_offset(unit, BITS == 4)
    tl.store(out + slot[None, :] * out_stride + unit[:, None], round_to_bf16(act))
    return acc


@triton.jit(do_not_specialize=SIZES)
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
    """Compute a tile of activations from gates and ups. With CODES, set the program's flag in
    ``out_of_reach`` if the product has a NaN. ``gate_up_by_blocks_kernel`` then recomputes the
    tile."""
    wait_for_previous_kernel()
    ROWS: tl.constexpr = TILE[0]
    block = tl.program_id(0) // TILES
    n_start = tl.program_id(0) % TILES * (ROWS // 2)
    expert = tl.load(expert_of_block + block)
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows, activations = ((x, x_stride, x_scale, x_scale_stride), topk), (out, out_stride)
    if CODES:
        tl.store(out_of_reach + tl.program_id(0), 0)
    if (expert >= 0) & (expert < PAIR):
        acc = _gate_up(
            rows, weight, scale, activations, (sorted_rows, block, 0, expert, n_start),
            LIMIT, SIZE, WIDTH, BITS, TOKENS, CODES, False, TOKENS, TILE,
        )  # fmt: skip
        if CODES:
            tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(acc))
    if PAIR_TILE is not None:
        if expert >= PAIR:
            acc = _gate_up(
                rows, weight, scale, activations, (sorted_rows, block, 0, expert - PAIR, n_start),
                LIMIT, SIZE, WIDTH, BITS, TOKENS, CODES, False, 2 * TOKENS, PAIR_TILE,
            )  # fmt: skip
            if CODES:
                tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(acc))


@triton.jit
def _any_flag(out_of_reach, num_programs, step, FLAGS: tl.constexpr):
    """Return whether any of this program's flags is set. The flags of a program are ``step`` apart,
    so that adjacent flags, whose tiles share activations, go to different programs."""
    flag = tl.program_id(0) + tl.arange(0, FLAGS) * step
    return tl.max(tl.load(out_of_reach + flag, mask=flag < num_programs, other=0)) > 0


@triton.jit(do_not_specialize=SIZES)
def gate_up_by_blocks_kernel(
    x, x_stride, x_scale, x_scale_stride,
    topk, sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_stride, out_of_reach, num_programs,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, FLAGS: tl.constexpr, PART_ROWS: tl.constexpr,
):  # fmt: skip
    """Recompute the tiles of ``gate_up_kernel`` whose flag is set, PART_ROWS rows at a time."""
    wait_for_previous_kernel()
    ROWS: tl.constexpr = TILE[0]
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows, activations = ((x, x_stride, x_scale, x_scale_stride), topk), (out, out_stride)
    step = tl.num_programs(0)
    if _any_flag(out_of_reach, num_programs, step, FLAGS):
        for program in range(tl.program_id(0), num_programs, step):
            if tl.load(out_of_reach + program) > 0:
                block, n_start = program // TILES, program % TILES * (ROWS // 2)
                expert = tl.load(expert_of_block + block)
                num_rows = tl.where(expert >= PAIR, 2 * TOKENS, TOKENS)
                expert = tl.where(expert >= PAIR, expert - PAIR, expert)
                for start in range(0, num_rows, PART_ROWS):
                    _gate_up(
                        rows, weight, scale, activations,
                        (sorted_rows, block, start, expert, n_start),
                        LIMIT, SIZE, WIDTH, 4, TOKENS, True, True, PART_ROWS, TILE,
                    )  # fmt: skip


@triton.jit
def _down(
    x, weight, scale, out, work,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    CODES: tl.constexpr, BY_BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product with the down weight, store each row of the result at its index
    in the batch, and return the tile. The arguments are as in ``_gate_up``, but ``x`` does not
    include the number of experts per token, and ``out`` includes no stride."""
    sorted_rows, block, start, expert, n_start = work
    ROWS: tl.constexpr = TILE[0]
    slot = tl.cast(block, tl.int64) * TOKENS + start + tl.arange(0, COLUMNS)
    mask = tl.load(sorted_rows + slot) >= 0
    rows, row_scales = _activation_rows(
        x, slot, mask, block, start, TOKENS, COLUMNS, CODES, BY_BLOCKS
    )
    acc = _expert_gemm(
        weight, scale, rows, row_scales, expert.to(tl.int64), n_start,
        SIZE, WIDTH, BITS, False, TOKENS, CODES, BY_BLOCKS, TILE,
    )  # fmt: skip
    # load the row indices again, because the first result would occupy registers during the product
    row = tl.load(sorted_rows + slot, cache_modifier=".cg")
    column = n_start + tl.arange(0, ROWS)[:, None]
    dst = out + row.to(tl.int64)[None, :] * SIZE + column
    values = round_to(acc, out.dtype.element_ty)
    tl.store(dst, values, mask=(row >= 0)[None, :] & (column < SIZE))
    return acc


@triton.jit(do_not_specialize=SIZES)
def down_kernel(
    x, x_stride, x_scale, x_scale_stride,
    sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_of_reach,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    CODES: tl.constexpr, TILE: tl.constexpr, PAIR_TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Multiply activations by the down weight. Set flags as ``gate_up_kernel`` does."""
    wait_for_previous_kernel()
    ROWS: tl.constexpr = TILE[0]
    block = tl.program_id(0) // TILES
    n_start = tl.program_id(0) % TILES * ROWS
    expert = tl.load(expert_of_block + block)
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows = (x, x_stride, x_scale, x_scale_stride)
    if CODES:
        tl.store(out_of_reach + tl.program_id(0), 0)
    if (expert >= 0) & (expert < PAIR):
        acc = _down(
            rows, weight, scale, out, (sorted_rows, block, 0, expert, n_start),
            SIZE, WIDTH, BITS, TOKENS, CODES, False, TOKENS, TILE,
        )  # fmt: skip
        if CODES:
            tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(acc))
    if PAIR_TILE is not None:
        if expert >= PAIR:
            acc = _down(
                rows, weight, scale, out, (sorted_rows, block, 0, expert - PAIR, n_start),
                SIZE, WIDTH, BITS, TOKENS, CODES, False, 2 * TOKENS, PAIR_TILE,
            )  # fmt: skip
            if CODES:
                tl.store(out_of_reach + tl.program_id(0), 1, mask=has_nan(acc))


@triton.jit(do_not_specialize=SIZES)
def down_by_blocks_kernel(
    x, x_stride, x_scale, x_scale_stride,
    sorted_rows, expert_of_block,
    codes, code_expert_stride, code_row_stride,
    scales, scale_expert_stride, scale_row_stride, scale_stride,
    out, out_of_reach, num_programs,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, FLAGS: tl.constexpr, PART_ROWS: tl.constexpr,
):  # fmt: skip
    """Recompute the tiles of ``down_kernel`` whose flag is set, PART_ROWS rows at a time."""
    wait_for_previous_kernel()
    ROWS: tl.constexpr = TILE[0]
    weight = (codes, code_expert_stride, code_row_stride)
    scale = (scales, scale_expert_stride, scale_row_stride, scale_stride)
    rows = (x, x_stride, x_scale, x_scale_stride)
    step = tl.num_programs(0)
    if _any_flag(out_of_reach, num_programs, step, FLAGS):
        for program in range(tl.program_id(0), num_programs, step):
            if tl.load(out_of_reach + program) > 0:
                block, n_start = program // TILES, program % TILES * ROWS
                expert = tl.load(expert_of_block + block)
                num_rows = tl.where(expert >= PAIR, 2 * TOKENS, TOKENS)
                expert = tl.where(expert >= PAIR, expert - PAIR, expert)
                for start in range(0, num_rows, PART_ROWS):
                    _down(
                        rows, weight, scale, out, (sorted_rows, block, start, expert, n_start),
                        SIZE, WIDTH, 4, TOKENS, True, True, PART_ROWS, TILE,
                    )  # fmt: skip


class Blocks(NamedTuple):
    """Division of rows among programs.

    Args:
        rows: Rows of a block.
        tile: Weight rows per program, warps and pipeline stages.
        stages: Pipeline stages of a program that computes two blocks; 0 if no program does.
        codes: Whether kernels multiply FP8 codes instead of values.
    """

    rows: int
    tile: tuple[int, int, int]
    stages: int
    codes: bool


class Activations(NamedTuple):
    """The arguments that a GEMM kernel takes for its activations and their scales. Only codes have
    scales; for values, ``scales`` is any int32 tensor."""

    rows: torch.Tensor
    stride: int
    scales: torch.Tensor
    scale_stride: int


def choose_blocks(
    num_rows: int, num_experts: int, bits: int, *, codes: bool = False, max_rows: int = MAX_ROWS
) -> Blocks:
    """Choose blocks for ``num_rows`` rows of all experts together. ``codes``: whether kernels can
    multiply codes."""
    rows = SYMBOLIC_ROWS[bits]
    if isinstance(num_rows, int):
        mean = num_rows / num_experts
        rows = next((rows for rows, limit in MEAN_ROWS[bits].items() if mean <= limit), MAX_ROWS)
    if codes and rows >= CODE_ROWS:
        return Blocks(CODE_ROWS, CODE_TILE, CODE_PAIR_STAGES, True)
    rows = min(rows, max_rows)
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
    shared: torch.Tensor | None = None,
    *,
    swiglu_limit: float,
    activations: str,
    impl: str = "auto",
) -> torch.Tensor:
    num_tokens, topk = topk_ids.shape
    num_experts, rows, _ = (int(size) for size in gate_up.shape)
    width, size, num_rows = int(x.shape[1]), rows // 2, num_tokens * topk
    if num_rows == 0:
        return x.new_zeros((num_tokens, width)) if shared is None else dense(shared)
    bits = _BITS.get(gate_up.dtype, 4)
    target = launch.target(x.device)
    blocks = choose_blocks(
        num_rows,
        num_experts,
        bits,
        codes=activations == "fp8" and _multiplies_codes(launch, gate_up, down, bits),
        max_rows=next(rows for least, rows in ROWS_BY_SHARED.items() if target.shared >= least),
    )
    tokens, (weight_rows, _, _) = blocks.rows, blocks.tile
    plan, inputs = _planned(launch, x, topk_ids, activations, bits, num_experts, blocks)
    capacity = plan.expert_of_block.shape[0]
    step = STEPS[tokens] if bits == 16 else step_size(bits == 4)
    padded = round_up(size, max(step, WEIGHT_BLOCK))
    act = x.new_empty((capacity * tokens, padded))
    tiles = padded // (weight_rows // 2)
    masked = padded != size or width % step != 0
    _launch_gemm(
        launch, (gate_up_kernel, gate_up_by_blocks_kernel), capacity * tiles,
        inputs,
        (
            topk, plan.sorted_rows, plan.expert_of_block,
            *_weight_arguments(gate_up, gate_up_scale, bits), act, padded,
        ),
        {"LIMIT": float(swiglu_limit), "SIZE": size, "WIDTH": width},
        bits, blocks, (masked, step), tiles,
    )  # fmt: skip
    # FP8 activations have 4 significant bits, so products may be rounded to bf16 before their sum
    dtype = torch.bfloat16 if blocks.codes else torch.float32
    out = x.new_empty((num_rows, width), dtype=dtype)
    tiles = triton.cdiv(width, weight_rows)
    masked = width % weight_rows != 0 or size % step != 0
    _launch_gemm(
        launch, (down_kernel, down_by_blocks_kernel), capacity * tiles,
        _down_inputs(launch, act, activations, plan.sorted_rows, blocks),
        (
            plan.sorted_rows, plan.expert_of_block,
            *_weight_arguments(down, down_scale, bits), out,
        ),
        {"SIZE": width, "WIDTH": size},
        bits, blocks, (masked, step), tiles,
    )  # fmt: skip
    return combine(launch, out, topk_weights, topk_ids, num_experts, shared)


def _multiplies_codes(
    launch: Launcher,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bits: int,
) -> bool:
    """Return whether kernels multiply FP4 weights as codes on this GPU. Such kernels need weights
    that are aligned to 16 bytes. A trace has no addresses, but Inductor aligns the inputs of a
    graph."""
    device = gate_up.device
    interpreted = INTERPRETED and launch.capability(device) is None
    if bits != 4 or not (launch.target(device).is_hopper or interpreted):
        return False
    return launch.opaque_gluon or (launch.is_aligned(gate_up) and launch.is_aligned(down))


def _launch_gemm(
    launch: Launcher,
    kernels: tuple[Any, Any],
    programs: int,
    inputs: Activations,
    arguments: tuple[Any, ...],
    sizes: dict[str, Any],
    bits: int,
    blocks: Blocks,
    steps: tuple[bool, int],
    tiles: int,
) -> None:
    """Launch a GEMM and, with codes, the kernel that recomputes tiles with NaN. ``steps`` holds two
    values: whether a tile reaches past the weight, and K per step."""
    kernel, by_blocks_kernel = kernels
    # without codes, kernels do not use the tensor
    out_of_reach = inputs.scales.new_empty((programs,)) if blocks.codes else inputs.scales
    rows, warps, _ = blocks.tile
    tile = (*blocks.tile, *steps)
    pair_tile = (rows, warps, blocks.stages, *steps) if blocks.stages else None
    launch(kernel)[programs,](
        *inputs, *arguments, out_of_reach,
        **sizes, BITS=bits, TOKENS=blocks.rows, CODES=blocks.codes, TILE=tile, PAIR_TILE=pair_tile,
        TILES=tiles, num_warps=warps,
    )  # fmt: skip
    if blocks.codes:
        launch(by_blocks_kernel)[(programs + FLAGS - 1) // FLAGS,](
            *inputs, *arguments, out_of_reach, programs,
            **sizes, TOKENS=blocks.rows, TILE=tile, TILES=tiles, FLAGS=FLAGS, PART_ROWS=PART_ROWS,
            num_warps=warps,
        )  # fmt: skip


def _planned(
    launch: Launcher,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    activations: str,
    bits: int,
    num_experts: int,
    blocks: Blocks,
) -> tuple[ExpertPlan, Activations]:
    """Return the plan, and the activations of the gate and up GEMM, with one row per token."""
    sizes = {"num_experts": num_experts, "block_size": blocks.rows, "pairs": blocks.stages > 0}
    if bits < 16 and not blocks.codes:
        rows = bf16_activations(x, activations)
        plan, rows = plan_and_reorder(launch, topk_ids, rows, fp4=bits == 4, **sizes)
        return plan, Activations(rows, rows.stride(0), plan.sorted_rows, 0)
    plan = expert_plan(launch, topk_ids, **sizes)
    if not blocks.codes:
        rows = x if x.stride(1) == 1 else x.contiguous()
        return plan, Activations(rows, rows.stride(0), plan.sorted_rows, 0)
    codes, scales = quantized(x)
    ordered, topk = ordered_codes(codes), int(topk_ids.shape[1])
    row_scales = order_scales(launch, scales, topk, plan.sorted_rows, blocks.rows)
    return plan, Activations(ordered, ordered.stride(0), row_scales, row_scales.stride(0))


def _down_inputs(
    launch: Launcher,
    act: torch.Tensor,
    activations: str,
    sorted_rows: torch.Tensor,
    blocks: Blocks,
) -> Activations:
    """Return the activations of the down GEMM, with one row per slot of the plan."""
    if blocks.codes:
        codes, row_scales = quantize_ordered(launch, act, sorted_rows, blocks.rows)
        return Activations(codes, codes.stride(0), row_scales, row_scales.stride(0))
    if activations == "fp8":
        round_rows(launch, act, sorted_rows)
    return Activations(act, act.stride(0), sorted_rows, 0)


def _weight_arguments(
    weight: torch.Tensor, scale: torch.Tensor | None, bits: int
) -> tuple[Any, ...]:
    """Return the kernels' arguments for a weight and its scales, each with its strides."""
    if scale is None:
        weight = weight if weight.stride(2) == 1 else weight.contiguous()
        return (weight, *weight.stride()[:2], weight, 0, 0, 0)
    weight, scale = byte_rows(weight), scale_rows(scale, bits == 4)
    return (weight, *weight.stride()[:2], scale, *scale.stride())

"""Quantise the activations of experts to FP8, in the order of a plan's slots. The result is codes
and scales, or bf16 values that FP8 codes represent exactly.

A plan has about twice as many slots as rows; the other slots are padding. In padding slots, values
are not written, and scales are 0.
"""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import ACTIVATION_BLOCK
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp4_codes import scale_offset
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    dequantize,
    quantize,
    widen,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

_BLOCK = tl.constexpr(ACTIVATION_BLOCK)


@triton.jit(do_not_specialize=SIZES)
def round_rows_kernel(
    rows, row_stride, sorted_rows,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Round one row in place. The order of values within a block of 128 does not matter."""
    wait_for_previous_kernel()
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(sorted_rows + slot) >= 0:
        block = tl.arange(0, BLOCKS)[:, None]
        offset = tl.arange(0, _BLOCK)[None, :]
        address = rows + slot * row_stride + block * _BLOCK + offset
        codes, scale = quantize(widen(tl.load(address, mask=block < COUNT, other=0.0)), CONVERTS)
        rounded = dequantize(codes, scale, CONVERTS).to(tl.bfloat16, bitcast=True)
        tl.store(address, rounded, mask=block < COUNT)


@triton.jit(do_not_specialize=SIZES)
def order_scales_kernel(
    scales, scale_stride, scale_block_stride,
    topk, sorted_rows,
    ordered, ordered_stride,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gather the scales of ``ROWS`` slots, [BLOCKS, ROWS], as bf16."""
    wait_for_previous_kernel()
    lane = tl.arange(0, ROWS)
    first_slot = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.load(sorted_rows + first_slot + lane)
    token = tl.where(row >= 0, row // topk, 0).to(tl.int64)
    block = tl.arange(0, BLOCKS)[:, None].to(tl.int64)
    src = scales + token[None, :] * scale_stride + block * scale_block_stride
    mask = (row >= 0)[None, :] & (block < COUNT)
    exponents = tl.load(src, mask=mask, other=0.0).to(tl.int32, bitcast=True) >> 16
    ordered = ordered.to(tl.pointer_type(tl.int16), bitcast=True)
    dst = ordered + block * (2 * ordered_stride) + first_slot + scale_offset(lane, ROWS)[None, :]
    tl.store(dst, exponents.to(tl.int16))


@triton.jit(do_not_specialize=SIZES)
def quantize_ordered_kernel(
    rows, row_stride, sorted_rows,
    codes, ordered, ordered_stride,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Quantise one row to codes, in the order of the row's values, and to bf16 scales."""
    wait_for_previous_kernel()
    slot = tl.program_id(0).to(tl.int64)
    has_row = tl.load(sorted_rows + slot) >= 0
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    mask = (block[:, None] < COUNT) & has_row
    values = widen(tl.load(rows + slot * row_stride + column, mask=mask, other=0.0))
    row_codes, scale = quantize(values, CONVERTS)
    tl.store(codes + slot * row_stride + column, row_codes, mask=mask)
    ordered = ordered.to(tl.pointer_type(tl.int16), bitcast=True)
    dst = ordered + block.to(tl.int64) * (2 * ordered_stride)
    dst += slot // ROWS * ROWS + scale_offset(slot % ROWS, ROWS)
    tl.store(dst, tl.where(has_row, scale << 7, 0).to(tl.int16), mask=block < COUNT)


def round_rows(launch: Launcher, rows: torch.Tensor, sorted_rows: torch.Tensor) -> None:
    """Round the bf16 ``rows`` of a plan's slots, in place, to values that FP8 codes can have."""
    count = rows.shape[1] // ACTIVATION_BLOCK
    launch(round_rows_kernel)[sorted_rows.shape[0],](
        rows, rows.stride(0), sorted_rows,
        COUNT=count, BLOCKS=triton.next_power_of_2(count),
        CONVERTS=launch.converts_codes(rows.device), num_warps=4,
    )  # fmt: skip


def order_scales(
    launch: Launcher, scales: torch.Tensor, topk: int, sorted_rows: torch.Tensor, rows: int
) -> torch.Tensor:
    """Return the bf16 scales of the tokens in a plan's slots, 0 for padding. The result has at
    least K // 128 rows of num_slots // 2 int32 values, each of which holds two scales. The plan has
    blocks of ``rows`` slots."""
    count = int(scales.shape[1])
    blocks = max(2, triton.next_power_of_2(count))  # a GEMM step reads the scales of two blocks
    ordered = sorted_rows.new_empty((blocks, sorted_rows.shape[0] // 2))
    launch(order_scales_kernel)[sorted_rows.shape[0] // rows,](
        scales, *scales.stride(), topk, sorted_rows, ordered, ordered.stride(0),
        COUNT=count, BLOCKS=blocks, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return ordered


def quantize_ordered(
    launch: Launcher, values: torch.Tensor, sorted_rows: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 codes of the bf16 ``values`` of a plan's slots, and scales in the order of
    ``order_scales``."""
    count = values.shape[1] // ACTIVATION_BLOCK
    codes = torch.empty_like(values, dtype=torch.uint8)
    ordered = sorted_rows.new_empty((count, sorted_rows.shape[0] // 2))
    launch(quantize_ordered_kernel)[sorted_rows.shape[0],](
        values, values.stride(0), sorted_rows, codes, ordered, ordered.stride(0),
        COUNT=count, BLOCKS=triton.next_power_of_2(count), ROWS=rows,
        CONVERTS=launch.converts_codes(values.device), num_warps=4,
    )  # fmt: skip
    return codes, ordered

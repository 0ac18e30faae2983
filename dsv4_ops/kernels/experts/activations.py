"""Activations of experts in FP8: codes and scales by the places of a plan, and those between both
products, rounded or as codes.

A plan has places for about twice as many rows as there are. The others are left as they are, but
their scales are 0.
"""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import ACTIVATION_BLOCK
from dsv4_ops.dispatch.choice import CODES_CAPABILITY
from dsv4_ops.kernels.common.fp4_codes import scale_offset
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels
    dequantize,
    quantize,
    widen,
)
from dsv4_ops.kernels.launcher import Launcher

_BLOCK = tl.constexpr(ACTIVATION_BLOCK)


@triton.jit
def round_rows_kernel(
    rows, row_stride, sorted_rows,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Round one row in place. The order of values within a block does not matter."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(sorted_rows + slot) >= 0:
        block = tl.arange(0, BLOCKS)[:, None]
        inside = tl.arange(0, _BLOCK)[None, :]
        place = rows + slot * row_stride + block * _BLOCK + inside
        codes, scale = quantize(widen(tl.load(place, mask=block < COUNT, other=0.0)))
        found = dequantize(codes, scale).to(tl.bfloat16, bitcast=True)
        tl.store(place, found, mask=block < COUNT)


@triton.jit
def order_scales_kernel(
    scales, scale_stride, scale_block_stride,
    topk, sorted_rows,
    ordered, ordered_stride,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The scales of a block of ``ROWS`` places, [BLOCKS, ROWS], in bf16."""
    inside = tl.arange(0, ROWS)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.load(sorted_rows + first + inside)
    token = tl.where(row >= 0, row // topk, 0).to(tl.int64)
    block = tl.arange(0, BLOCKS)[:, None].to(tl.int64)
    found = scales + token[None, :] * scale_stride + block * scale_block_stride
    given = (row >= 0)[None, :] & (block < COUNT)
    exponents = tl.load(found, mask=given, other=0.0).to(tl.int32, bitcast=True) >> 16
    ordered = ordered.to(tl.pointer_type(tl.int16), bitcast=True)
    target = ordered + block * (2 * ordered_stride) + first + scale_offset(inside, ROWS)[None, :]
    tl.store(target, exponents.to(tl.int16))


@triton.jit
def quantize_ordered_kernel(
    rows, row_stride, sorted_rows,
    codes, ordered, ordered_stride,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes of one row, whose values stay where they are, and its scales in bf16."""
    place = tl.program_id(0).to(tl.int64)
    given = tl.load(sorted_rows + place) >= 0
    block = tl.arange(0, BLOCKS)
    inside = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    there = (block[:, None] < COUNT) & given
    values = widen(tl.load(rows + place * row_stride + inside, mask=there, other=0.0))
    found, scale = quantize(values)
    tl.store(codes + place * row_stride + inside, found, mask=there)
    ordered = ordered.to(tl.pointer_type(tl.int16), bitcast=True)
    target = ordered + block.to(tl.int64) * (2 * ordered_stride)
    target += place // ROWS * ROWS + scale_offset(place % ROWS, ROWS)
    tl.store(target, tl.where(given, scale << 7, 0).to(tl.int16), mask=block < COUNT)


def can_round(capability: tuple[int, int] | None) -> bool:
    """Whether Triton converts e4m3 codes there; None is the interpreter, or AMD."""
    return torch.version.hip is None and (capability is None or capability >= CODES_CAPABILITY)


def round_rows(launch: Launcher, rows: torch.Tensor, sorted_rows: torch.Tensor) -> None:
    """Write the bf16 of codes and scales over the bf16 ``rows`` whose place in a plan is taken."""
    count = rows.shape[1] // ACTIVATION_BLOCK
    launch(round_rows_kernel)[sorted_rows.shape[0],](
        rows, rows.stride(0), sorted_rows,
        COUNT=count, BLOCKS=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip


def order_scales(
    launch: Launcher, scales: torch.Tensor, topk: int, sorted_rows: torch.Tensor, rows: int
) -> torch.Tensor:
    """int32 [K // 128, places // 2], pairs of bf16 scales: of the tokens at the places of a plan of
    blocks of ``rows``, and 0 where there are none."""
    count = int(scales.shape[1])
    blocks = max(2, triton.next_power_of_2(count))  # a step of products has two
    ordered = sorted_rows.new_empty((blocks, sorted_rows.shape[0] // 2))
    launch(order_scales_kernel)[sorted_rows.shape[0] // rows,](
        scales, *scales.stride(), topk, sorted_rows, ordered, ordered.stride(0),
        COUNT=count, BLOCKS=blocks, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return ordered


def quantize_ordered(
    launch: Launcher, values: torch.Tensor, sorted_rows: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes of the bf16 ``values`` at the places of a plan, and scales as ``order_scales``
    has them."""
    count = values.shape[1] // ACTIVATION_BLOCK
    codes = torch.empty_like(values, dtype=torch.uint8)
    ordered = sorted_rows.new_empty((count, sorted_rows.shape[0] // 2))
    launch(quantize_ordered_kernel)[sorted_rows.shape[0],](
        values, values.stride(0), sorted_rows, codes, ordered, ordered.stride(0),
        COUNT=count, BLOCKS=triton.next_power_of_2(count), ROWS=rows, num_warps=4,
    )  # fmt: skip
    return codes, ordered

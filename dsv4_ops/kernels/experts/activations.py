"""Round what the first product gives to the values of FP8 codes, where there are rows: a plan has
places for about twice as many."""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import ACTIVATION_BLOCK
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels
    dequantize,
    quantize,
    widen,
)
from dsv4_ops.kernels.launcher import Launcher

_BLOCK = tl.constexpr(ACTIVATION_BLOCK)

_LEAST = tl.constexpr(105)
"""Byte of the scale of a block with an amax of 1e-4, below which none is."""


@triton.jit
def round_rows_kernel(
    rows, row_stride, sorted_rows,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of one row, in place; whatever the order within a block."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(sorted_rows + slot) >= 0:
        block = tl.arange(0, BLOCKS)[:, None]
        inside = tl.arange(0, _BLOCK)[None, :]
        place = rows + slot * row_stride + block * _BLOCK + inside
        codes, scale = quantize(widen(tl.load(place, mask=block < COUNT, other=0.0)), _LEAST)
        found = dequantize(codes, scale).to(tl.bfloat16, bitcast=True)
        tl.store(place, found, mask=block < COUNT)


def round_rows(launch: Launcher, rows: torch.Tensor, sorted_rows: torch.Tensor) -> None:
    """Write the bf16 of codes and scales over the bf16 ``rows`` whose place in a plan is taken."""
    count = rows.shape[1] // ACTIVATION_BLOCK
    launch(round_rows_kernel)[sorted_rows.shape[0],](
        rows, rows.stride(0), sorted_rows,
        COUNT=count, BLOCKS=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip

"""Activations between both products of experts, rounded to what FP8 codes hold.

A plan has places for about twice as many rows as there are; the others are left as they are.
"""

import torch
import triton
import triton.language as tl

from dsv4_ops.core.layout import ACTIVATION_BLOCK
from dsv4_ops.dispatch.choice import CODES_CAPABILITY
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

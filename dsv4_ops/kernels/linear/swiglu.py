"""A product with FP8 weights that yields the gates and ups of a SwiGLU. The kernel that adds the
partial sums of the splits of K also computes the SwiGLU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import round_to_bf16, widen  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.linear.gemm import products

COLUMNS, WARPS = 256, 4
"""Values of the result per program, and warps per program."""


@triton.jit
def _total(src, mask, split_stride, SPLITS: tl.constexpr):
    """Add the partial sums at ``src``, in the order of the splits, and round the total."""
    acc = tl.zeros((src.shape[0],), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += widen(tl.load(src + split * split_stride, mask=mask, other=0.0))
    return widen(round_to_bf16(acc))


@triton.jit(do_not_specialize=SIZES)
def sum_and_swiglu_kernel(
    partial, out, num_tokens,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some values of a token from their gates and ups, which are SIZE columns apart."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    src = partial + token * (2 * SIZE) + column
    split_stride = tl.cast(num_tokens, tl.int64) * (2 * SIZE)
    gate = _total(src, mask, split_stride, SPLITS)
    up = _total(src + SIZE, mask, split_stride, SPLITS)
    gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    values = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * SIZE + column, round_to_bf16(values), mask=mask)


def fp8_linear_swiglu(
    launch: Launcher,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    swiglu_limit: float,
    activations: str,
) -> Tensor:
    num_tokens, size = x.shape[0], int(weight.shape[0]) // 2
    out = x.new_empty((num_tokens, size))
    if num_tokens == 0 or size == 0:
        return out
    partial = products(launch, x.unsqueeze(1), None, weight, scale, activations, torch.bfloat16)
    launch(sum_and_swiglu_kernel)[num_tokens, triton.cdiv(size, COLUMNS)](
        partial, out, num_tokens,
        SIZE=size, SPLITS=int(partial.shape[0]), LIMIT=float(swiglu_limit), COLUMNS=COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
    return out

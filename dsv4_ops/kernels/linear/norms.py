"""A product with FP8 weights. The result is two vectors per token, each normalised. The kernel that
adds the partial sums of the splits of K also normalises, because it has all values of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.types import NormedPair
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import round_to_bf16, widen  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.linear.gemm import products

WARPS = 8
"""Warps of a program. A program normalises one vector."""


@triton.jit
def _normed(
    row, weight, weight_stride, out, split_stride,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a vector, which begin at ``row``, in the order of the splits, and
    normalise the vector."""
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    factor = tl.load(weight + column * weight_stride, mask=mask, other=0.0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += widen(tl.load(row + split * split_stride + column, mask=mask, other=0.0))
    values = widen(round_to_bf16(acc))
    scale = tl.rsqrt(tl.sum(values * values) / WIDTH + EPS)
    tl.store(out + column, round_to_bf16(values * scale * factor), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def sum_and_norm_kernel(
    partial,
    first_norm, first_stride,
    second_norm, second_stride,
    first, second, num_tokens,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SPLITS: tl.constexpr, EPS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, SECOND_BLOCK: tl.constexpr,
):  # fmt: skip
    """Finish one of the two vectors of a token."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    row = partial + token * (FIRST + SECOND)
    split_stride = tl.cast(num_tokens, tl.int64) * (FIRST + SECOND)
    if tl.program_id(1) == 0:
        dst = first + token * FIRST
        _normed(row, first_norm, first_stride, dst, split_stride, FIRST, SPLITS, EPS, FIRST_BLOCK)
    else:
        dst = second + token * SECOND
        _normed(
            row + FIRST, second_norm, second_stride, dst, split_stride,
            SECOND, SPLITS, EPS, SECOND_BLOCK,
        )  # fmt: skip


def fp8_linear_norms(
    launch: Launcher,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    first_norm: Tensor,
    second_norm: Tensor,
    *,
    eps: float,
    activations: str,
) -> NormedPair:
    num_tokens, sizes = x.shape[0], (int(first_norm.shape[0]), int(second_norm.shape[0]))
    first, second = (x.new_empty((num_tokens, size)) for size in sizes)
    if num_tokens == 0:
        return NormedPair(first, second)
    partial = products(launch, x.unsqueeze(1), None, weight, scale, activations, torch.bfloat16)
    first_block, second_block = map(triton.next_power_of_2, sizes)
    launch(sum_and_norm_kernel)[num_tokens, 2](
        partial, *strided(first_norm, second_norm), first, second, num_tokens,
        FIRST=sizes[0], SECOND=sizes[1], SPLITS=int(partial.shape[0]), EPS=eps,
        FIRST_BLOCK=first_block, SECOND_BLOCK=second_block, num_warps=WARPS,
    )  # fmt: skip
    return NormedPair(first, second)

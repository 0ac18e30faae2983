"""Add the weighted results of a token's routed experts and the result of the shared expert, in one
kernel. Torch's own ops need eight launches if sizes are symbolic."""

import torch
import triton
import triton.language as tl

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import round_to_bf16, widen  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

COLUMNS, WARPS = 512, 4
"""Columns per program, and warps. A token of V4 Flash has eight programs."""


@triton.jit(do_not_specialize=SIZES)
def combine_experts_kernel(
    rows,
    topk_weights, weight_token_stride, weight_stride,
    topk_ids, id_token_stride, id_stride,
    shared, shared_token_stride, shared_stride,
    out, num_experts,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add some columns of a token. The rows of absent experts are not read."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    acc = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(topk_ids + token * id_token_stride + choice * id_stride)
        width = tl.where((expert >= 0) & (expert < num_experts), WIDTH, 0)
        weight = tl.load(topk_weights + token * weight_token_stride + choice * weight_stride)
        src = rows + (token * TOP_K + choice) * WIDTH + column
        values = widen(tl.load(src, mask=column < width, other=0.0))
        acc += tl.where(column < width, values * weight, 0.0)
    if HAS_SHARED:
        src = shared + token * shared_token_stride + column.to(tl.int64) * shared_stride
        acc += widen(tl.load(src, mask=mask, other=0.0))
    tl.store(out + token * WIDTH + column, round_to_bf16(acc), mask=mask)


def combine(
    launch: Launcher,
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Return bf16 [num_tokens, width] for rows [num_tokens * topk, width] in float32 or bf16."""
    (num_tokens, topk), width = topk_ids.shape, int(rows.shape[1])
    out = rows.new_empty((num_tokens, width), dtype=torch.bfloat16)
    launch(combine_experts_kernel)[num_tokens, triton.cdiv(width, COLUMNS)](
        rows, *strided(topk_weights, topk_ids),
        *((rows, 0, 0) if shared is None else strided(shared)),
        out, num_experts,
        WIDTH=width, TOP_K=int(topk), HAS_SHARED=shared is not None, COLUMNS=COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
    return out

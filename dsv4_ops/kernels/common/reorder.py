"""Put activations into the order of K in which kernels multiply FP4 and FP8 weights.

With symbolic sizes, a copy by torch's ``permute`` took 5 us on an H200, in a step of 128 requests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import round_up
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.dequant_gemm import (  # by name: Inductor copies no modules
    reorder_tile,
    step_size,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

CHUNK, WARPS = 1024, 4
"""Values per program of ``reorder_kernel``, and warps. A thread loads and stores 16 bytes of bf16.
128 rows of 4096 values are 512 programs, which run at the same time on 132 SMs."""


@triton.jit
def reorder_chunk(x, out, chunk, num_rows, REORDER: tl.constexpr):
    """Write one chunk of the result of ``reordered``. A chunk may span several rows.

    Args:
        x: The address of the activations, and the strides of tokens, groups and values.
        chunk: The chunk's index, as int64.
        REORDER: ``reorder_sizes``.
    """
    x, token_stride, group_stride, stride = x
    WIDTH: tl.constexpr = REORDER[0]
    PADDED: tl.constexpr = REORDER[1]
    GROUPS: tl.constexpr = REORDER[2]
    FP4: tl.constexpr = REORDER[3]
    VALUES: tl.constexpr = REORDER[4]
    first_row = chunk * VALUES // PADDED
    lane = tl.arange(0, VALUES)[None, :]
    place = (chunk * VALUES - first_row * PADDED).to(tl.int32) + lane
    row, k = first_row + place // PADDED, place % PADDED
    src = x + row // GROUPS * token_stride + row % GROUPS * group_stride + k.to(tl.int64) * stride
    values = tl.load(src, mask=(row < num_rows) & (k < WIDTH), other=0)
    tl.store(out + chunk * VALUES + lane, reorder_tile(values, FP4), mask=row < num_rows)


@triton.jit(do_not_specialize=SIZES)
def reorder_kernel(
    x, token_stride, group_stride, stride,
    out, num_rows,
    REORDER: tl.constexpr,
):  # fmt: skip
    """Reorder one chunk of the activations."""
    wait_for_previous_kernel()
    chunk = tl.program_id(0).to(tl.int64)
    reorder_chunk((x, token_stride, group_stride, stride), out, chunk, num_rows, REORDER)


def reorder_sizes(x: Tensor, fp4: bool, chunk: int) -> tuple[Any, ...]:
    """Return the values per row of ``x`` without and with padding, groups per token, whether
    weights are FP4, and the values per chunk."""
    width, groups = int(x.shape[-1]), int(x.shape[1]) if x.dim() == 3 else 1
    return (width, round_up(width, step_size(fp4)), groups, fp4, chunk)


def reordered(launch: Launcher, x: Tensor, fp4: bool) -> Tensor:
    """Return rows [num_tokens, k] or [num_tokens, num_groups, k] in the order in which kernels
    multiply them (``reordered_offset``), dense and padded with zeros to a step."""
    if launch.opaque_gluon and isinstance(x.shape[0], int):
        return _permuted(x, fp4)
    sizes = reorder_sizes(x, fp4, CHUNK)
    _, padded, groups, _, _ = sizes
    token_stride, *group_stride, stride = x.stride()
    out = x.new_empty((*x.shape[:-1], padded))
    num_rows = x.shape[0] * groups
    launch(reorder_kernel)[((num_rows * padded + CHUNK - 1) // CHUNK,)](
        x, token_stride, *(group_stride or (0,)), stride,
        out, num_rows,
        REORDER=sizes, num_warps=WARPS,
    )  # fmt: skip
    return out


def _permuted(x: Tensor, fp4: bool) -> Tensor:
    """Reorder with torch: in a graph of fixed sizes, Inductor fuses it with the previous op."""
    width, lead = int(x.shape[-1]), x.dim() - 1
    padding = round_up(width, step_size(fp4)) - width
    padded = torch.cat([x, x.new_zeros((*x.shape[:-1], padding))], -1) if padding else x
    parts: Tensor = padded.unflatten(-1, (-1, 4, 4, 2, 2 if fp4 else 1, 2))
    order = (lead, *(lead + dim for dim in (4, 2, 5, 1, 3)))
    return parts.permute(*range(lead), *order).reshape(padded.shape)

"""Expand the latents of the first ``num_valid`` rows into keys and values."""

import torch
import triton
import triton.language as tl

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    multiply_add,
    round_to,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

HALF_TILE, SINGLE_TILE = (128, 256, 64, 3, 8), (32, 64, 32, 2, 4)
"""Rows, columns, depth, stages and warps of a tile, for half precision and for float32."""

SIDE_BY_SIDE = 16
"""Number of row tiles whose programs run at the same time and share columns of the weight in the
L2."""


@triton.jit(do_not_specialize=SIZES)
def mla_expand_kernel(
    kv_c, row_stride, dim_stride,
    weight, head_stride, width_stride, depth_stride, num_valid,
    out,
    num_rows, columns, width, rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product of latents and weight. Result rows from ``num_valid`` on are
    zeros; a tile with only zero rows skips the product."""
    wait_for_previous_kernel()
    column_tiles = (columns + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // (column_tiles * SIDE_BY_SIDE)
    row_tiles = tl.minimum((num_rows + ROWS - 1) // ROWS - group * SIDE_BY_SIDE, SIDE_BY_SIDE)
    index = tl.program_id(0) % (column_tiles * SIDE_BY_SIDE)
    row = (group * SIDE_BY_SIDE + index % row_tiles) * ROWS + tl.arange(0, ROWS)
    column = index // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    stop = tl.minimum(tl.load(num_valid), num_rows)
    row_valid, column_valid = row < stop, column < columns
    # past the end, load the last row or column again, without a mask; its result is not stored
    left = kv_c + tl.minimum(row, num_rows - 1)[:, None].to(tl.int64) * row_stride
    clamped_column = tl.minimum(column, columns - 1)
    head, head_column = (clamped_column // width).to(tl.int64), clamped_column % width
    right = weight + (head * head_stride + head_column.to(tl.int64) * width_stride)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    depth = tl.where(tl.min(row) < stop, rank, 0)
    for first in tl.range(0, depth, DEPTH, num_stages=STAGES):
        dim = first + tl.arange(0, DEPTH)
        row_dims = left + dim[None, :].to(tl.int64) * dim_stride
        column_dims = right + dim[:, None].to(tl.int64) * depth_stride
        if EVEN:
            latents, weights = tl.load(row_dims), tl.load(column_dims)
        else:
            latents = tl.load(row_dims, mask=(dim < rank)[None, :], other=0.0)
            weights = tl.load(column_dims, mask=(dim < rank)[:, None], other=0.0)
        acc = multiply_add(latents, weights, acc)
    acc = tl.where(row_valid[:, None], acc, 0.0)
    result = round_to(acc, out.dtype.element_ty)
    target = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(target, result, mask=(row < num_rows)[:, None] & column_valid[None, :])


def mla_expand_kv(
    launch: Launcher, kv_c: torch.Tensor, w_kv_b: torch.Tensor, num_valid: torch.Tensor
) -> torch.Tensor:
    num_rows, rank = kv_c.shape[0], int(kv_c.shape[1])
    num_heads, width = int(w_kv_b.shape[0]), int(w_kv_b.shape[1])
    out = kv_c.new_empty((num_rows, num_heads, width))
    columns = num_heads * width
    if num_rows == 0 or columns == 0:
        return out
    tile = SINGLE_TILE if kv_c.dtype == torch.float32 else HALF_TILE
    rows, tile_columns, depth, stages, warps = tile
    launch(mla_expand_kernel)[((num_rows + rows - 1) // rows * -(-columns // tile_columns),)](
        *strided(kv_c, w_kv_b), num_valid,
        out, num_rows, columns, width, rank,
        ROWS=rows, COLUMNS=tile_columns, DEPTH=depth, STAGES=stages, EVEN=rank % depth == 0,
        SIDE_BY_SIDE=SIDE_BY_SIDE, num_warps=warps,
    )  # fmt: skip
    return out

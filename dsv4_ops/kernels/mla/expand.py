"""Expansion of latents into keys and values, for as many rows as there are."""

import torch
import triton
import triton.language as tl

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.fp8 import multiply_add, round_to  # by name: Inductor copies kernels
from dsv4_ops.kernels.launcher import Launcher

HALF_TILE, SINGLE_TILE = (128, 256, 64, 3, 8), (32, 64, 32, 2, 4)
"""Rows, columns and depth of a product, stages and warps: of half precision and of float32."""

SIDE_BY_SIDE = 16
"""Tiles of rows whose programs share the columns of the weight that are in the L2."""


@triton.jit
def mla_expand_kernel(
    kv_c, row_stride, dim_stride,
    weight, head_stride, width_stride, depth_stride, num_valid,
    out,
    num_rows, columns, width, rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    """A tile of the product of latents and weight; zeros from row ``num_valid`` on, which no
    product is computed for if the tile has no other."""
    across = (columns + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // (across * SIDE_BY_SIDE)
    height = tl.minimum((num_rows + ROWS - 1) // ROWS - group * SIDE_BY_SIDE, SIDE_BY_SIDE)
    place = tl.program_id(0) % (across * SIDE_BY_SIDE)
    row = (group * SIDE_BY_SIDE + place % height) * ROWS + tl.arange(0, ROWS)
    column = place // height * COLUMNS + tl.arange(0, COLUMNS)
    stop = tl.minimum(tl.load(num_valid), num_rows)
    there, inside = row < stop, column < columns
    # what is behind the end is read of the last one, without a mask, and not stored
    left = kv_c + tl.minimum(row, num_rows - 1)[:, None].to(tl.int64) * row_stride
    near = tl.minimum(column, columns - 1)
    head, of_head = (near // width).to(tl.int64), near % width
    right = weight + (head * head_stride + of_head.to(tl.int64) * width_stride)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
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
        sums = multiply_add(latents, weights, sums)
    sums = tl.where(there[:, None], sums, 0.0)
    result = round_to(sums, out.dtype.element_ty)
    target = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(target, result, mask=(row < num_rows)[:, None] & inside[None, :])


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
    rows, across, depth, stages, warps = tile
    launch(mla_expand_kernel)[((num_rows + rows - 1) // rows * -(-columns // across),)](
        *strided(kv_c, w_kv_b), num_valid,
        out, num_rows, columns, width, rank,
        ROWS=rows, COLUMNS=across, DEPTH=depth, STAGES=stages, EVEN=rank % depth == 0,
        SIDE_BY_SIDE=SIDE_BY_SIDE, num_warps=warps,
    )  # fmt: skip
    return out

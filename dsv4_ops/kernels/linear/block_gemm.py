"""Block-scaled GEMM of FP8 codes and FP8 weights, for many tokens. The matrix unit multiplies
codes. The sum over a block of 128 columns is multiplied by the block's two scales in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.dequant_gemm import byte_rows, scale_values
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    multiply_codes,
    round_to,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.launcher import Launcher

TOKENS, WARPS = 64, 4
"""Tokens and warps per program. An SM runs several such programs, so one program scales its sums
while other programs multiply. On an H200, V4's layer ``o_a`` with 1024 tokens takes 81 us; with
tiles of 128 x 128 and eight warps, it takes 92 us."""

ROWS, SMALL_ROWS = 128, 64
"""Weight rows per program: SMALL_ROWS if ROWS would leave SMs idle. All rows of a tile have the
same scales, because a scale is for 128 x 128 values."""

STAGES, LARGE_STAGES, LARGE_TOKENS = 4, 3, 512
"""Pipeline stages: STAGES for up to LARGE_TOKENS tokens, LARGE_STAGES for more tokens."""


@triton.jit(do_not_specialize=SIZES)
def fp8_block_kernel(
    x, token_stride, group_stride,
    x_scale, scale_group_stride, scale_block_stride, scale_token_stride,
    codes, code_row_stride,
    scales, scale_row_stride, scale_stride,
    out, num_tokens,
    SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of tokens and weight rows. Adjacent programs share weight rows."""
    wait_for_previous_kernel()
    TOKENS: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    token = tl.program_id(0) % token_tiles * TOKENS + tl.arange(0, TOKENS)
    n_start = tl.program_id(0) // token_tiles * ROWS
    group = n_start // GROUP_SIZE
    token_valid = token < num_tokens
    x_row = tl.where(token_valid, token, 0).to(tl.int64)
    row = (n_start + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, 128)[None, :]
    x_rows = x + x_row[:, None] * token_stride + group * group_stride + k
    x_rows = x_rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    token_scales = x_scale + x_row * scale_token_stride + group * scale_group_stride
    rows = codes + row[:, None] * code_row_stride + k
    rows = rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    row_scales = scales + n_start // 128 * scale_row_stride
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    for block in tl.range(0, WIDTH // 128, num_stages=STAGES):
        x_tile, tile = tl.load(x_rows + block * 128), tl.load(rows + block * 128)
        scale = tl.load(token_scales + block * scale_block_stride)
        scale *= scale_values(tl.load(row_scales + block * scale_stride))
        acc += multiply_codes(x_tile, tl.trans(tile)) * scale[:, None]
    dst = out + token.to(tl.int64)[:, None] * SIZE + row[None, :]
    tl.store(dst, round_to(acc, out.dtype.element_ty), mask=token_valid[:, None])


def is_supported(launch: Launcher, x: Tensor) -> bool:
    """Return whether ``x`` is on a Hopper GPU; the kernel was measured on no other GPU."""
    return INTERPRETED or launch.target(x.device).is_hopper


def choose_tile(num_tokens: int, rows: int, num_sms: int) -> tuple[int, int, int]:
    """Return tokens and weight rows per program, and pipeline stages."""
    if not isinstance(num_tokens, int):
        return TOKENS, ROWS, STAGES
    programs = triton.cdiv(num_tokens, TOKENS) * (rows // ROWS)
    stages = STAGES if num_tokens <= LARGE_TOKENS else LARGE_STAGES
    return TOKENS, ROWS if programs >= num_sms else SMALL_ROWS, stages


def multiply(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply codes [num_tokens, num_groups, in_features] by the weight rows of each group."""
    num_tokens, num_groups, width = x.shape[0], int(x.shape[1]), int(x.shape[2])
    rows = int(weight.shape[0])
    x = (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8)
    x_scale = x_scale.permute(1, 2, 0).contiguous()  # adjacent tokens are adjacent in memory
    codes, tile = byte_rows(weight), choose_tile(num_tokens, rows, launch.num_sms(x.device))
    tile_tokens, weight_rows, _ = tile
    out = x.new_empty((num_tokens, rows), dtype=out_dtype)
    programs = (num_tokens + tile_tokens - 1) // tile_tokens * (rows // weight_rows)
    launch(fp8_block_kernel)[programs,](
        x, *x.stride()[:2], x_scale, *x_scale.stride(),
        codes, codes.stride(0), *strided(scale),
        out, num_tokens,
        SIZE=rows, GROUP_SIZE=rows // num_groups, WIDTH=width, TILE=tile, num_warps=WARPS,
    )  # fmt: skip
    return out

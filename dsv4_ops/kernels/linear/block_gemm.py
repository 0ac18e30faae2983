"""Products of FP8 codes with FP8 weights for many tokens: the matrix unit multiplies codes, and the
sums of each block of 128 columns meet both scales in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dequant_gemm import byte_rows, scale_values
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels
    multiply_codes,
    round_to,
)
from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.launcher import Launcher

CAPABILITY = (9, 0)
"""Of the GPUs on which it was measured."""

TOKENS, WARPS = 64, 4
"""Of a program: several fit an SM, and one's sums meet their scales while others multiply. Eight
warps of 128 x 128 take 92 us where these take 81 (1024 tokens of V4's ``o_a``, an H200)."""

ROWS, FEWER_ROWS = 128, 64
"""Of a program; fewer where more would leave SMs idle. All are of one block of scales."""

STAGES, LARGE_STAGES, LARGE_TOKENS = 4, 3, 512
"""Blocks under way, and above so many tokens."""


@triton.jit
def fp8_block_kernel(
    x, token_stride, group_stride,
    x_scale, scale_group_stride, scale_block_stride, scale_token_stride,
    codes, code_row_stride,
    scales, scale_row_stride, scale_stride,
    out, num_tokens,
    SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs side by side share rows of the weight."""
    TOKENS: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    token = tl.program_id(0) % token_tiles * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(0) // token_tiles * ROWS
    group = first // GROUP_SIZE
    given = token < num_tokens
    at = tl.where(given, token, 0).to(tl.int64)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, 128)[None, :]
    x_rows = x + at[:, None] * token_stride + group * group_stride + k
    x_rows = x_rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    of_tokens = x_scale + at * scale_token_stride + group * scale_group_stride
    rows = codes + row[:, None] * code_row_stride + k
    rows = rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    of_rows = scales + first // 128 * scale_row_stride
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for block in tl.range(0, WIDTH // 128, num_stages=STAGES):
        tile, weight = tl.load(x_rows + block * 128), tl.load(rows + block * 128)
        factor = tl.load(of_tokens + block * scale_block_stride)
        factor *= scale_values(tl.load(of_rows + block * scale_stride))
        sums += multiply_codes(tile, tl.trans(weight)) * factor[:, None]
    target = out + token.to(tl.int64)[:, None] * SIZE + row[None, :]
    tl.store(target, round_to(sums, out.dtype.element_ty), mask=given[:, None])


def runs(launch: Launcher, x: Tensor) -> bool:
    """Whether such a GPU multiplies codes."""
    return INTERPRETED or launch.capability(x.device) == CAPABILITY


def tile_of(num_tokens: int, rows: int, num_sms: int) -> tuple[int, int, int]:
    """Tokens and rows of a program, and blocks under way."""
    if not isinstance(num_tokens, int):
        return TOKENS, ROWS, STAGES
    programs = triton.cdiv(num_tokens, TOKENS) * (rows // ROWS)
    stages = STAGES if num_tokens <= LARGE_TOKENS else LARGE_STAGES
    return TOKENS, ROWS if programs >= num_sms else FEWER_ROWS, stages


def multiply(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Products of codes [num_tokens, num_groups, in_features] with the rows of each group."""
    num_tokens, num_groups, width = x.shape[0], int(x.shape[1]), int(x.shape[2])
    rows = int(weight.shape[0])
    x = (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8)
    x_scale = x_scale.permute(1, 2, 0).contiguous()  # those of a step side by side
    codes, tile = byte_rows(weight), tile_of(num_tokens, rows, launch.num_sms(x.device))
    out = x.new_empty((num_tokens, rows), dtype=out_dtype)
    programs = (num_tokens + tile[0] - 1) // tile[0] * (rows // tile[1])
    launch(fp8_block_kernel)[programs,](
        x, *x.stride()[:2], x_scale, *x_scale.stride(),
        codes, codes.stride(0), *strided(scale),
        out, num_tokens,
        SIZE=rows, GROUP_SIZE=rows // num_groups, WIDTH=width, TILE=tile, num_warps=WARPS,
    )  # fmt: skip
    return out

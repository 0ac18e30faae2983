"""Products with FP8 weights for few tokens: the weight is read once, and K is split among
programs where rows of the weight are few."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import WEIGHT_BLOCK
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dequant_gemm import (
    bf16_activations,
    byte_rows,
    multiply_fp8,
    reordered,
    tile_rows,
)
from dsv4_ops.kernels.common.fp8 import round_to  # by name: Inductor copies kernels
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.linear import block_gemm
from dsv4_ops.reference.linear import quantized

FEW_TOKENS = 16
"""Tokens up to which programs reorder activations themselves."""

MOST_AS_BF16 = 32
"""Tokens up to which codes become bf16, as split rows of the weight are faster: 32 tokens of ``kv``
7.8 us for 12.6, 64 of ``q_b`` 34.5 for 14.0 (an H200). Of groups, up to ``FEW_TOKENS``."""

TILES = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (128, 8, 3)}
"""By the tokens of a program its rows of the weight, warps, and tiles of activations under way."""

PROGRAMS_PER_SM = {16: 4, 32: 4, 64: 2, 128: 1}
"""Programs that K is split for, by those tokens: partial sums cost the more, the more tokens."""

SUMS, SUM_WARPS = 256, 4
"""Values of a program that adds up splits: Inductor's own code takes 3.4 us for 2 MB, and 11 if a
SwiGLU follows."""

FEWEST_STEPS, MOST_SPLITS = 2, 16
"""Blocks of K of a split at least, and splits at most."""

SYMBOLIC_TOKENS, SYMBOLIC_SPLITS = 32, 4
"""Tokens of a tile, and splits at most, where tokens are a symbol: partial sums are of all."""


@triton.jit
def fp8_linear_kernel(
    x, token_stride, group_stride,
    x_scale, scale_token_stride, scale_group_stride, scale_block_stride,
    codes, code_row_stride,
    scales, scale_row_stride, scale_stride,
    out, num_tokens,
    SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr,
    SPLITS: tl.constexpr, ORDERED: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE[0]
    WARPS: tl.constexpr = TILE[1]
    token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    tile, part = tl.program_id(0) // token_tiles, tl.program_id(0) % token_tiles
    split, first = tile // (SIZE // ROWS), tile % (SIZE // ROWS) * ROWS
    token = part * TOKENS + tl.arange(0, TOKENS)
    given = token < num_tokens
    at = tl.where(given, token, 0).to(tl.int64)
    group = first // GROUP_SIZE
    row = (first + tile_rows(ROWS, WARPS)).to(tl.int64)
    words = (codes + row[:, None] * code_row_stride).to(tl.pointer_type(tl.int32), bitcast=True)
    x_rows = x + at[:, None] * token_stride + group * group_stride
    token_scale = (None, 0)
    if SCALED:
        x_rows = x_rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        of_tokens = x_scale + at * scale_token_stride + group * scale_group_stride
        token_scale = (of_tokens, scale_block_stride)
    STEPS: tl.constexpr = WIDTH // 128
    sums = multiply_fp8(
        (words, None, WIDTH // 4), (scales + row // 128 * scale_row_stride, scale_stride, row >= 0),
        (x_rows, given[:, None]), token_scale,
        (split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS),
        ROWS, WARPS, TILE[2], MASKED=False, ORDERED=ORDERED,
    )  # fmt: skip
    target = out + (split * num_tokens + token).to(tl.int64)[:, None] * SIZE
    target += first + tl.arange(0, ROWS)[None, :]
    values = round_to(tl.trans(sums), out.dtype.element_ty)
    tl.store(target, values, mask=given[:, None])


@triton.jit
def sum_splits_kernel(
    partial, out, size,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the splits of a product, in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = at < size
    sums = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(partial + split * tl.cast(size, tl.int64) + at, mask=given, other=0.0)
    tl.store(out + at, round_to(sums, out.dtype.element_ty), mask=given)


def tile_of(num_tokens: int, rows: int, steps: int, num_sms: int) -> tuple[int, int]:
    """Tokens of a program, and splits of K."""
    tokens, most, parts = SYMBOLIC_TOKENS, SYMBOLIC_SPLITS, 1
    if isinstance(num_tokens, int):
        tokens, most = min(128, max(16, triton.next_power_of_2(num_tokens))), MOST_SPLITS
        parts = triton.cdiv(num_tokens, tokens)
    splits = PROGRAMS_PER_SM[tokens] * num_sms * TILES[tokens][0] // (rows * parts)
    return tokens, max(1, min(splits, steps // FEWEST_STEPS, most))


def _linear(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Products of ``x`` [num_tokens, num_groups, in_features] with the rows of each group."""
    num_tokens, num_groups, width = x.shape[0], int(x.shape[1]), int(x.shape[2])
    rows = int(weight.shape[0])
    x = x if x.stride(-1) == 1 else x.contiguous()
    codes = byte_rows(weight)
    tokens, splits = tile_of(num_tokens, rows, width // WEIGHT_BLOCK, launch.num_sms(x.device))
    tile, scaled = TILES[tokens], x_scale is not None
    x = x.view(torch.uint8) if scaled else x
    x = reordered(x, False) if tokens > FEW_TOKENS else x
    dtype = out_dtype if splits == 1 else torch.float32
    out = x.new_empty((splits, num_tokens, rows), dtype=dtype)
    programs = splits * (rows // tile[0]) * ((num_tokens + tokens - 1) // tokens)
    launch(fp8_linear_kernel)[programs,](
        x, *x.stride()[:2],
        x_scale if scaled else scale, *(x_scale.stride() if scaled else (0, 0, 0)),
        codes, codes.stride(0), *strided(scale),
        out, num_tokens,
        SIZE=rows, GROUP_SIZE=rows // num_groups, WIDTH=width, SCALED=scaled, SPLITS=splits,
        ORDERED=tokens > FEW_TOKENS, TOKENS=tokens, TILE=tile, num_warps=tile[1],
    )  # fmt: skip
    if splits == 1:
        return out[0]
    total = x.new_empty((num_tokens, rows), dtype=out_dtype)
    size = num_tokens * rows
    launch(sum_splits_kernel)[((size + SUMS - 1) // SUMS,)](
        out, total, size, SPLITS=splits, BLOCK=SUMS, num_warps=SUM_WARPS
    )
    return total


def _multiplies_codes(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor | None,
    activations: str,
    out_dtype: torch.dtype,
) -> bool:
    """Whether activations [num_tokens, num_groups, in_features] are better multiplied as codes. The
    matrix unit sums those in some 14 bits, enough for a result in bf16."""
    if out_dtype != torch.bfloat16:
        return False
    num_tokens, codes = x.shape[0], x_scale is not None or activations == "fp8"
    most = MOST_AS_BF16 if int(x.shape[1]) == 1 else FEW_TOKENS
    many = not isinstance(num_tokens, int) or num_tokens > most
    return codes and many and block_gemm.runs(launch, x)


def _multiply(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    activations: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """By the kernel that is faster."""
    num_tokens, rows = x.shape[0], int(weight.shape[0])
    if num_tokens == 0 or rows == 0 or int(x.shape[2]) == 0:
        return x.new_zeros((num_tokens, rows), dtype=out_dtype)
    if _multiplies_codes(launch, x, x_scale, activations, out_dtype):
        codes, scales = quantized(x) if x_scale is None else (x, x_scale)
        return block_gemm.multiply(launch, codes, scales, weight, scale, out_dtype)
    x = x if x_scale is not None else bf16_activations(x, activations)
    return _linear(launch, x, x_scale, weight, scale, out_dtype)


def fp8_linear(
    launch: Launcher,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None = None,
    *,
    activations: str,
    out_dtype: torch.dtype,
    impl: str = "auto",
) -> Tensor:
    x_scale = None if x_scale is None else x_scale.unsqueeze(1)
    return _multiply(launch, x.unsqueeze(1), x_scale, weight, scale, activations, out_dtype)


def fp8_grouped_linear(
    launch: Launcher,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None = None,
    *,
    activations: str,
    out_dtype: torch.dtype,
    impl: str = "auto",
) -> Tensor:
    if x_scale is not None:
        x, x_scale = x.transpose(0, 1), x_scale.transpose(0, 1)
    return _multiply(launch, x, x_scale, weight, scale, activations, out_dtype)

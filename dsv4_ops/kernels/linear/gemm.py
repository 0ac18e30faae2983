"""GEMM with FP8 weights for few tokens. The weight is read once. If the weight has few rows, K is
split among programs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import WEIGHT_BLOCK
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.dequant_gemm import (
    bf16_activations,
    byte_rows,
    multiply_fp8,
    tile_rows,
)
from dsv4_ops.kernels.common.fp8 import round_to  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.reorder import reordered
from dsv4_ops.kernels.common.sizes import SIZES, SIZES_BUT_TOKENS
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.linear import block_gemm
from dsv4_ops.reference.linear import quantized

FEW_TOKENS = 16
"""Maximum number of tokens for which the programs of the GEMM reorder the activations themselves,
so that ``reordered`` is not called."""

MAX_BF16_TOKENS = 32
"""Maximum number of tokens for which codes are converted to bf16, with split-K. On an H200, the
layer ``kv`` with 32 tokens takes 7.8 us as bf16 and 12.6 us as codes; the layer ``q_b`` with 64
tokens takes 34.5 us as bf16 and 14.0 us as codes. In grouped layers, the maximum is FEW_TOKENS."""

MAX_CODE_TOKENS = 64
"""Maximum tokens per program if the program converts codes for ``mma.sync``. For 128 tokens the
conversion would spill 290 to 660 bytes of registers."""

TILES = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (128, 8, 3)}
"""Weight rows per program, warps and pipeline stages, keyed by the tokens per program."""

PROGRAMS_PER_SM = {16: 4, 32: 4, 64: 2, 128: 1}
"""Target number of programs per SM when K is split, keyed by the tokens per program. With more
tokens, partial sums are larger, so K has fewer splits."""

SUMS, SUM_WARPS = 256, 4
"""Values per program of the kernel that adds the splits of K, and warps. With this kernel in place
of Inductor's code, a shared expert takes 17 us instead of 30."""

MIN_STEPS, MAX_SPLITS = 2, 16
"""Minimum number of blocks of K per split, and maximum number of splits."""

SYMBOLIC_TOKENS, SYMBOLIC_SPLITS = 32, 4
"""Tokens per program and maximum splits for a symbolic batch. Splits are few, because each split
stores partial sums of the whole batch, and the batch may be large."""


@triton.jit(do_not_specialize=SIZES_BUT_TOKENS)
def fp8_linear_kernel(
    x, token_stride, group_stride,
    x_scale, scale_token_stride, scale_group_stride, scale_block_stride,
    codes, code_row_stride,
    scales, scale_row_stride, scale_stride,
    out, num_tokens,
    SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr,
    SPLITS: tl.constexpr, ORDERED: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of tokens and weight rows over one split of K."""
    wait_for_previous_kernel()
    ROWS: tl.constexpr = TILE[0]
    WARPS: tl.constexpr = TILE[1]
    STAGES: tl.constexpr = TILE[2]
    token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    tile, token_tile = tl.program_id(0) // token_tiles, tl.program_id(0) % token_tiles
    split, n_start = tile // (SIZE // ROWS), tile % (SIZE // ROWS) * ROWS
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    token_valid = token < num_tokens
    x_row = tl.where(token_valid, token, 0).to(tl.int64)
    group = n_start // GROUP_SIZE
    row = (n_start + tile_rows(ROWS, WARPS)).to(tl.int64)
    words = (codes + row[:, None] * code_row_stride).to(tl.pointer_type(tl.int32), bitcast=True)
    x_rows = x + x_row[:, None] * token_stride + group * group_stride
    token_scales = (None, 0)
    if SCALED:
        if CONVERTS:
            x_rows = x_rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        addresses = x_scale + x_row * scale_token_stride + group * scale_group_stride
        token_scales = (addresses, scale_block_stride)
    STEPS: tl.constexpr = WIDTH // 128
    acc = multiply_fp8(
        (words, None, WIDTH // 4), (scales + row // 128 * scale_row_stride, scale_stride, row >= 0),
        (x_rows, token_valid[:, None]), token_scales,
        (split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS),
        ROWS, WARPS, STAGES, MASKED=False, ORDERED=ORDERED,
    )  # fmt: skip
    dst = out + (split * num_tokens + token).to(tl.int64)[:, None] * SIZE
    dst += n_start + tl.arange(0, ROWS)[None, :]
    values = round_to(tl.trans(acc), out.dtype.element_ty)
    tl.store(dst, values, mask=token_valid[:, None])


@triton.jit(do_not_specialize=SIZES)
def sum_splits_kernel(
    partial, out, size,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a product, in the order of the splits."""
    wait_for_previous_kernel()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial + split * tl.cast(size, tl.int64) + index, mask=mask, other=0.0)
    tl.store(out + index, round_to(acc, out.dtype.element_ty), mask=mask)


def choose_tile(
    num_tokens: int, rows: int, steps: int, num_sms: int, max_tokens: int
) -> tuple[int, int]:
    """Return tokens per program, at most ``max_tokens``, and splits of K."""
    tokens, max_splits, token_tiles = SYMBOLIC_TOKENS, SYMBOLIC_SPLITS, 1
    if isinstance(num_tokens, int):
        tokens = min(max_tokens, max(16, triton.next_power_of_2(num_tokens)))
        max_splits = MAX_SPLITS
        token_tiles = triton.cdiv(num_tokens, tokens)
    weight_rows, _, _ = TILES[tokens]
    splits = PROGRAMS_PER_SM[tokens] * num_sms * weight_rows // (rows * token_tiles)
    return tokens, max(1, min(splits, steps // MIN_STEPS, max_splits))


def _multiply_as_bf16(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply ``x`` [num_tokens, num_groups, in_features] by the weight rows of each group, as
    bf16. Return the partial sums of the splits of K, in float32 if there are several splits."""
    num_tokens, num_groups, width = x.shape[0], int(x.shape[1]), int(x.shape[2])
    rows = int(weight.shape[0])
    scaled, num_sms = x_scale is not None, launch.num_sms(x.device)
    x = x.view(torch.uint8) if scaled else x
    x = x if x.stride(-1) == 1 else x.contiguous()
    codes = byte_rows(weight)
    max_tokens = MAX_CODE_TOKENS if scaled and launch.target(x.device).mma_sync else max(TILES)
    tokens, splits = choose_tile(num_tokens, rows, width // WEIGHT_BLOCK, num_sms, max_tokens)
    weight_rows, warps, _ = TILES[tokens]
    x = reordered(launch, x, False) if tokens > FEW_TOKENS else x
    dtype = out_dtype if splits == 1 else torch.float32
    out = x.new_empty((splits, num_tokens, rows), dtype=dtype)
    programs = splits * (rows // weight_rows) * ((num_tokens + tokens - 1) // tokens)
    launch(fp8_linear_kernel)[programs,](
        x, *x.stride()[:2],
        x_scale if scaled else scale, *(x_scale.stride() if scaled else (0, 0, 0)),
        codes, codes.stride(0), *strided(scale),
        out, num_tokens,
        SIZE=rows, GROUP_SIZE=rows // num_groups, WIDTH=width, SCALED=scaled, SPLITS=splits,
        ORDERED=tokens > FEW_TOKENS, TOKENS=tokens, TILE=TILES[tokens],
        CONVERTS=launch.converts_codes(x.device), num_warps=warps,
    )  # fmt: skip
    return out


def _multiplies_codes(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor | None,
    activations: str,
    out_dtype: torch.dtype,
) -> bool:
    """Return whether products of codes are precise enough for the result, and faster than bf16
    products for ``x`` [num_tokens, num_groups, in_features]. The matrix unit adds products of codes
    with about 14 bits, which is enough for bf16 results."""
    if out_dtype != torch.bfloat16:
        return False
    num_tokens, is_fp8 = x.shape[0], x_scale is not None or activations == "fp8"
    max_tokens = MAX_BF16_TOKENS if int(x.shape[1]) == 1 else FEW_TOKENS
    is_large = not isinstance(num_tokens, int) or num_tokens > max_tokens
    return is_fp8 and is_large and block_gemm.is_supported(launch, x)


def products(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    activations: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply with the faster kernel; return the partial sums of the splits of K, [num_splits,
    num_tokens, rows]."""
    num_tokens, rows = x.shape[0], int(weight.shape[0])
    if num_tokens == 0 or rows == 0 or int(x.shape[2]) == 0:
        return x.new_zeros((1, num_tokens, rows), dtype=out_dtype)
    if _multiplies_codes(launch, x, x_scale, activations, out_dtype):
        codes, scales = quantized(x) if x_scale is None else (x, x_scale)
        return block_gemm.multiply(launch, codes, scales, weight, scale, out_dtype)[None]
    x = x if x_scale is not None else bf16_activations(x, activations)
    return _multiply_as_bf16(launch, x, x_scale, weight, scale, out_dtype)


def _multiply(
    launch: Launcher,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    activations: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply, and add the partial sums of the splits of K."""
    partial = products(launch, x, x_scale, weight, scale, activations, out_dtype)
    splits, num_tokens, rows = int(partial.shape[0]), partial.shape[1], int(partial.shape[2])
    if splits == 1:
        return partial[0]
    total = x.new_empty((num_tokens, rows), dtype=out_dtype)
    size = num_tokens * rows
    launch(sum_splits_kernel)[((size + SUMS - 1) // SUMS,)](
        partial, total, size, SPLITS=splits, BLOCK=SUMS, num_warps=SUM_WARPS
    )
    return total


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

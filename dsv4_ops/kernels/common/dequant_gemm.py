"""Matrix products with FP4 and FP8 weights. Codes are converted to bf16 operands in the registers
into which they were loaded.

A thread loads 16 bytes of a row; four adjacent threads load 64 bytes. The matrix unit accepts any
order of K that both operands share. So the codes stay in their registers: ``reordered``
(``reorder.py``) puts the activations into the codes' order of K, and the result has the codes'
order of rows, ``tile_rows``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import FP4_BLOCK, round_up
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    decode_to_bf16,
    multiply_add,
)
from dsv4_ops.kernels.common.triton_compat import EMULATE
from dsv4_ops.reference.linear import activation_values

STEP_BYTES = 128
"""Bytes of a row per step. A step loads 64 bytes twice."""

FP4_UNIT = tl.constexpr(2.0**8)
"""FP4 weights are divided by this number, and the sums are multiplied by it, so that the bf16
factors of scales up to 2^9 are finite. Only sums below 2^-141 are lost; bf16 cannot represent
them."""

_FP4_FIELD = tl.constexpr(118)
"""The exponent field of a factor is the scale byte plus this number. A bf16 with an e2m1 code in
its lowest exponent bits has the value of the code times 2^-126."""

_FP8_FACTOR = tl.constexpr((247 << 7) * 0x10001)
"""2^120 as two bf16 in an int32. A bf16 with an e4m3 code in its lowest exponent bits has the value
of the code times 2^-120."""

_FP4_BITS = tl.constexpr(0x81C081C0 - 2**32)
"""Mask of two bf16: sign, and an e2m1 code in the lowest bits of the exponent."""

_SIGNS, _FP8_CODES = tl.constexpr(0x80008000 - 2**32), tl.constexpr(0x07F007F0)


def step_size(fp4: bool) -> int:
    """Return the number of values of K per step."""
    return 2 * STEP_BYTES if fp4 else STEP_BYTES


def byte_rows(weight: Tensor) -> Tensor:
    """Return a weight as bytes. A misaligned weight is copied, because kernels load rows as int32.
    The copy is of bytes, because Triton has no pointers to e4m3 values below compute capability
    8.9."""
    weight = weight.view(torch.uint8)
    offsets = (weight.storage_offset(), *weight.stride()[:-1])
    if weight.stride(-1) != 1 or any(offset % 16 != 0 for offset in offsets):
        return weight.clone(memory_format=torch.contiguous_format)
    return weight


def scale_rows(scale: Tensor, fp4: bool) -> Tensor:
    """Return the scales of a weight. FP4 kernels load them as one int64 per step."""
    if not fp4:
        return scale
    blocks = int(scale.shape[-1])
    padded = round_up(blocks, step_size(fp4) // FP4_BLOCK)
    offsets = (scale.storage_offset(), *scale.stride()[:-1])
    if padded != blocks:
        return torch.cat([scale, scale.new_zeros((*scale.shape[:-1], padded - blocks))], -1)
    if scale.stride(-1) != 1 or any(offset % 8 != 0 for offset in offsets):
        return scale.clone(memory_format=torch.contiguous_format)
    return scale


def bf16_activations(x: Tensor, activations: str) -> Tensor:
    """Return the activations; unless ``activations`` is "bf16", first round them to FP8. FP8 values
    are exact in bf16, because their scales are powers of two."""
    if activations == "bf16":
        return x
    return activation_values(x, None, activations).to(torch.bfloat16)


@triton.jit
def reordered_offset(k, FP4: tl.constexpr):
    """Return the offset of value ``k`` of a row in the order in which kernels multiply.

    FP4: of each 128 values, value 32 t + 8 i + 4 j + 2 h + p is at 64 h + 16 i + 8 p + 2 t + j.
    FP8: of each 64 values, value 16 t + 4 i + 2 j + p is at 16 i + 8 p + 2 t + j.
    """
    if FP4:
        part = k % 128
        place = part // 2 % 2 * 64 + part // 8 % 4 * 16 + part % 2 * 8 + part // 32 * 2
        return k - part + place + part // 4 % 2
    part = k % 64
    return k - part + part // 4 % 4 * 16 + part % 2 * 8 + part // 16 * 2 + part // 2 % 2


@triton.jit
def reorder_tile(x, FP4: tl.constexpr):
    """Put the values of each row of a tile into the order of ``reordered_offset``."""
    HALVES: tl.constexpr = 2 if FP4 else 1
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // (64 * HALVES), 4, 4, 2, HALVES, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 5, 3, 6, 2, 4)), (x.shape[0], x.shape[1]))


@triton.jit
def tile_rows(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return the tile row of each loaded row. A warp has 16 adjacent rows of a tile, but loads 8
    adjacent rows at a time."""
    loaded = tl.arange(0, ROWS)
    half, warp = loaded // (8 * WARPS) % 2, loaded // 8 % WARPS
    return loaded // (16 * WARPS) * (16 * WARPS) + warp * 16 + half * 8 + loaded % 8


@triton.jit
def _fp4_pair(words, MASK: tl.constexpr, CODE: tl.constexpr, SIGN: tl.constexpr):
    """Shift two codes, 16 bits apart in a word, to their bits in two bf16. One multiplication
    shifts both the codes and their signs. This saves two of four integer operations; the loop is
    bound by integer operations."""
    return (words & MASK) * (2**CODE + 2**SIGN) & _FP4_BITS


@triton.jit
def _fp8_pair(words, LEFT: tl.constexpr, SIGN: tl.constexpr):
    """Shift two FP8 codes, 16 bits apart in a word, to their bits in two bf16."""
    shifted = words << LEFT if LEFT >= 0 else words >> -LEFT
    return (shifted & _FP8_CODES) | ((words << SIGN) & _SIGNS)


@triton.jit
def _scaled(pair, factor):
    """Multiply a pair of bf16 by a pair of factors; return the lower and the upper product."""
    if EMULATE:
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = (pair & -65536).to(tl.float32, bitcast=True)
        value = (factor & -65536).to(tl.float32, bitcast=True)
        return low * value, high * value
    return tl.inline_asm_elementwise(
        # fma with -0, because mul.bf16x2 needs sm_90
        "{ .reg .b32 t, z; mov.b32 z, 0x80008000; fma.rn.bf16x2 t, $2, $3, z;"
        " mov.b32 {$0, $1}, t; }",
        "=h,=h,r,r",
        [pair, factor],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _tile(words, factor, FP4: tl.constexpr, FIRST: tl.constexpr, WARPS: tl.constexpr):
    """Return bf16 [rows, 64] in the order of ``tile_rows``, from four codes of each word."""
    ROWS: tl.constexpr = words.shape[0]
    if FP4:
        words = words >> (8 * FIRST)
        a, b = _scaled(_fp4_pair(words, 0x000F000F, 6, 12), factor)
        c, d = _scaled(_fp4_pair(words, 0x00F000F0, 2, 8), factor)
    else:
        a, b = _scaled(_fp8_pair(words, 4, 8), factor)
        c, d = _scaled(_fp8_pair(words, -4, 0), factor)
    values = tl.join(tl.join(a, b), tl.join(c, d))
    shape: tl.constexpr = (ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2)
    parts = tl.permute(tl.reshape(values, shape), (0, 2, 1, 3, 5, 7, 4, 6))
    return tl.reshape(parts, (ROWS, 64))


@triton.jit
def _fp4_factor(scale):
    """Return 2^(scale - 1) / ``FP4_UNIT`` for a scale byte, as two bf16 in an int32."""
    pattern = tl.minimum(scale + _FP4_FIELD, 255) << 7
    return tl.where(scale == 255, 0x7FC0, pattern) * 0x10001


@triton.jit
def _concatenate(left, right):
    """Return [rows, 128] from two tiles [rows, 64]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 128))


@triton.jit
def scale_values(scale):
    """Convert scales from float32 or UE8M0 bytes to float32."""
    if scale.dtype == tl.float32:
        return scale
    patterns = scale.to(tl.int32) << 23
    patterns = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, patterns))
    return patterns.to(tl.float32, bitcast=True)


@triton.jit
def load_words(weight, step, half, MASKED: tl.constexpr):
    """Load 16 words of each row: one half of a step."""
    rows, row_mask, row_words = weight
    word = step * 32 + half * 16 + tl.arange(0, 16)[None, :]
    if MASKED:
        return tl.load(rows + word, mask=row_mask & (word < row_words), other=0)
    return tl.load(rows + word)


@triton.jit
def _add_fp4(acc, words, scale_word, x, mask, WARPS: tl.constexpr):
    """Add the products of 16 words of each row with 128 columns of ``x``. The four scales of the
    words are the bytes of ``scale_word``. For more than 16 tokens, the product is computed in two
    halves, which need fewer registers, but wait for the matrix unit twice."""
    block = tl.arange(0, 16)[None, :] // 4
    factor = _fp4_factor((scale_word >> (8 * block)) & 255)
    left, right = _tile(words, factor, True, 0, WARPS), _tile(words, factor, True, 1, WARPS)
    if x.shape[0] <= 16:
        tile = tl.load(x + tl.arange(0, 128)[None, :], mask=mask, other=0.0)
        return multiply_add(_concatenate(left, right), tl.trans(tile), acc)
    k = tl.arange(0, 64)[None, :]
    tile = tl.load(x + k, mask=mask, other=0.0)
    acc = multiply_add(left, tl.trans(tile), acc)
    tile = tl.load(x + 64 + k, mask=mask, other=0.0)
    return multiply_add(right, tl.trans(tile), acc)


@triton.jit
def multiply_fp4(
    weight, scale, x, steps,
    ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the product over ``steps``, a pair (first, stop), as float32 [ROWS, TOKENS] with rows
    in the order of ``tile_rows``.

    All loads run STAGES - 1 steps ahead, into shared memory. They do not load into registers,
    because ptxas would delay such a load until a product frees the registers.

    Args:
        weight: Addresses [ROWS, 1] of int32 words, the mask of the rows, and words per row.
        scale: Addresses [ROWS] of ``scale_rows``; the kernel reads them without a mask.
        x: Addresses [TOKENS, 1] of ``reordered`` rows, and the mask of the tokens.
        MASKED: Whether a tile or a step may reach past the weight.
    """
    rows, mask = x
    first, stop = steps
    acc = tl.zeros((ROWS, rows.shape[0]), tl.float32)
    scales = scale.to(tl.pointer_type(tl.int64), bitcast=True)
    for step in tl.range(first, stop, num_stages=STAGES):
        low_words = load_words(weight, step, 0, MASKED)
        high_words = load_words(weight, step, 1, MASKED)
        step_scales = tl.load(scales + step)[:, None]
        low_scales, high_scales = step_scales.to(tl.int32), (step_scales >> 32).to(tl.int32)
        acc = _add_fp4(acc, low_words, low_scales, rows + step * 256, mask, WARPS)
        acc = _add_fp4(acc, high_words, high_scales, rows + step * 256 + 128, mask, WARPS)
    return acc * FP4_UNIT


@triton.jit
def multiply_fp8(
    weight, scale, x, x_scale, steps,
    ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Return the product with an FP8 weight as ``multiply_fp4`` does.

    Args:
        weight, x: As in ``multiply_fp4``. x may also hold e4m3 codes: as bytes, if Triton does not
            convert them on this GPU.
        scale: Addresses [ROWS] of scales, their stride from step to step, and the mask of the rows.
        x_scale: Addresses [TOKENS] of scales, or None, and their stride from step to step.
        ORDERED: Whether x is ``reordered``.
    """
    rows, mask = x
    first, stop = steps
    scales, stride, row_mask = scale
    token_scales, token_stride = x_scale
    TOKENS: tl.constexpr = rows.shape[0]
    k = tl.arange(0, 128)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    low_words = load_words(weight, first, 0, MASKED)
    high_words = load_words(weight, first, 1, MASKED)
    for step in tl.range(first, stop, num_stages=STAGES):
        next_step = tl.minimum(step + 1, stop - 1)
        x_tile = _widen(tl.load(rows + step * 128 + k, mask=mask, other=0.0))
        factor = scale_values(tl.load(scales + step * stride, mask=row_mask, other=0))[:, None]
        if token_scales is not None:
            token_mask = tl.ravel(mask)
            token_factor = tl.load(token_scales + step * token_stride, mask=token_mask, other=0.0)
            factor = factor * token_factor[None, :]
        next_low = load_words(weight, next_step, 0, MASKED)
        next_high = load_words(weight, next_step, 1, MASKED)
        if not ORDERED:
            x_tile = reorder_tile(x_tile, False)
        shift = tl.full((ROWS, 16), _FP8_FACTOR, tl.int32)
        left = _tile(low_words, shift, False, 0, WARPS)
        right = _tile(high_words, shift, False, 0, WARPS)
        zeros = tl.zeros((ROWS, TOKENS), tl.float32)
        product = multiply_add(_concatenate(left, right), tl.trans(x_tile), zeros)
        acc += product * factor
        low_words, high_words = next_low, next_high
    return acc


@triton.jit
def _widen(x):
    """Convert activations to bf16: from values, from codes as bytes, or from e4m3 codes."""
    if x.dtype == tl.uint8:
        return decode_to_bf16(x)
    else:
        return x.to(tl.bfloat16)

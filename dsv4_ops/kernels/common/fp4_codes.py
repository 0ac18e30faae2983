"""Products of FP4 weights with FP8 activations: e2m1 codes become e4m3 codes that hold the scales
of their blocks, too, and the matrix unit multiplies codes.

An e2m1 value times a power of two is an e4m3 value while its exponent is in reach: while the scale
is from 2^-7 to 2^4 times the largest of the row's first 256 columns. Other rows are multiplied one
block of scales at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import round_up
from dsv4_ops.kernels.common.fp8 import multiply_codes  # by name: Inductor copies kernels
from dsv4_ops.kernels.common.triton_compat import EMULATE
from dsv4_ops.kernels.common.weights import load_words, scale_values, step_of

_REACH = tl.constexpr(11)
"""Largest power of two above a row's base: there 6 is 384, and 448 is the largest code."""

_BELOW = tl.constexpr(7)
"""How far the base of a row is below the largest scale of its first step."""

_LARGEST_BASE = tl.constexpr(243)
"""So that a byte of 255, which is NaN, is out of reach."""

_BASE_VALUE = tl.constexpr(5)
"""Added to a base, the byte of the scale that codes of the base have: 0.5 is 2^-6 there."""

_LOW_CODES, _HIGH_CODES = tl.constexpr(0x14100800), tl.constexpr(0x24201C18)
"""e4m3 codes of 0 .5 1 1.5 and of 2 3 4 6 at the base, a byte each."""

_LOW_STEP, _HIGH_STEP = tl.constexpr(0x08080800), tl.constexpr(0x08080808)
"""What a power of two adds: 0 stays 0."""

_NAN, _NAN_BUT_0 = tl.constexpr(0x7F7F7F7F), tl.constexpr(0x7F7F7F00)
"""Codes for a scale out of reach. Below it a block of zeros does no harm."""


def ordered_codes(x: Tensor) -> Tensor:
    """Codes [num_rows, k] as uint8 in the order in which kernels multiply them, with zeros up to a
    step: code 32 t + 8 c + 4 h + j of 128 is at 32 c + 16 h + 4 t + j."""
    more = round_up(int(x.shape[1]), step_of(True)) - int(x.shape[1])
    codes = x.view(torch.uint8).contiguous()
    padded = torch.cat([codes, codes.new_zeros((codes.shape[0], more))], -1) if more else codes
    fours = padded.view(torch.int32)
    parts = fours.unflatten(-1, (-1, 4, 4, 2)).permute(0, 1, 3, 4, 2)
    return parts.reshape(fours.shape).view(torch.uint8)


@triton.jit
def code_offset(k):
    """Where ``ordered_codes`` puts code ``k``."""
    part = k % 128
    return k - part + part // 8 % 4 * 32 + part // 4 % 2 * 16 + part // 32 * 4 + part % 4


@triton.jit
def scale_offset(row, ROWS: tl.constexpr):
    """Where the scale of a row is among those of its block of ``ROWS``: a thread of the matrix unit
    has the products of rows 8 i + 2 t and 8 i + 2 t + 1, and finds their scales side by side."""
    return row // 2 % 4 * (ROWS // 4) + row // 8 * 2 + row % 2


@triton.jit
def _row_scales(scales, ROWS: tl.constexpr, HELD: tl.constexpr):
    """float32 [1, HELD] of pairs of scales in bf16 from this address on, by ``scale_offset``."""
    pairs = tl.load(scales + tl.arange(0, HELD // 2))
    parts = tl.reshape(pairs, (HELD // ROWS, 4, ROWS // 8))
    pairs = tl.reshape(tl.permute(parts, (0, 2, 1)), (HELD // 2,))
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (HELD,))[None, :]


@triton.jit
def _looked_up(words, low, high, WARPS: tl.constexpr):
    """``_code_tile`` without the GPU's instructions."""
    ROWS: tl.constexpr = words.shape[0]
    codes = words[:, :, None] >> (4 * tl.arange(0, 8)[None, None, :])
    size = codes & 7
    held = tl.where(size < 4, low[:, :, None], high[:, :, None]) >> (8 * (size & 3))
    held = (held & 0x7F) | ((codes & 8) << 4)
    shape: tl.constexpr = (ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 4)
    parts = tl.permute(tl.reshape(held, shape), (0, 2, 1, 3, 5, 6, 4, 7))
    return tl.reshape(parts, (ROWS, 128)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _code_tile(words, low, high, WARPS: tl.constexpr):
    """e4m3 [ROWS, 128] of 16 words of every row, by the rows and the K that they stand for: each
    code is looked up among the eight of its scale, ``low`` and ``high``. Four words of a thread,
    side by side in a row, have one scale."""
    if EMULATE:
        return _looked_up(words, low, high, WARPS)
    ROWS: tl.constexpr = words.shape[0]
    # of a word: the sizes of its codes look up four bytes twice, their signs are spread over bytes
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        """{
        .reg .b32 size, moved, found, signs;
        and.b32 size, $8, 0x77777777; shl.b32 moved, $8, 4;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $8, 0xD9C8;
        lop3.b32 $0, found, signs, 0x80808080, 0xF8; shr.u32 size, size, 16;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $8, 0xFBEA;
        lop3.b32 $1, found, signs, 0x80808080, 0xF8;
        and.b32 size, $9, 0x77777777; shl.b32 moved, $9, 4;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $9, 0xD9C8;
        lop3.b32 $2, found, signs, 0x80808080, 0xF8; shr.u32 size, size, 16;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $9, 0xFBEA;
        lop3.b32 $3, found, signs, 0x80808080, 0xF8;
        and.b32 size, $10, 0x77777777; shl.b32 moved, $10, 4;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $10, 0xD9C8;
        lop3.b32 $4, found, signs, 0x80808080, 0xF8; shr.u32 size, size, 16;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $10, 0xFBEA;
        lop3.b32 $5, found, signs, 0x80808080, 0xF8;
        and.b32 size, $11, 0x77777777; shl.b32 moved, $11, 4;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $11, 0xD9C8;
        lop3.b32 $6, found, signs, 0x80808080, 0xF8; shr.u32 size, size, 16;
        prmt.b32 found, $12, $16, size; prmt.b32 signs, moved, $11, 0xFBEA;
        lop3.b32 $7, found, signs, 0x80808080, 0xF8;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, low, high],
        dtype=(tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )
    left, right = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    shape: tl.constexpr = (ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2)
    parts = tl.reshape(tl.join(left, right), shape)
    parts = tl.permute(parts, (0, 2, 1, 3, 8, 7, 6, 4, 5))
    return tl.reshape(parts, (ROWS, 128)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _multiply(tile, x, given):
    """float32 [ROWS, HELD] products with 128 codes of rows."""
    codes = tl.load(x + tl.arange(0, 128)[None, :], mask=given, other=0.0)
    return multiply_codes(tile, tl.trans(codes))


@triton.jit
def _tables(scales, base):
    """Codes of every word's scale, which is a byte of ``scales``."""
    block = tl.arange(0, 16)[None, :] // 4
    above = ((scales >> (8 * block)) & 255) - base
    near = (above >= 0) & (above <= _REACH)
    low = tl.where(above < 0, _NAN_BUT_0, _NAN)
    low = tl.where(near, _LOW_CODES + above * _LOW_STEP, low)
    return low, tl.where(near, _HIGH_CODES + above * _HIGH_STEP, _NAN)


@triton.jit
def _of_sums(rows, WARPS: tl.constexpr):
    """A value of each loaded row, in the order of ``tile_rows``."""
    ROWS: tl.constexpr = rows.shape[0]
    parts = tl.reshape(rows, (ROWS // (16 * WARPS), 2, WARPS, 8))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3)), (ROWS, 1))


@triton.jit
def multiply_fp4_codes_by_blocks(
    weight, scale, x, x_scale, steps,
    ROWS: tl.constexpr, WARPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``multiply_fp4_codes`` whatever the scales are: a product for each of their blocks. x_scale
    has an address for each row, of bf16 as int16, and the stride of blocks of K."""
    rows, given = x
    row_scales, scale_stride = x_scale
    first, stop = steps
    HELD: tl.constexpr = rows.shape[0]
    sums = tl.zeros((ROWS, HELD), tl.float32)
    block = tl.arange(0, 16)[None, :] // 4
    low = tl.full((ROWS, 16), _LOW_CODES + _BASE_VALUE * _LOW_STEP, tl.int32)
    high = tl.full((ROWS, 16), _HIGH_CODES + _BASE_VALUE * _HIGH_STEP, tl.int32)
    for part in tl.range(8 * first, 8 * stop, num_stages=1):
        half = part // 4
        words = load_words(weight, half // 2, half % 2, MASKED)
        tile = _code_tile(tl.where(block == part % 4, words, 0), low, high, WARPS)
        of_rows = tl.load(row_scales + half * scale_stride).to(tl.int32) << 16
        products = _multiply(tile, rows + half * 128, given)
        products *= of_rows.to(tl.float32, bitcast=True)[None, :]
        sums += products * scale_values(_of_sums(tl.load(scale + part), WARPS))
    return sums


@triton.jit
def has_nan(sums):
    """Whether any of them is NaN."""
    return tl.max(tl.max((sums != sums).to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def multiply_fp4_codes(
    weight, scale, x, x_scale, steps,
    ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, HELD], by ``tile_rows``: products over ``steps``, a first and a last one.

    The scales of a row are taken to be near those of its first step. If any is not, its codes and
    sums are NaN, and ``multiply_fp4_codes_by_blocks`` has to multiply them again, as it has to if
    activations are NaN.

    Args:
        weight, scale: As of ``multiply_fp4``.
        x: Addresses [HELD, 1] of ``ordered_codes``, and which rows exist.
        x_scale: Address of their scales, pairs in bf16 by ``scale_offset`` of ``TOKENS``, and the
            stride of blocks of K. They are 0 for rows that do not exist.
    """
    rows, given = x
    row_scales, scale_stride = x_scale
    first, stop = steps
    HELD: tl.constexpr = rows.shape[0]
    scales = scale.to(tl.pointer_type(tl.int64), bitcast=True)
    of_first = tl.load(scales + first)
    max_scale = (of_first & 255).to(tl.int32)
    for shift in tl.static_range(8, 64, 8):
        max_scale = tl.maximum(max_scale, ((of_first >> shift) & 255).to(tl.int32))
    base = tl.minimum(tl.maximum(max_scale - _BELOW, 0), _LARGEST_BASE)
    sums = tl.zeros((ROWS, HELD), tl.float32)
    for step in tl.range(first, stop, num_stages=STAGES):
        words, more = load_words(weight, step, 0, MASKED), load_words(weight, step, 1, MASKED)
        of_step = tl.load(scales + step)[:, None]
        here = row_scales + 2 * step * scale_stride
        left = _row_scales(here, TOKENS, HELD)
        right = _row_scales(here + scale_stride, TOKENS, HELD)
        low, high = _tables(of_step.to(tl.int32), base[:, None])
        tile = _code_tile(words, low, high, WARPS)
        sums += _multiply(tile, rows + step * 256, given) * left
        low, high = _tables((of_step >> 32).to(tl.int32), base[:, None])
        tile = _code_tile(more, low, high, WARPS)
        sums += _multiply(tile, rows + step * 256 + 128, given) * right
    return sums * scale_values(_of_sums(base + _BASE_VALUE, WARPS))

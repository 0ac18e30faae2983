"""Products of FP4 weights and FP8 activations on FP8 matrix units. An e2m1 code and its block scale
become one e4m3 code.

The e4m3 codes are relative to a base scale of the row. The product of an e2m1 value and its
relative scale is exact in e4m3 if the scale is 2^-7 to 2^4 times the maximum scale of the row's
first 256 columns. If a row has other scales, a slower function, ``multiply_fp4_codes_by_blocks``,
multiplies the columns of one block scale at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.layout import round_up
from dsv4_ops.kernels.common.dequant_gemm import load_words, scale_values, step_size
from dsv4_ops.kernels.common.fp8 import multiply_codes  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.triton_compat import EMULATE

_REACH = tl.constexpr(11)
"""Maximum exponent of a scale relative to the row's base. At this exponent, 6 has the code that
e4m3 has for 384; the maximum of e4m3 is 448."""

_BASE_MARGIN = tl.constexpr(7)
"""Exponent, relative to the row's base, of the maximum scale in the row's first step."""

_MAX_BASE = tl.constexpr(243)
"""Maximum base. With a larger base, a scale byte of 255 (NaN) would be within _REACH."""

_BASE_VALUE = tl.constexpr(5)
"""The scale byte of a row's sums is the row's base plus this number: at the base, 0.5 has the code
of 2^-6, so a value is 2^5 times the value of its code."""

_LOW_CODES, _HIGH_CODES = tl.constexpr(0x14100800), tl.constexpr(0x24201C18)
"""e4m3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 at the base, one byte each."""

_LOW_STEP, _HIGH_STEP = tl.constexpr(0x08080800), tl.constexpr(0x08080808)
"""Increments of the codes per exponent above the base; the code of 0 stays 0."""

_NAN, _NAN_EXCEPT_0 = tl.constexpr(0x7F7F7F7F), tl.constexpr(0x7F7F7F00)
"""Codes for a scale out of reach: NaN, but the code of 0 stays 0 if the scale is too small."""


def ordered_codes(x: Tensor) -> Tensor:
    """Return codes [num_rows, k] as uint8 in the order in which kernels multiply them, padded to a
    step: of each 128 codes, code 32 t + 8 c + 4 h + j is at 32 c + 16 h + 4 t + j."""
    padding = round_up(int(x.shape[1]), step_size(True)) - int(x.shape[1])
    codes = x.view(torch.uint8).contiguous()
    if padding:
        codes = torch.cat([codes, codes.new_zeros((codes.shape[0], padding))], -1)
    words = codes.view(torch.int32)
    parts = words.unflatten(-1, (-1, 4, 4, 2)).permute(0, 1, 3, 4, 2)
    return parts.reshape(words.shape).view(torch.uint8)


@triton.jit
def code_offset(k):
    """Return the offset of code ``k`` in ``ordered_codes``."""
    part = k % 128
    return k - part + part // 8 % 4 * 32 + part // 4 % 2 * 16 + part // 32 * 4 + part % 4


@triton.jit
def scale_offset(row, ROWS: tl.constexpr):
    """Return the offset of a row's scale in its block of ``ROWS``. The scales of rows 8 i + 2 t and
    8 i + 2 t + 1 are adjacent, because one thread has the products of both rows."""
    return row // 2 % 4 * (ROWS // 4) + row // 8 * 2 + row % 2


@triton.jit
def _row_scales(scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load float32 [1, COLUMNS] from pairs of bf16 scales in the order of ``scale_offset``."""
    pairs = tl.load(scales + tl.arange(0, COLUMNS // 2))
    parts = tl.reshape(pairs, (COLUMNS // ROWS, 4, ROWS // 8))
    pairs = tl.reshape(tl.permute(parts, (0, 2, 1)), (COLUMNS // 2,))
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (COLUMNS,))[None, :]


@triton.jit
def _look_up(words, low, high, WARPS: tl.constexpr):
    """Compute ``_code_tile`` for Triton's interpreter, which has no inline assembly."""
    ROWS: tl.constexpr = words.shape[0]
    codes = words[:, :, None] >> (4 * tl.arange(0, 8)[None, None, :])
    size = codes & 7
    code_bytes = tl.where(size < 4, low[:, :, None], high[:, :, None]) >> (8 * (size & 3))
    code_bytes = (code_bytes & 0x7F) | ((codes & 8) << 4)
    shape: tl.constexpr = (ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 4)
    parts = tl.permute(tl.reshape(code_bytes, shape), (0, 2, 1, 3, 5, 6, 4, 7))
    return tl.reshape(parts, (ROWS, 128)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _code_tile(words, low, high, WARPS: tl.constexpr):
    """Return e4m3 [ROWS, 128], with rows in the order of ``tile_rows``, from 16 words of each row.
    Each e2m1 code is looked up in the table of the code's scale. A table has eight e4m3 codes, the
    bytes of ``low`` and ``high``. The four words of a thread are adjacent and share a scale."""
    if EMULATE:
        return _look_up(words, low, high, WARPS)
    ROWS: tl.constexpr = words.shape[0]
    # for each half of a word: look up four bytes by the codes without signs, then insert signs
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
def _multiply(tile, x, mask):
    """Return the float32 [ROWS, COLUMNS] products of ``tile`` and 128 codes of each row of x."""
    codes = tl.load(x + tl.arange(0, 128)[None, :], mask=mask, other=0.0)
    return multiply_codes(tile, tl.trans(codes))


@triton.jit
def _tables(scales, base):
    """Return the low and the high half of the code table of each word. The scale of a word is a
    byte of ``scales``."""
    block = tl.arange(0, 16)[None, :] // 4
    exponent = ((scales >> (8 * block)) & 255) - base
    in_reach = (exponent >= 0) & (exponent <= _REACH)
    low = tl.where(exponent < 0, _NAN_EXCEPT_0, _NAN)
    low = tl.where(in_reach, _LOW_CODES + exponent * _LOW_STEP, low)
    return low, tl.where(in_reach, _HIGH_CODES + exponent * _HIGH_STEP, _NAN)


@triton.jit
def _in_tile_order(rows, WARPS: tl.constexpr):
    """Reorder one value per loaded row as ``tile_rows`` does; return [ROWS, 1]."""
    ROWS: tl.constexpr = rows.shape[0]
    parts = tl.reshape(rows, (ROWS // (16 * WARPS), 2, WARPS, 8))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3)), (ROWS, 1))


@triton.jit
def multiply_fp4_codes_by_blocks(
    weight, scale, x, x_scale, steps,
    ROWS: tl.constexpr, WARPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute ``multiply_fp4_codes`` for any scales, with one product for the columns of each block
    scale. ``x_scale``: the address of each row's scales, bf16 as int16, and their stride between
    blocks of K."""
    rows, mask = x
    row_scales, scale_stride = x_scale
    first, stop = steps
    COLUMNS: tl.constexpr = rows.shape[0]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    block = tl.arange(0, 16)[None, :] // 4
    low = tl.full((ROWS, 16), _LOW_CODES + _BASE_VALUE * _LOW_STEP, tl.int32)
    high = tl.full((ROWS, 16), _HIGH_CODES + _BASE_VALUE * _HIGH_STEP, tl.int32)
    for part in tl.range(8 * first, 8 * stop, num_stages=1):
        half = part // 4
        words = load_words(weight, half // 2, half % 2, MASKED)
        tile = _code_tile(tl.where(block == part % 4, words, 0), low, high, WARPS)
        row_scale = tl.load(row_scales + half * scale_stride).to(tl.int32) << 16
        products = _multiply(tile, rows + half * 128, mask)
        products *= row_scale.to(tl.float32, bitcast=True)[None, :]
        acc += products * scale_values(_in_tile_order(tl.load(scale + part), WARPS))
    return acc


@triton.jit
def has_nan(acc):
    """Return whether any value is NaN."""
    return tl.max(tl.max((acc != acc).to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def multiply_fp4_codes(
    weight, scale, x, x_scale, steps,
    ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the product over ``steps``, a pair (first, stop), as float32 [ROWS, COLUMNS] with rows
    in the order of ``tile_rows``.

    The scales of a row must be 2^-7 to 2^4 times the maximum scale of its first step. A scale out
    of reach makes the row's sums NaN, as NaN in the activations does. If a sum is NaN,
    ``multiply_fp4_codes_by_blocks`` must compute the product again.

    Args:
        weight, scale: As in ``multiply_fp4``.
        x: Addresses [COLUMNS, 1] of ``ordered_codes``, and the mask of the rows.
        x_scale: Address of the scales of x, and the scales' stride between blocks of K. Scales are
            pairs of bf16 in the order of ``scale_offset``, with blocks of ``TOKENS``. Masked rows
            have scale 0.
    """
    rows, mask = x
    row_scales, scale_stride = x_scale
    first, stop = steps
    COLUMNS: tl.constexpr = rows.shape[0]
    scales = scale.to(tl.pointer_type(tl.int64), bitcast=True)
    first_scales = tl.load(scales + first)
    max_scale = (first_scales & 255).to(tl.int32)
    for shift in tl.static_range(8, 64, 8):
        max_scale = tl.maximum(max_scale, ((first_scales >> shift) & 255).to(tl.int32))
    base = tl.minimum(tl.maximum(max_scale - _BASE_MARGIN, 0), _MAX_BASE)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(first, stop, num_stages=STAGES):
        low_words = load_words(weight, step, 0, MASKED)
        high_words = load_words(weight, step, 1, MASKED)
        step_scales = tl.load(scales + step)[:, None]
        scale_address = row_scales + 2 * step * scale_stride
        left = _row_scales(scale_address, TOKENS, COLUMNS)
        right = _row_scales(scale_address + scale_stride, TOKENS, COLUMNS)
        low, high = _tables(step_scales.to(tl.int32), base[:, None])
        tile = _code_tile(low_words, low, high, WARPS)
        acc += _multiply(tile, rows + step * 256, mask) * left
        low, high = _tables((step_scales >> 32).to(tl.int32), base[:, None])
        tile = _code_tile(high_words, low, high, WARPS)
        acc += _multiply(tile, rows + step * 256 + 128, mask) * right
    return acc * scale_values(_in_tile_order(base + _BASE_VALUE, WARPS))

"""Device functions for e4m3 codes with power-of-two block scales, as in
``reference/quantization.py``.

CONVERTS says whether Triton converts e4m3 codes (``Launcher.converts_codes``). If not, kernels
compute the same bytes with integer operations. They also do so in Triton's interpreter, whose
conversion rounds wrongly.
"""

import torch
import triton
import triton.language as tl

from dsv4_ops.core import layout
from dsv4_ops.kernels.common.triton_compat import EMULATE

_SCALE_FLOOR = tl.constexpr(layout.SCALE_FLOOR)
_INVERSE_BIAS = tl.constexpr(2 * layout.SCALE_BIAS)
_FP8_MAX = tl.constexpr(layout.FP8_MAX)
_CODE_UNIT = tl.constexpr(2.0**120)
_LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def quantize(values, CONVERTS: tl.constexpr, MIN_SCALE: tl.constexpr = None):
    """Return uint8 codes and int32 scale bytes of bf16 values that were converted to float32. The
    values along the last dimension share a scale.

    A scale is at least MIN_SCALE; the default is the minimum scale of the caches. The calling
    kernels are bound by instructions as much as by memory, so this function leaves NaN and infinity
    to ``encode``, which saturates and returns 0x7F for NaN.
    """
    magnitudes = tl.abs(values)
    if EMULATE:  # max(x, NaN) is x on the GPU, but NaN in the interpreter
        magnitudes = tl.where(magnitudes != magnitudes, 0.0, magnitudes)
    amax = tl.max(magnitudes, axis=-1)
    amax = tl.where(amax != amax, 0.0, tl.minimum(amax, _LARGEST_BF16))  # all values may be NaN
    # ceil(log2(amax / 448)): the exponent minus 8, plus 1 if the significand is above 1.75
    patterns = amax.to(tl.int32, bitcast=True)
    min_scale: tl.constexpr = _SCALE_FLOOR if MIN_SCALE is None else MIN_SCALE
    scale = tl.maximum(((patterns + 0x1FFFFF) >> 23) - 8, min_scale)
    inverse = ((-scale + _INVERSE_BIAS) << 23).to(tl.float32, bitcast=True)
    scaled = values * tl.expand_dims(inverse, -1)
    return encode(scaled, CONVERTS), scale


@triton.jit
def encode(values, CONVERTS: tl.constexpr):
    """Return uint8 e4m3 codes of float32 values: round to nearest even, saturate, NaN to 0x7F."""
    if CONVERTS:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:  # needed: Triton also compiles the code that follows a branch with ``return``
        return _encode(values)


@triton.jit
def decode(codes, CONVERTS: tl.constexpr):
    """Return the float32 values of uint8 e4m3 codes."""
    if CONVERTS:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return _decode(codes)


@triton.jit
def widen(values):
    """Convert bf16 or float16 values to float32."""
    if EMULATE:
        if values.dtype == tl.bfloat16:  # Triton's interpreter is wrong about subnormal values
            patterns = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
            return patterns.to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def round_to(values, DTYPE: tl.constexpr):
    """Round float32 values to DTYPE, to nearest even."""
    if DTYPE == tl.bfloat16:
        return round_to_bf16(values)
    else:  # needed: Triton also compiles the code that follows a branch with ``return``
        return values.to(DTYPE)


@triton.jit
def round_to_bf16(values):
    """Round float32 values to bf16, to nearest even."""
    if EMULATE:  # Triton's interpreter truncates, and flushes subnormal values
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        patterns = tl.where(values != values, 0x7FC0, rounded).to(tl.int16)
        return patterns.to(tl.bfloat16, bitcast=True)
    return values.to(tl.bfloat16)


@triton.jit
def multiply_add(left, right, acc):
    """Return ``acc`` plus a matrix product, in float32."""
    if EMULATE:  # Triton's interpreter has no product of bf16
        return acc + tl.dot(widen(left), widen(right), input_precision="ieee")
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def multiply_codes(left, right):
    """Return the float32 product of e4m3 tiles, on GPUs whose matrix unit takes e4m3."""
    if EMULATE:
        left, right = left.to(tl.uint8, bitcast=True), right.to(tl.uint8, bitcast=True)
        return tl.dot(_decode(left), _decode(right), input_precision="ieee")
    return tl.dot(left, right)


@triton.jit
def _encode(values):
    """Compute ``encode`` with integers."""
    is_nan = values != values
    values = tl.maximum(tl.minimum(values, _FP8_MAX), -_FP8_MAX)
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # normal codes: round 23 significand bits to 3, to nearest even
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - ((127 - 7) << 3)
    # subnormal codes: multiples of 2^-9, which is the spacing of float32 values above 2^14
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xF
    codes = tl.where(magnitude < ((127 - 6) << 23), subnormal, normal)
    return tl.where(is_nan, 0x7F, codes | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _decode(codes):
    """Compute ``decode`` with integers. A float32 that has a code in its lowest exponent bits and
    highest significand bits has the value of the code times 2^-120, even for subnormal codes."""
    bits = codes.to(tl.int32)
    size = bits & 0x7F
    scaled = ((size << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where(size == 0x7F, float("nan"), scaled * _CODE_UNIT)


@triton.jit
def decode_scaled(codes, factor):
    """Return the bf16 products of uint8 codes and bf16 powers of two. Attention is bound by
    instructions, so this function computes two products at a time, with a third of the instructions
    of ``decode``."""
    if EMULATE:
        return (_decode(codes) * widen(factor)).to(tl.bfloat16)
    # per pair: move the codes to the upper bytes; fill the halves of NaN codes with ones; insert
    # the signs; then two products as fma with -0, because mul.bf16x2 needs sm_90
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, m, n, z, unit;
        mov.b32 z, 0x80008000; mov.b32 unit, 0x7B807B80;
        prmt.b32 t, $2, 0, 0x1404; shr.u32 m, t, 4; and.b32 m, m, 0x07F007F0;
        and.b32 n, t, 0x7F007F00; add.u32 n, n, 0x01000100; prmt.b32 n, n, 0, 0xBB99;
        lop3.b32 m, m, t, z, 0xF8; or.b32 m, m, n;
        fma.rn.bf16x2 m, m, unit, z; fma.rn.bf16x2 $0, m, $3, z;
        prmt.b32 t, $2, 0, 0x3424; shr.u32 m, t, 4; and.b32 m, m, 0x07F007F0;
        and.b32 n, t, 0x7F007F00; add.u32 n, n, 0x01000100; prmt.b32 n, n, 0, 0xBB99;
        lop3.b32 m, m, t, z, 0xF8; or.b32 m, m, n;
        fma.rn.bf16x2 m, m, unit, z; fma.rn.bf16x2 $1, m, $4, z;
        }""",
        "=&r,=&r,r,r,r",
        [codes, factor],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def decode_to_bf16(codes):
    """Return the bf16 values of uint8 codes, as ``decode_scaled`` computes them."""
    return decode_scaled(codes, tl.full((), 1.0, tl.bfloat16))


@triton.jit
def _first(left, right):
    return left


@triton.jit
def convert_once(tile, ENABLED: tl.constexpr):
    """Return ``tile`` after a reduction over a dimension of size 1. Such a reduction costs nothing.

    Triton moves no conversion past a reduction. So a tile is converted once, in the layout of its
    load, and both products with ``mma.sync`` read the result from shared memory. Without the
    reduction, Triton would move the bytes into the operand layout of each product, and convert the
    bytes twice."""
    if ENABLED and not EMULATE:
        return tl.reduce(tl.reshape(tile, (tile.shape[0], tile.shape[1], 1)), 2, _first)
    else:
        return tile


@triton.jit
def dequantize(codes, scale, CONVERTS: tl.constexpr):
    """Return int16 patterns of the bf16 values of uint8 codes. The codes along the last dimension
    share a byte of ``scale``."""
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    scaled = decode(codes, CONVERTS) * tl.expand_dims(factor, -1)
    return scaled.to(tl.bfloat16).to(tl.int16, bitcast=True)

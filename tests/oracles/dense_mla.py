"""Oracles of dense MLA's rows in Python ints and fractions, written from the specification.

Tensors are nested lists of ints, and floats are their unsigned bits; a writing op returns the new
contents of its argument. This file does not import torch.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from tests.oracles.kv import CODES as MAGNITUDES, places

Row = list[int]
Rows = Sequence[Sequence[int]]
Pages = Sequence[Rows]

NAN_CODE, CODE_SIGN, MOST = 0x7F, 0x80, Fraction(448)
CODE_VALUES = [*(each / 512 for each in MAGNITUDES), math.nan]
CODE_VALUES += [-value for value in CODE_VALUES]
BF16_NAN = 0x7FC0
ZERO = Fraction(0)
CODES = {Fraction(value): code for code, value in enumerate(CODE_VALUES[:NAN_CODE])}
# significant bits, exponent of the smallest number, bits of exponent field and mantissa
FORMATS = {"float32": (24, -149, 8, 23), "bfloat16": (8, -133, 8, 7), "float16": (11, -24, 5, 10)}
SMALLEST_NORMAL = Fraction(1, 2**126)
LATENT, TILE, ROW = 512, 128, 656

Number = Fraction | str
"""A finite number, or "nan", "inf" or "-inf"."""


def nearest(x: Fraction, bits: int, smallest: int) -> Fraction:
    """Round ``x`` to this many significant bits, ties to even, and to a multiple of 2^smallest."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - bits + 1, smallest)
    return round(x / step) * step


def f32(x: Fraction) -> Fraction:
    return nearest(x, 24, -149)


@cache
def read(bits: int, dtype: str) -> Number:
    """Return the number with these bits."""
    _, smallest, width, mantissa_bits = FORMATS[dtype]
    sign = -1 if bits >> (width + mantissa_bits) else 1
    exponent = bits >> mantissa_bits & (2**width - 1)
    mantissa = bits & (2**mantissa_bits - 1)
    if exponent == 2**width - 1:
        return "nan" if mantissa else "inf" if sign > 0 else "-inf"
    whole = mantissa + (2**mantissa_bits if exponent else 0)
    return sign * whole * Fraction(2) ** (smallest + max(exponent, 1) - 1)


def bits_of(x: Fraction, dtype: str, sign: bool = False) -> int:
    """Round ``x`` and return its bits; ``sign`` is the sign of a zero."""
    significant, smallest, width, mantissa_bits = FORMATS[dtype]
    rounded = abs(nearest(x, significant, smallest))
    negative = (x < 0 or (x == 0 and sign)) << (width + mantissa_bits)
    count = rounded / Fraction(2) ** smallest
    assert count.denominator == 1
    whole, exponent = int(count), 0
    if whole >= 2**mantissa_bits:
        exponent = whole.bit_length() - mantissa_bits
        whole = (whole >> (exponent - 1)) - 2**mantissa_bits
    return negative | min(exponent << mantissa_bits | whole, (2**width - 1) << mantissa_bits)


@cache
def code_of(x: Number, scale: Fraction, negative: bool) -> int:
    """Return the e4m3 code of the float32 quotient ``x / scale``, saturated."""
    if x == "nan":
        return NAN_CODE
    if isinstance(x, str):
        return CODES[MOST] | CODE_SIGN * (x == "-inf")
    quotient = min(abs(f32(x / scale)), MOST)
    return CODES[nearest(quotient, 4, -9)] | CODE_SIGN * negative


def is_negative(bits: int, dtype: str) -> bool:
    return bool(bits >> (31 if dtype == "float32" else 15))


def code_row(values: Sequence[int], scale: Fraction, dtype: str) -> Row:
    return [code_of(read(bits, dtype), scale, is_negative(bits, dtype)) for bits in values]


def scale_number(scale: Sequence[int] | None) -> Fraction:
    if scale is None:
        return Fraction(1)
    (bits,) = scale
    found = read(bits, "float32")
    assert isinstance(found, Fraction)
    return found


def largest_of(dtype: str) -> Fraction:
    _, _, width, mantissa_bits = FORMATS[dtype]
    found = read(((2**width - 2) << mantissa_bits) | (2**mantissa_bits - 1), dtype)
    assert isinstance(found, Fraction)
    return found


def tile_scale(values: Sequence[int], dtype: str, scale_format: str) -> Fraction:
    """Return the scale of the amax; NaN is ignored, and infinity is the largest number."""
    numbers = [read(bits, dtype) for bits in values]
    finite = [abs(x) for x in numbers if isinstance(x, Fraction)]
    infinite = [largest_of(dtype) for x in numbers if x in ("inf", "-inf")]
    wanted = f32(max([*finite, *infinite], default=ZERO) / 448)
    if scale_format == "float32":
        return max(wanted, SMALLEST_NORMAL)
    wanted, power = max(wanted, f32(Fraction("1e-4"))), Fraction(1, 2**200)
    while power < wanted:
        power *= 2
    return power


def tile_row(kv_c: Sequence[int], k_pe: Sequence[int], dtype: str, scale_format: str) -> Row:
    """Return a row's 512 codes, 4 scales and 64 bf16 values."""
    codes, scales = [], []
    for first in range(0, LATENT, TILE):
        tile = kv_c[first : first + TILE]
        scale = tile_scale(tile, dtype, scale_format)
        scales += bits_of(scale, "float32").to_bytes(4, "little")
        codes += code_row(tile, scale, dtype)
    rope = [byte for bits in k_pe for byte in as_bf16(bits, dtype).to_bytes(2, "little")]
    return codes + scales + rope


def as_bf16(bits: int, dtype: str) -> int:
    if dtype == "bfloat16":
        return bits
    x, negative = read(bits, dtype), is_negative(bits, dtype)
    if isinstance(x, str):
        return {"nan": BF16_NAN, "inf": 0x7F80, "-inf": 0xFF80}[x]
    return bits_of(x, "bfloat16", negative)


def mla_insert_kv(
    kv_c: Rows, k_pe: Rows, kv_cache: Pages, slot_mapping: Sequence[int],
    scale: Sequence[int] | None = None, *, block_size: int, layout: str, scale_format: str,
    dtype: str,
) -> list[list[Row]]:  # fmt: skip
    pages = [[list(row) for row in page] for page in kv_cache]
    for token, page, row in places(slot_mapping, len(pages), block_size):
        latent, rope = list(kv_c[token]), list(k_pe[token])
        if layout == "plain":
            pages[page][row] = latent + rope
        elif layout == "mla_fp8":
            pages[page][row] = code_row(latent + rope, scale_number(scale), dtype)
        else:
            pages[page][row] = tile_row(latent, rope, dtype, scale_format)
    return pages


def mla_gather_codes(
    kv_cache: Pages, slot_mapping: Sequence[int], *, block_size: int, layout: str, width: int
) -> list[Row]:
    found = [[0] * width for _ in slot_mapping]
    for row, page, place in places(slot_mapping, len(kv_cache), block_size):
        found[row] = list(kv_cache[page][place])
    return found


def code_number(code: int) -> Number:
    return "nan" if code & 0x7F == NAN_CODE else Fraction(CODE_VALUES[code])


@cache
def product_bits(code: int, scale: Number) -> int:
    """Return the bf16 bits of a code times a scale: a float32 product, rounded again."""
    negative, x = code >= CODE_SIGN, code_number(code)
    if isinstance(x, Fraction) and isinstance(scale, Fraction):
        negative = (code >= CODE_SIGN) != (scale < 0)
        return bits_of(f32(x * scale), "bfloat16", negative)
    if "nan" in (x, scale) or x == 0:
        return BF16_NAN
    assert isinstance(x, Fraction)
    return 0xFF80 if negative != (scale == "-inf") else 0x7F80


def tile_values(row: Sequence[int]) -> Row:
    """Return the bf16 bits of a row of 656 bytes."""
    found, scales = [], bytes(row[LATENT : LATENT + 16])
    for place, code in enumerate(row[:LATENT]):
        first = place // TILE * 4
        bits = int.from_bytes(scales[first : first + 4], "little")
        found.append(scaled_bits(code, bits))
    rope = bytes(row[LATENT + 16 :])
    return found + [int.from_bytes(rope[at : at + 2], "little") for at in range(0, len(rope), 2)]


@cache
def scaled_bits(code: int, scale_bits: int) -> int:
    scale = read(scale_bits, "float32")
    if scale == 0:  # positive or negative
        if code_number(code) == "nan":
            return BF16_NAN
        return 0x8000 * ((code >= CODE_SIGN) != bool(scale_bits >> 31))
    return product_bits(code, scale)


def mla_dequantize_rows(
    codes: Rows, scale: Sequence[int] | None = None, *, layout: str
) -> list[Row]:
    if layout == "mla_fp8":
        return [[product_bits(code, scale_number(scale)) for code in row] for row in codes]
    return [tile_values(row) for row in codes]


def mla_gather_kv(
    kv_cache: Pages,
    slot_mapping: Sequence[int],
    scale: Sequence[int] | None = None,
    *,
    block_size: int,
    layout: str,
    width: int,
) -> list[Row]:
    given = {"block_size": block_size, "layout": layout, "width": width}
    rows = mla_gather_codes(kv_cache, slot_mapping, **given)
    return rows if layout == "plain" else mla_dequantize_rows(rows, scale, layout=layout)


def quantize_per_tensor(x: Rows, *, dtype: str) -> tuple[list[Row], Row]:
    """Return the codes of x * (448 / amax), and amax / 448; numbers are finite."""
    numbers = [[read(bits, dtype) for bits in row] for row in x]
    assert all(isinstance(number, Fraction) for row in numbers for number in row)
    amax = max([abs(number) for row in numbers for number in row], default=ZERO)
    factor = f32(448 / max(amax, f32(Fraction("1e-10"))))
    codes = [
        [
            CODES[nearest(min(abs(f32(number * factor)), MOST), 4, -9)]
            | CODE_SIGN * is_negative(bits, dtype)
            for bits, number in zip(row, line, strict=True)
        ]
        for row, line in zip(x, numbers, strict=True)
    ]
    return codes, [bits_of(1 / factor, "float32")]

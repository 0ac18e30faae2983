"""The rotation and what follows it once more, slowly, in Python numbers: every float32 operation
is one of float64, rounded once. Nothing here imports torch."""

import math
import struct
from collections.abc import Sequence

from tests.oracles import kv as oracles_kv
from tests.oracles.kv import Row, Rows

ROPE_FIRST = 448
NAN = 0x7FC0
ACTIVATION_BLOCK, ACTIVATION_SCALE = 128, 85


def f32(value: float) -> float:
    """The nearest float32. Products and sums of two float32 are rounded only here: float64 holds
    the products exactly, and rounding a sum twice is harmless with 29 digits to spare."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def bits_of(value: float) -> int:
    """bf16 bits of a float32, to nearest even."""
    if math.isnan(value):
        return NAN
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


def value_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def rotated(row: Sequence[float], position: int, table: Sequence[Sequence[float]]) -> list[float]:
    """float32 pairs of a row, or the row itself."""
    if not 0 <= position < len(table):
        return list(row)
    half, out = len(row) // 2, []
    for pair in range(half):
        even, odd = row[2 * pair], row[2 * pair + 1]
        cos, sin = table[position][pair], table[position][half + pair]
        out.append(f32(f32(even * cos) - f32(odd * sin)))
        out.append(f32(f32(odd * cos) + f32(even * sin)))
    return out


def rotated_key(
    key: Sequence[int], position: int, table: Sequence[Sequence[float]], first: int = ROPE_FIRST
) -> Row:
    """bf16 bits of a key whose values from ``first`` on are rotated."""
    tail = rotated([value_of(bits) for bits in key[first:]], position, table)
    return [*key[:first], *map(bits_of, tail)]


def inserted(
    kv: Rows,
    k_cache: Sequence[Rows],
    slot_mapping: Sequence[int],
    positions: Sequence[int],
    table: Sequence[Sequence[float]],
    *,
    block_size: int,
    layout: str,
) -> list[Row]:
    """The cache that ``qnorm_rope_kv_insert`` leaves behind."""
    keys = [rotated_key(key, position, table) for key, position in zip(kv, positions, strict=True)]
    if layout == "plain":
        return oracles_kv.insert_k_cache(keys, k_cache, slot_mapping)
    insert = oracles_kv.quantize_and_insert_k_cache
    return insert(keys, k_cache, slot_mapping, block_size=block_size)


def quantized(row: Row) -> tuple[Row, Row]:
    """e4m3 codes of the bf16 bits of activations, and a scale byte for every 128 of them."""
    codes, scales = [], []
    for start in range(0, len(row), ACTIVATION_BLOCK):
        block = row[start : start + ACTIVATION_BLOCK]
        amax = oracles_kv.bf16_magnitude(oracles_kv.largest_magnitude(block))
        byte = ACTIVATION_SCALE
        while amax > 448 << (byte - 127 + 133):
            byte += 1
        encoder = oracles_kv.encoder(byte)
        codes += [encoder[bits] for bits in block]
        scales.append(byte)
    return codes, scales

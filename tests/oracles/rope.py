"""Oracles of the rotation and of the ops after it, in Python numbers: a float32 operation is a
float64 operation, rounded once. This file does not import torch."""

import math
from collections.abc import Sequence

from tests.oracles import kv as oracles_kv
from tests.oracles.compressor import bits_of, single, value_of
from tests.oracles.kv import Row, Rows

ROPE_FIRST = 448
NAN = 0x7FC0
ACTIVATION_BLOCK, ACTIVATION_SCALE = 128, 85


def bf16_bits(value: float) -> int:
    """Return the bf16 bits of a float32, rounded to nearest even."""
    word = bits_of(value)
    return NAN if math.isnan(value) else (word + 0x7FFF + (word >> 16 & 1)) >> 16


def rotated(
    row: Sequence[float],
    angles: Sequence[float],
    rope_first: bool = False,
    interleaved: bool = True,
) -> list[float]:
    """Rotate the end or the start of a row in pairs; round each product and sum to float32."""
    row, half = list(row), len(angles) // 2
    first = 0 if rope_first else len(row) - 2 * half
    for pair in range(half):
        cos, sin = angles[pair], angles[half + pair]
        left = first + (2 * pair if interleaved else pair)
        right = left + (1 if interleaved else half)
        even, odd = row[left], row[right]
        row[left] = single(single(even * cos) - single(odd * sin))
        row[right] = single(single(odd * cos) + single(even * sin))
    return row


def rotated_key(
    key: Sequence[int], position: int, table: Sequence[Sequence[float]], first: int = ROPE_FIRST
) -> Row:
    """Return bf16 bits of a key, with values from ``first`` on rotated if the position exists."""
    angles = table[position] if 0 <= position < len(table) else []
    tail = rotated([value_of(bits << 16) for bits in key[first:]], angles)
    return [*key[:first], *map(bf16_bits, tail)]


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
    """Return the cache after ``qnorm_rope_kv_insert``."""
    keys = [rotated_key(key, position, table) for key, position in zip(kv, positions, strict=True)]
    if layout == "plain":
        return oracles_kv.insert_k_cache(keys, k_cache, slot_mapping)
    insert = oracles_kv.quantize_and_insert_k_cache
    return insert(keys, k_cache, slot_mapping, block_size=block_size)


def quantized(row: Row) -> tuple[Row, Row]:
    """Quantise bf16 bits of activations to e4m3 codes, with a scale byte per 128 codes."""
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

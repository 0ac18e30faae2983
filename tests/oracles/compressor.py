"""Oracles of the compressor's states on bit patterns, written from the specification.

``dsv4_ops/testing/cases/compressor.py`` has float64 results for the rows of windows.
"""

import struct


def bits_of(value: float) -> int:
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def value_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def single(value: float) -> float:
    """Round to float32. A rounded double sum of two float32 values is their float32 sum."""
    return value_of(bits_of(value))


def save_compressor_states(
    kv_score: list[list[int]],
    ape: list[list[int]],
    states: list[list[int]],
    slot_mapping: list[int],
    positions: list[int],
    *,
    compress_ratio: int,
    block_size: int,
) -> list[list[int]]:
    written = [list(page) for page in states]
    width = len(ape[0])
    for row, slot, position in zip(kv_score, slot_mapping, positions, strict=True):
        if position < 0 or not 0 <= slot < len(states) * block_size:
            continue
        bias = ape[position % compress_ratio]
        start = slot % block_size * 2 * width
        page = written[slot // block_size]
        for column in range(width):
            page[start + column] = row[column]
            score = value_of(row[width + column]) + value_of(bias[column])
            page[start + width + column] = bits_of(score)
    return written

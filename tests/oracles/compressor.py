"""The compressor once more, slowly, in Python floats and lists: what the specification says.

``save_compressor_states`` works on bit patterns, as the other oracles do. ``compressed_rows`` gives
the rows before they are stored, in double precision; only what the specification stores in
float32, the biased score, is rounded to it.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

Floats = Sequence[Sequence[float]]


def bits_of(value: float) -> int:
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def value_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def single(value: float) -> float:
    """Rounded to float32; of a sum of two float32 in double precision that is the float32 sum."""
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


def window(
    kv_score: Floats,
    ape: Floats,
    states: Floats,
    table: Sequence[Sequence[int]],
    positions: Sequence[int],
    requests: Sequence[int],
    token: int,
    *,
    head_dim: int,
    ratio: int,
    overlap: bool,
    state_block_size: int,
) -> list[tuple[list[float], list[float]]]:
    """kv and score of every existing row of the window that a token ends, oldest first."""
    width, last, request = len(ape[0]), positions[token], requests[token]
    rows = []
    length = 2 * ratio if overlap else ratio
    for position in range(last - length + 1, last + 1):
        if position < 0:
            continue
        other = token - (last - position)
        if other >= 0 and (requests[other], positions[other]) == (request, position):
            bias = ape[position % ratio]
            kv = list(kv_score[other][:width])
            score = [single(s + b) for s, b in zip(kv_score[other][width:], bias, strict=True)]
        else:
            block = position // state_block_size
            page = table[request][block] if block < len(table[request]) else -1
            if not 0 <= page < len(states):
                continue
            start = position % state_block_size * 2 * width
            row = states[page][start : start + 2 * width]
            kv, score = list(row[:width]), list(row[width:])
        older = overlap and position <= last - ratio
        left = head_dim if overlap and not older else 0
        rows.append((kv[left : left + head_dim], score[left : left + head_dim]))
    return rows


def weighted(kv: Sequence[float], score: Sequence[float]) -> float:
    """Softmax of the scores times kv."""
    row_max = max(score)
    weights = [math.exp(value - row_max) for value in score]
    return math.fsum(w * v for w, v in zip(weights, kv, strict=True)) / math.fsum(weights)


def rotated(row: list[float], angles: Sequence[float]) -> list[float]:
    """The pairs at the end of a row, rotated by [cos | sin]."""
    half = len(angles) // 2
    first = len(row) - 2 * half
    for pair in range(half):
        cos, sin = angles[pair], angles[half + pair]
        even, odd = row[first + 2 * pair], row[first + 2 * pair + 1]
        row[first + 2 * pair] = even * cos - odd * sin
        row[first + 2 * pair + 1] = odd * cos + even * sin
    return row


def compressed_rows(
    kv_score: Floats,
    ape: Floats,
    states: Floats,
    state_block_table: Sequence[Sequence[int]],
    positions: Sequence[int],
    req_indices: Sequence[int],
    norm_weight: Sequence[float],
    cos_sin_cache: Floats,
    slot_mapping: Sequence[int],
    *,
    num_slots: int,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    **others: Any,
) -> list[list[float]]:
    """The rows that are written, in the order of the tokens."""
    found = []
    for token, slot in enumerate(slot_mapping):
        position, request = positions[token], req_indices[token]
        if not 0 <= slot < num_slots or not 0 <= request < len(state_block_table):
            continue
        if not 0 <= position < 2**31 - 1 or (position + 1) % compress_ratio != 0:
            continue
        rows = window(
            kv_score,
            ape,
            states,
            state_block_table,
            positions,
            req_indices,
            token,
            head_dim=len(norm_weight),
            ratio=compress_ratio,
            overlap=overlap,
            state_block_size=state_block_size,
        )
        channels = range(len(norm_weight))
        row = [weighted([kv[d] for kv, _ in rows], [s[d] for _, s in rows]) for d in channels]
        mean = math.fsum(value * value for value in row) / len(row)
        row = [v / math.sqrt(mean + eps) * w for v, w in zip(row, norm_weight, strict=True)]
        first = position - compress_ratio + 1
        found.append(rotated(row, cos_sin_cache[first] if first < len(cos_sin_cache) else []))
    return found

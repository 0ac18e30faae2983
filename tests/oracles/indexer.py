"""The lightning indexer once more, slowly, in Python ints and floats: what the specification says.

Tensors are nested lists of patterns, as for ``oracles_kv``. Scores are sums in double precision, so
that they are those of float32 only where these are exact.
"""

import math
from collections.abc import Sequence
from typing import Any

from tests.oracles.batch import narrow_slot
from tests.oracles.compressor import bits_of, single, value_of
from tests.oracles.kv import (
    CODE_NAN,
    INDEXER_DATA,
    INDEXER_SCALES,
    code_magnitude,
    find_row,
    quantize,
)

Rows = Sequence[Sequence[int]]


def nearest_bf16(value: float) -> int:
    """Pattern of a float32 value rounded to nearest even."""
    bits = bits_of(value)
    if math.isnan(value):
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def rotated(
    row: list[float], angles: Sequence[float], rope_first: bool = False, interleaved: bool = True
) -> list[float]:
    """The end or the start of a row, in pairs, every product and every sum rounded to float32."""
    half = len(angles) // 2
    first = 0 if rope_first else len(row) - 2 * half
    for pair in range(half):
        cos, sin = angles[pair], angles[half + pair]
        left = first + (2 * pair if interleaved else pair)
        right = left + (1 if interleaved else half)
        even, odd = row[left], row[right]
        row[left] = single(single(even * cos) - single(odd * sin))
        row[right] = single(single(odd * cos) + single(even * sin))
    return row


def indexer_quantize_q(
    q: Sequence[Rows],
    weights: Rows,
    positions: Sequence[int],
    cos_sin_cache: Rows,
    *,
    softmax_scale: float,
    bf16_weights: bool,
    **places: bool,
) -> tuple[list[list[list[int]]], list[list[int]]]:
    codes, scaled = [], []
    for heads, row, position in zip(q, weights, positions, strict=True):
        known = 0 <= position < len(cos_sin_cache)
        angles = [value_of(bits) for bits in cos_sin_cache[position]] if known else []
        codes.append([])
        scaled.append([])
        for head, weight in zip(heads, row, strict=True):
            values = rotated([value_of(bits << 16) for bits in head], angles, **places)
            byte, values = quantize([nearest_bf16(value) for value in values])
            number = value_of(weight << 16 if bf16_weights else weight)
            codes[-1].append(values)
            scaled[-1].append(bits_of(single(number * 2.0 ** (byte - 127)) * single(softmax_scale)))
    return codes, scaled


def decoded(code: int) -> float:
    if code & 0x7F == CODE_NAN:
        return math.nan
    return math.copysign(code_magnitude(code) / 512, -1 if code & 0x80 else 1)


def relu(value: float) -> float:
    return value if math.isnan(value) else max(value, 0.0)


def score(
    query: Sequence[Sequence[float]], weights: Sequence[float], key: Sequence[float], scale: float
) -> float:
    total = 0.0
    for head, weight in zip(query, weights, strict=True):
        total += weight * relu(sum(q * k for q, k in zip(head, key, strict=True)))
    return total * scale


def number(bits: int, bf16: bool) -> float:
    return value_of(bits << 16 if bf16 else bits)


def stored(page: Any, place: int, block_size: int, bf16: bool | None) -> tuple[list[float], float]:
    """A key and its scale: of an FP8 block, or where ``bf16`` says how, of a plain one."""
    if bf16 is not None:
        return [number(bits, bf16) for bits in page[place]], 1.0
    first = block_size * INDEXER_DATA + place * INDEXER_SCALES
    scale = value_of(int.from_bytes(bytes(page[first : first + 4]), "little"))
    return [decoded(c) for c in page[place * INDEXER_DATA : (place + 1) * INDEXER_DATA]], scale


def paged_scores(
    query: Sequence[Sequence[float]],
    weights: Sequence[float],
    k_cache: Sequence[Any],
    length: int,
    table_row: Sequence[int],
    block_size: int,
    bf16: bool | None,
) -> dict[int, float]:
    """Scores of the rows among the first ``length`` whose blocks exist."""
    found = {}
    known: dict[tuple[int, int], float] = {}
    for row in range(min(length, len(table_row) * block_size)):
        at = find_row(row, table_row, len(k_cache), block_size)
        if at is None:
            continue
        if at not in known:
            known[at] = score(query, weights, *stored(k_cache[at[0]], at[1], block_size, bf16))
        found[row] = known[at]
    return found


def best(scores: dict[int, float], topk: int) -> list[int]:
    """Highest scores first, NaN last, of equal ones the lowest index; then in ascending order."""

    def rank(index: int) -> tuple[bool, float, int]:
        value = scores[index]
        return math.isnan(value), 0.0 if math.isnan(value) else -value, index

    chosen = sorted(sorted(scores, key=rank)[:topk])
    return chosen + [-1] * (topk - len(chosen))


def indexer_topk(logits: Rows, lens: Sequence[int], *, topk: int) -> list[list[int]]:
    rows = []
    for row, length in zip(logits, lens, strict=True):
        values = [value_of(bits) for bits in row[: max(length, 0)]]
        rows.append(best({i: v for i, v in enumerate(values) if v != -math.inf}, topk))
    return rows


def indexer_select(
    q: Sequence[Rows],
    weights: Rows,
    k_cache: Sequence[Any],
    positions: Sequence[int],
    req_indices: Sequence[int],
    block_table: Rows,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    layout: str,
    slots: bool = False,
    bf16: bool | None,
) -> list[list[int]]:
    """``bf16`` says which patterns a plain layout has."""
    assert (layout == "plain") == (bf16 is not None)
    rows = []
    for heads, row, position, request in zip(q, weights, positions, req_indices, strict=True):
        scores: dict[int, float] = {}
        if 0 <= request < len(block_table) and 0 <= position < 2**31 - 1:
            length = (position + 1) // compress_ratio
            factors = [value_of(bits) for bits in row]
            query = [
                [decoded(bits) if bf16 is None else number(bits, bf16) for bits in head]
                for head in heads
            ]
            table_row = block_table[request]
            scores = paged_scores(query, factors, k_cache, length, table_row, block_size, bf16)
        chosen = best(scores, topk)
        if slots:
            chosen = [
                -1 if index < 0 else narrow_slot(block_table[request], index, block_size)
                for index in chosen
            ]
        rows.append(chosen)
    return rows

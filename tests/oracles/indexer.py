"""Oracles of the lightning indexer in Python ints and floats, written from the specification.

Tensors are nested lists of bit patterns, as in ``kv.py``. Scores are sums in double precision, so
they equal float32 scores only if the float32 sums are exact.
"""

import math
from collections.abc import Sequence

from tests.oracles.compressor import bits_of, single, value_of
from tests.oracles.kv import quantize
from tests.oracles.rope import bf16_bits, rotated

Rows = Sequence[Sequence[int]]


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
            byte, values = quantize([bf16_bits(value) for value in values])
            number = value_of(weight << 16 if bf16_weights else weight)
            codes[-1].append(values)
            scaled[-1].append(bits_of(single(number * 2.0 ** (byte - 127)) * single(softmax_scale)))
    return codes, scaled


def best(candidates: list[tuple[int, float]], topk: int) -> list[int]:
    """Return the best candidates (NaN last, of equal scores the lowest index) in index order."""

    def rank(candidate: tuple[int, float]) -> tuple[bool, float, int]:
        index, score = candidate
        return math.isnan(score), 0.0 if math.isnan(score) else -score, index

    chosen = sorted(index for index, _ in sorted(candidates, key=rank)[:topk])
    return chosen + [-1] * (topk - len(chosen))


def indexer_topk(logits: Rows, lens: Sequence[int], *, topk: int) -> list[list[int]]:
    rows = []
    for row, length in zip(logits, lens, strict=True):
        values = [value_of(bits) for bits in row[: max(length, 0)]]
        rows.append(best([(i, v) for i, v in enumerate(values) if v != -math.inf], topk))
    return rows

"""Oracles of the packing ops on nested lists. This file does not import torch."""

from typing import Any


def filled(shape: list[int], value: Any) -> Any:
    """Return nested lists of one value."""
    return [filled(shape[1:], value) for _ in range(shape[0])] if shape else value


def pack_seq(
    x: list[Any],
    query_start_loc: list[int],
    *,
    next_n: int,
    pad: float,
    trailing: list[int],
    filler: Any,
) -> list[Any]:
    packed = []
    for request in range(len(query_start_loc) - 1):
        start, stop = query_start_loc[request], query_start_loc[request + 1]
        tokens = [start + place for place in range(next_n)]
        rows = [
            x[token] if token < stop and 0 <= token < len(x) else filled(trailing, filler)
            for token in tokens
        ]
        packed.append(rows)
    return packed


def unpack_seq(
    packed: list[Any],
    query_start_loc: list[int],
    *,
    num_tokens: int,
    trailing: list[int],
    zero: Any,
) -> list[Any]:
    rows = filled([num_tokens, *trailing], zero)
    for request, held in enumerate(packed):
        start, stop = query_start_loc[request], query_start_loc[request + 1]
        for place, token in enumerate(range(start, stop)):
            if token < num_tokens and place < len(held):
                rows[token] = held[place]
    return rows

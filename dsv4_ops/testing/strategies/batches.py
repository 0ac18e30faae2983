"""Hypothesis strategies over batch structure: empty and padding requests, boundary lengths.

Structure comes from hypothesis, so that hypothesis can shrink it; bulk contents (block numbers)
come from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.testing.case import Case, Make, i32, i64
from dsv4_ops.testing.strategies.draw import Draw, strategy_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

BOUNDARIES = (1, 2, 4, 64, 127, 128, 256)
"""Boundary positions: ratios 4 and 128, the window, blocks of 2, 64 and 256 rows."""

INT32_MIN = -(2**31)
LAST_POSITION = INT32_MAX - 1
"""Last position that a token can have, because seq_lens is int32."""
LATE_POSITIONS = (INT32_MAX, 2**31, 2**32 + 3, 2**40, 2**63 - 1)
BAD_REQUESTS = (-1, -5, 10**9, INT32_MAX, INT32_MIN)
BAD_POSITIONS = (-1, -4, -128, -(2**40), *LATE_POSITIONS)
"""``BAD_REQUESTS`` and ``BAD_POSITIONS``: requests and positions that no token has."""

ADVERSARIAL_BLOCKS = (-1, INT32_MIN, INT32_MAX, 2**30, 33_554_431, 33_554_432)
ADVERSARIAL_POSITIONS = (*BAD_POSITIONS, LAST_POSITION)


@dataclass(frozen=True)
class Batch:
    """A padded batch as a scheduler passes it, with its token map."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    req_indices: Tensor
    positions: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the padded batch."""
        return self.slot_mapping.shape[0]


def lengths(draw: Draw) -> int:
    """Sample a context length at or next to a boundary, or any small length."""
    if draw.flag():
        return draw.integer(0, 600)
    return max(0, draw.one_of(*BOUNDARIES) * draw.integer(0, 3) + draw.integer(-1, 1))


def requests(draw: Draw, *, min_size: int = 0, max_query: int = 9) -> list[tuple[int, int]]:
    """Sample (query length, sequence length) of requests. Some requests are empty, padding or too
    short."""
    kinds = draw.st.sampled_from(("decode", "decode", "short", "padding", "empty", "too short"))
    result = []
    for kind in draw(draw.st.lists(kinds, min_size=min_size, max_size=12)):
        query = {"decode": 1, "padding": 0, "empty": 0}.get(kind)
        query = draw.integer(1, max_query) if query is None else query
        context = lengths(draw)
        if kind == "padding":
            result.append((0, 0))
        elif kind == "too short":
            result.append((query, draw.integer(0, query)))
        else:
            result.append((query, context + query))
    return result


def tables(draw: Draw, *, num_reqs: int, min_size: int = 0, adversarial: bool = True) -> Tensor:
    """Sample a block table with enough, too few or no columns, and a few invalid entries."""
    shape = (num_reqs, max(draw.one_of(0, 1, 2, 3, 11, 40), min_size))
    table = torch.randint(0, 5000, shape, generator=draw.generator(), dtype=torch.int32)
    if adversarial:
        draw.spoil(table, ADVERSARIAL_BLOCKS, 6)
    return table


def ragged_batch(
    draw: Draw, *, min_size: int = 0, max_query: int = 9, adversarial: bool = True
) -> Batch:
    """Sample a ragged batch of decodes, short prefills, padding and adversarial tables."""
    lens = requests(draw, min_size=min_size, max_query=max_query)
    query = torch.tensor([q for q, _ in lens], dtype=torch.int64)
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), query.cumsum(0)])
    total = int(query_start_loc[-1])
    num_tokens = max(min_size, 0, total + draw.one_of(0, 0, 1, 3, -1, -4))
    req_indices, positions = _token_map(lens, num_tokens)
    slots = [t if draw.integer(0, 5) else -1 for t in range(num_tokens)]
    if adversarial:
        draw.spoil(req_indices, BAD_REQUESTS, 3)
        draw.spoil(positions, ADVERSARIAL_POSITIONS, 3)
    return Batch(
        query_start_loc=query_start_loc.to(torch.int32),
        seq_lens=i32([length for _, length in lens]),
        block_table=tables(draw, num_reqs=len(lens), min_size=min_size, adversarial=adversarial),
        slot_mapping=i64(slots),
        req_indices=i32(req_indices),
        positions=i64(positions),
    )


def batches(
    *, min_size: int = 0, max_query: int = 9, adversarial: bool = True
) -> SearchStrategy[Batch]:
    """Return a Hypothesis strategy of ragged batches.

    The batches contain decodes, short prefills and padding, with adversarial tables.

    Args:
        min_size: Minimum number of requests, tokens and table columns.
        max_query: Maximum query tokens of a request.
        adversarial: Whether to sample invalid table entries, requests and positions too.
    """
    return strategy_of(
        ragged_batch, min_size=min_size, max_query=max_query, adversarial=adversarial
    )


def calls_of(*names: str) -> Make:
    """Return a sampler of calls whose tensors are the fields ``names`` of a ragged batch."""

    def call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
        batch = ragged_batch(draw, min_size=min_size)
        return Case("sampled", tuple(getattr(batch, name) for name in names), settings)

    return call


def _token_map(lens: list[tuple[int, int]], num_tokens: int) -> tuple[list[int], list[int]]:
    """Compute request and position of every token by a walk over the requests."""
    req_indices, positions = [], []
    for request, (query, length) in enumerate(lens):
        for token in range(query):
            position = length - query + token
            req_indices.append(request if position >= 0 else -1)
            positions.append(max(position, -1))
    padding = [-1] * max(0, num_tokens - len(positions))
    return (req_indices + padding)[:num_tokens], (positions + padding)[:num_tokens]

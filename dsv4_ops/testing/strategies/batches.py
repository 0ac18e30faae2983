"""Hypothesis strategies over batch structure: empty and padding requests, boundary lengths.

Structure comes from hypothesis, so that it shrinks; bulk contents (block numbers) from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4_ops.testing.case import i32, i64

BOUNDARIES = (1, 2, 4, 64, 127, 128, 256)
"""Positions where something changes: ratios 4 and 128, the window, blocks of 2, 64 and 256 rows."""

ADVERSARIAL_BLOCKS = (-1, -(2**31), 2**31 - 1, 2**30, 33_554_431, 33_554_432)
ADVERSARIAL_REQUESTS = (-1, -5, 2**31 - 1, 10**9)
ADVERSARIAL_POSITIONS = (-1, -128, 2**31 - 2, 2**31 - 1, 2**40)


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


@st.composite
def lengths(draw: Any) -> int:
    """A context length at or next to a boundary, or any small one."""
    if draw(st.booleans()):
        anything: int = draw(st.integers(0, 600))
        return anything
    multiple: int = draw(st.sampled_from(BOUNDARIES)) * draw(st.integers(0, 3))
    offset: int = draw(st.integers(-1, 1))
    return max(0, multiple + offset)


@st.composite
def requests(draw: Any, *, min_size: int = 0, max_query: int = 9) -> list[tuple[int, int]]:
    """(query length, sequence length) per request; some empty, padding or too short."""
    kinds = st.sampled_from(("decode", "decode", "short", "padding", "empty", "too short"))
    result = []
    for kind in draw(st.lists(kinds, min_size=min_size, max_size=12)):
        query = {"decode": 1, "padding": 0, "empty": 0}.get(kind)
        query = draw(st.integers(1, max_query)) if query is None else query
        context = draw(lengths())
        if kind == "padding":
            result.append((0, 0))
        elif kind == "too short":
            result.append((query, draw(st.integers(0, query))))
        else:
            result.append((query, context + query))
    return result


@st.composite
def tables(draw: Any, *, num_reqs: int, min_size: int = 0, adversarial: bool = True) -> Tensor:
    """A block table with enough columns, too few or none, and a few impossible entries."""
    columns = draw(st.sampled_from((0, 1, 2, 3, 11, 40)))
    columns = max(columns, min_size)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    table = torch.randint(0, 5000, (num_reqs, columns), generator=generator, dtype=torch.int32)
    if adversarial and table.numel():
        for entry in draw(st.lists(st.integers(0, table.numel() - 1), max_size=6)):
            table.view(-1)[entry] = draw(st.sampled_from(ADVERSARIAL_BLOCKS))
    return table


@st.composite
def batches(draw: Any, *, min_size: int = 0, max_query: int = 9, adversarial: bool = True) -> Batch:
    """A ragged batch of decodes, short prefills, padding and adversarial tables.

    Args:
        draw: Given by hypothesis.
        min_size: Least number of requests, tokens and table columns.
        max_query: Most query tokens of a request.
        adversarial: Also draw table entries, requests and positions that do not exist.
    """
    lens = draw(requests(min_size=min_size, max_query=max_query))
    query = torch.tensor([q for q, _ in lens], dtype=torch.int64)
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), query.cumsum(0)])
    total = int(query_start_loc[-1])
    num_tokens = max(min_size, 0, total + draw(st.sampled_from((0, 0, 1, 3, -1, -4))))
    req_indices, positions = _token_map(lens, num_tokens)
    slots = [t if draw(st.integers(0, 5)) else -1 for t in range(num_tokens)]
    if adversarial and num_tokens:
        for token in draw(st.lists(st.integers(0, num_tokens - 1), max_size=3)):
            req_indices[token] = draw(st.sampled_from(ADVERSARIAL_REQUESTS))
        for token in draw(st.lists(st.integers(0, num_tokens - 1), max_size=3)):
            positions[token] = draw(st.sampled_from(ADVERSARIAL_POSITIONS))
    return Batch(
        query_start_loc=query_start_loc.to(torch.int32),
        seq_lens=i32([length for _, length in lens]).reshape(len(lens)),
        block_table=draw(tables(num_reqs=len(lens), min_size=min_size, adversarial=adversarial)),
        slot_mapping=i64(slots).reshape(num_tokens),
        req_indices=i32(req_indices).reshape(num_tokens),
        positions=i64(positions).reshape(num_tokens),
    )


def _token_map(lens: list[tuple[int, int]], num_tokens: int) -> tuple[list[int], list[int]]:
    """Request and position of every token, by walking the requests."""
    req_indices, positions = [], []
    for request, (query, length) in enumerate(lens):
        for token in range(query):
            position = length - query + token
            req_indices.append(request if position >= 0 else -1)
            positions.append(max(position, -1))
    padding = [-1] * max(0, num_tokens - len(positions))
    return (req_indices + padding)[:num_tokens], (positions + padding)[:num_tokens]

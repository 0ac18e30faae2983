"""Hypothesis strategies of the lightning indexer: queries, and caches full of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.float64.indexer import LARGEST_INTEGER
from dsv4_ops.testing.strategies.batches import ADVERSARIAL_BLOCKS, ragged_batch
from dsv4_ops.testing.strategies.caches import random_bytes
from dsv4_ops.testing.strategies.draw import Draw

_PLAIN = (torch.float32, torch.bfloat16)
_SPECIAL = (torch.nan, torch.inf, -torch.inf)


def values(seed: torch.Generator, shape: tuple[int, ...], exact: bool) -> Tensor:
    """Sample small integers with many equal rows if ``exact``, or else normal numbers."""
    if not exact:
        return torch.randn(shape, generator=seed)
    few = torch.randint(-2, 3, (3, *shape[1:]), generator=seed)
    rows = torch.randint(-LARGEST_INTEGER, LARGEST_INTEGER + 1, shape, generator=seed)
    which = torch.randint(0, 5, shape[:1], generator=seed)
    return torch.where((which < 3).view(-1, *[1] * (len(shape) - 1)), few[which % 3], rows).float()


def codes(seed: torch.Generator, shape: tuple[int, ...], exact: bool) -> Tensor:
    """Sample the uint8 e4m3 codes of ``values``."""
    return values(seed, shape, exact).to(torch.float8_e4m3fn).view(torch.uint8)


def query(
    seed: torch.Generator,
    num_tokens: int,
    num_heads: int,
    exact: bool,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """Sample queries of ``dtype`` and their weights."""
    q = values(seed, (num_tokens, num_heads, 128), exact).to(dtype)
    if exact:
        return q, torch.randint(-8, 17, (num_tokens, num_heads), generator=seed) / 8
    return q, torch.randn(num_tokens, num_heads, generator=seed)


class Paged(NamedTuple):
    """The tensors of a call over a paged cache."""

    q: Tensor
    weights: Tensor
    cache: Tensor
    positions: Tensor
    req_indices: Tensor
    table: Tensor


def in_rows(case: Case, next_n: int, mixed: bool) -> Case:
    """Return the call with positions or lengths [num_reqs, next_n]. The row of a request has the
    request's first tokens and padding. With ``mixed``, rows have tokens of all requests, and tokens
    may occur several times."""
    q, weights, cache, places, req_indices, table = (
        each for each in case.tensors if each is not None
    )
    num_tokens, num_reqs = q.shape[0], table.shape[0] if q.shape[0] else 0
    order = torch.arange(num_reqs * next_n).view(num_reqs, next_n) % max(num_tokens, 1)
    mask = torch.full(order.shape, mixed)
    for request in range(0 if mixed else num_reqs):
        own = (req_indices == request).nonzero()[:next_n, 0]
        order[request, : len(own)], mask[request, : len(own)] = own, True
    each = order.flatten()
    rows = (torch.where(mask, places[order], -1).to(places.dtype), req_indices[each], table)
    if not num_tokens:
        rows = (places.view(0, next_n), req_indices, table[:0])
    return Case(f"{case.name}, in rows", (q[each], weights[each], cache, *rows), case.settings)


def paged_calls(draw: Draw, *, settings: dict[str, Any], min_size: int) -> Paged:
    """Sample queries of a ragged batch, and a cache with keys in all rows.

    If all sums are exact, some keys are NaN or infinite.
    """
    exact, seed = draw.flag(), draw.generator()
    batch = ragged_batch(draw, min_size=min_size, max_query=4)
    num_blocks = max(draw.one_of(0, 1, 2, 3, 8), min_size)
    table = batch.block_table % max(num_blocks, 1)
    draw.spoil(table, (*ADVERSARIAL_BLOCKS, num_blocks), 4)
    if settings["layout"] == PlainLayout.tag:
        dtype = torch.float32 if min_size else draw.one_of(*_PLAIN)
        cache = _plain_cache(draw, seed, settings["block_size"], num_blocks, dtype, exact)
    else:
        dtype = torch.float8_e4m3fn
        cache = _coded_cache(draw, seed, settings["block_size"], num_blocks, exact)
    num_heads = 16 if min_size else draw.one_of(1, 3, 16)
    q, weights = query(seed, batch.num_tokens, num_heads, exact, dtype)
    return Paged(q, weights, cache, batch.positions, batch.req_indices, table)


def _some_rows(draw: Draw, num_blocks: int, block_size: int) -> list[int]:
    """Sample rows of a cache. Most rows are at the start of a block."""
    pages = draw.st.integers(0, num_blocks - 1)
    rows = draw.st.tuples(pages, draw.st.sampled_from((0, 1, 2, 3, block_size - 1)))
    sampled = draw(draw.st.lists(rows, max_size=4))
    return [page * block_size + row % block_size for page, row in sampled]


def _coded_cache(
    draw: Draw, seed: torch.Generator, block_size: int, num_blocks: int, exact: bool
) -> Tensor:
    layout = IndexerLayout(block_size)
    cache = random_bytes(seed, num_blocks, layout.page_bytes)
    rows, data = num_blocks * block_size, block_size * layout.data_bytes
    keys = codes(seed, (rows, 128), exact)
    scales = torch.exp2(torch.randint(-3, 3, (rows,), generator=seed).float())
    if exact and rows:
        for row in _some_rows(draw, num_blocks, block_size):
            keys[row, draw.integer(0, 127)] = draw.one_of(0x7F, 0xFF, 0x80)
        for row in _some_rows(draw, num_blocks, block_size):
            scales[row] = draw.one_of(*_SPECIAL)
    cache[:, :data] = keys.view(num_blocks, data)
    cache[:, data : data + 4 * block_size] = scales.view(torch.uint8).view(
        num_blocks, 4 * block_size
    )
    return cache


def _plain_cache(
    draw: Draw,
    seed: torch.Generator,
    block_size: int,
    num_blocks: int,
    dtype: torch.dtype,
    exact: bool,
) -> Tensor:
    rows = num_blocks * block_size
    keys = values(seed, (rows, 128), exact)
    if exact and rows:
        for row in _some_rows(draw, num_blocks, block_size):
            keys[row, draw.integer(0, 127)] = draw.one_of(*_SPECIAL, -0.0)
    return keys.to(dtype).view(num_blocks, block_size, 128)

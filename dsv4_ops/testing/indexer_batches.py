"""Hypothesis strategies of the lightning indexer: queries, and caches full of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.testing.batches import HOSTILE_PAGES, batches
from dsv4_ops.testing.caches import generator, random_bytes
from dsv4_ops.testing.indexer_scores import LARGEST_INTEGER


def codes(seed: torch.Generator, shape: tuple[int, ...], exact: bool) -> Tensor:
    """uint8 e4m3 codes: small integers of which many rows are alike, or anything but NaN."""
    if exact:
        few = torch.randint(-2, 3, (3, *shape[1:]), generator=seed)
        rows = torch.randint(-LARGEST_INTEGER, LARGEST_INTEGER + 1, shape, generator=seed)
        which = torch.randint(0, 5, shape[:1], generator=seed)
        rows = torch.where((which < 3).view(-1, *[1] * (len(shape) - 1)), few[which % 3], rows)
        return rows.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.randn(shape, generator=seed).to(torch.float8_e4m3fn).view(torch.uint8)


def query(
    seed: torch.Generator, num_tokens: int, num_heads: int, exact: bool
) -> tuple[Tensor, Tensor]:
    """e4m3 queries and their weights."""
    q = codes(seed, (num_tokens, num_heads, 128), exact).view(torch.float8_e4m3fn)
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


@st.composite
def pages_of(draw: Any, *, settings: dict[str, Any], min_size: int) -> Paged:
    """Queries of a ragged batch, and a cache with keys in all of its rows; of those that sum
    exactly, some are NaN or infinite."""
    exact, seed = draw(st.booleans()), generator(draw)
    batch = draw(batches(min_size=min_size, max_query=4))
    num_blocks = max(draw(st.sampled_from((0, 1, 2, 3, 8))), min_size)
    table = batch.block_table % max(num_blocks, 1)
    if table.numel():
        for entry in draw(st.lists(st.integers(0, table.numel() - 1), max_size=4)):
            table.view(-1)[entry] = draw(st.sampled_from((*HOSTILE_PAGES, num_blocks)))
    layout = IndexerLayout(settings["block_size"])
    cache = random_bytes(seed, num_blocks, layout.page_bytes)
    rows, data = num_blocks * layout.block_size, layout.block_size * layout.data_bytes
    keys = codes(seed, (rows, 128), exact)
    scales = torch.exp2(torch.randint(-3, 3, (rows,), generator=seed).float())
    if exact and rows:
        for row in draw(st.lists(st.integers(0, rows - 1), max_size=2)):
            keys[row, draw(st.integers(0, 127))] = draw(st.sampled_from((0x7F, 0xFF, 0x80)))
        for row in draw(st.lists(st.integers(0, rows - 1), max_size=2)):
            scales[row] = draw(st.sampled_from((torch.nan, torch.inf, -torch.inf)))
    cache[:, :data] = keys.view(num_blocks, data)
    cache[:, data : data + 4 * layout.block_size] = scales.view(torch.uint8).view(
        num_blocks, 4 * layout.block_size
    )
    num_heads = 16 if min_size else draw(st.sampled_from((1, 3, 16)))
    q, weights = query(seed, batch.num_tokens, num_heads, exact)
    return Paged(q, weights, cache, batch.positions, batch.req_indices, table)

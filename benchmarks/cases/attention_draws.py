"""Random inputs of sparse MLA on one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.cases.cache_cases import filled_pages
from dsv4_ops.core.layout import MainLayout

WINDOW, PAGE, PAGE_128 = 128, 64, 2
"""Keys of the window, and rows per block: of the window and C4 caches, and of the C128 cache."""

C4, C128 = 4, 128
PAGES = {C4: PAGE, C128: PAGE_128}
"""Rows per block of a compressed cache, by the ratio."""


class Draw:
    """Random inputs on one device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def queries(self, tokens: int, heads: int) -> Tensor:
        return self._values(tokens, heads, MainLayout.head_dim)

    def keys(self, count: int) -> Tensor:
        """Rows in bf16."""
        return self._values(count, MainLayout.head_dim)

    def _values(self, *shape: int) -> Tensor:
        values = torch.randn(shape, device=self.device, generator=self.generator)
        return values.clamp_(-1, 1).bfloat16()

    def sink(self, heads: int) -> Tensor:
        return torch.randn(heads, device=self.device, generator=self.generator)

    def rows(self, tokens: int, count: int, high: int) -> Tensor:
        """Sample ``count`` distinct rows below ``high`` per token, in ascending order."""
        order = torch.rand(tokens, high, device=self.device, generator=self.generator)
        return order.topk(count).indices.sort().values

    def window(self, tokens: int, pages: int) -> Tensor:
        """Sample a run of consecutive rows on the blocks of each token."""
        first = torch.randint(
            0, pages * PAGE - WINDOW + 1, (tokens, 1), device=self.device, generator=self.generator
        )
        return first + torch.arange(WINDOW, device=self.device)

    def cache(self, block_size: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Make a full cache, and block tables of random blocks, each of which is in one table
        only."""
        layout, pages = MainLayout(block_size), torch.Size(shape).numel()
        insert = functools.partial(
            dsv4_ops.quantize_and_insert_k_cache, block_size=layout.block_size
        )
        cache = filled_pages(layout, insert, pages, self.device, self.generator)
        order = torch.randperm(
            pages, generator=self.generator, device=self.device, dtype=torch.int32
        )
        return cache, order.view(shape)

    def lens(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def slots(table: Tensor, rows: Tensor, block_size: int, lens: Tensor) -> Tensor:
    """Compute the slots of requests' rows; -1 after the first ``lens``."""
    found = table.gather(1, rows // block_size) * block_size + rows % block_size
    column = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(column < lens[:, None], found, -1).to(torch.int32)

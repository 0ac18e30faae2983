"""Random inputs of sparse MLA on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.harness.draw import Draw
from dsv4_ops.core.layout import MainLayout

WINDOW, PAGE, PAGE_128 = 128, 64, 2
"""Keys of the window; rows per block of the window and C4 caches, and of the C128 cache."""

C4, C128 = 4, 128
PAGES = {C4: PAGE, C128: PAGE_128}
"""Rows per block of a compressed cache, by the ratio."""


class AttentionDraw(Draw):
    """Random inputs on one device."""

    def values(self, *shape: int) -> Tensor:
        """Sample queries or keys in bf16."""
        return self.normal(*shape).clamp_(-1, 1).bfloat16()

    def queries(self, tokens: int, heads: int) -> Tensor:
        return self.values(tokens, heads, MainLayout.head_dim)

    def rows(self, tokens: int, count: int, high: int) -> Tensor:
        """Sample ``count`` distinct rows below ``high`` per token, in ascending order."""
        return self.uniform(tokens, high).topk(count).indices.sort().values

    def window(self, tokens: int, pages: int) -> Tensor:
        """Sample a run of consecutive rows in the blocks of each token."""
        first = torch.randint(
            0, pages * PAGE - WINDOW + 1, (tokens, 1), device=self.device, generator=self.generator
        )
        return first + torch.arange(WINDOW, device=self.device)

    def cache(self, block_size: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Make a full cache, and tables of random blocks; each block is in one table only."""
        pages = torch.Size(shape).numel()
        return self.full(MainLayout(block_size), pages), self.order(pages).view(*shape)


def slots(table: Tensor, rows: Tensor, block_size: int, lens: Tensor) -> Tensor:
    """Compute the slots of requests' rows; entries after the first ``lens`` are -1."""
    found = table.gather(1, rows // block_size) * block_size + rows % block_size
    column = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(column < lens[:, None], found, -1).to(torch.int32)

"""Random tensors and caches on one device."""

from __future__ import annotations

import torch
from torch import Tensor

import dsv4_ops
from dsv4_ops.core.layout import IndexerLayout, Layout, QuantizedLayout

_FILLED_PAGES = 512  # number of blocks filled at a time, to bound the reference's memory


class Draw:
    """Random values, all from one generator."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator)

    def order(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Sample a permutation."""
        return torch.randperm(count, device=self.device, generator=self.generator, dtype=dtype)

    def ints(self, *values: int) -> Tensor:
        """Return int32 values on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def keys(self, *shape: int) -> Tensor:
        """Sample ordinary keys in bf16."""
        return (self.normal(*shape) * 0.3).bfloat16()

    def fill(self, cache: Tensor, layout: QuantizedLayout) -> None:
        """Write an ordinary key to every row."""
        insert = dsv4_ops.quantize_and_insert_k_cache
        if isinstance(layout, IndexerLayout):
            insert = dsv4_ops.quantize_and_insert_indexer_k
        for start in range(0, cache.shape[0], _FILLED_PAGES):
            part = cache[start : start + _FILLED_PAGES]
            slots = torch.arange(part.shape[0] * layout.block_size, device=self.device)
            keys = self.keys(slots.shape[0], layout.head_dim)
            insert(keys, part, slots, block_size=layout.block_size)

    def full(self, layout: QuantizedLayout, pages: int) -> Tensor:
        """Make a cache of ordinary keys."""
        cache = layout.allocate(pages, self.device)
        self.fill(cache, layout)
        return cache

    def junk(self, layout: Layout, pages: int) -> Tensor:
        """Make a cache of random bytes, which shows writes to wrong bytes."""
        cache = layout.allocate(pages, self.device)
        junk = torch.randint(0, 256, (cache.nbytes,), dtype=torch.uint8, device=self.device,
                             generator=self.generator)  # fmt: skip
        cache.view(torch.uint8).view(-1).copy_(junk)
        return cache

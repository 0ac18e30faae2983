"""Cache buffers that compiled and captured graphs write in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.ints import at_least
from dsv4_ops.core.layout import Layout


def mark_static(*tensors: Tensor) -> None:
    """Tell torch.compile that these tensors keep their addresses.

    Inductor skips CUDA graphs for a function that mutates an unmarked argument. Call this before
    the first compile; module buffers (such as ``KVCacheBuffers``) need no mark.

    Args:
        tensors: Caches passed to the compiled function as arguments.
    """
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


class KVCacheBuffers(nn.Module):
    """One paged cache per layer, all of one layout, as non-persistent buffers.

    Do not stack the layers into one tensor instead: torch miscompiles an op that writes to
    ``cache[layer]`` of a graph input with symbolic sizes, which then writes to layer 0. (Our ops
    refuse such a view on CUDA; on CPU they are correct but copy the layer.)

    Args:
        layout: Byte layout of a cache, from ``dsv4_ops.core.layout``.
        num_layers: Number of layers. At least 1.
        num_blocks: Blocks per layer. At least 0.
        device: Device of the caches.

    Example:
        >>> from dsv4_ops.attention.caches import KVCacheBuffers
        >>> from dsv4_ops.core.layout import MainLayout
        >>> caches = KVCacheBuffers(MainLayout(block_size=64), num_layers=2, num_blocks=8)
        >>> len(caches), caches[1].shape, caches.layout.tag
        (2, torch.Size([8, 37440]), 'v4_fp8')
    """

    def __init__(
        self,
        layout: Layout,
        *,
        num_layers: int,
        num_blocks: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layout, Layout):
            raise argument_error(
                "KVCacheBuffers",
                "layout",
                must="be a layout",
                got=type(layout).__name__,
                do="Pass one of dsv4_ops.core.layout, such as MainLayout(block_size=64)",
                kind=TypeError,
            )
        at_least("KVCacheBuffers", 1, num_layers=num_layers)
        at_least("KVCacheBuffers", 0, num_blocks=num_blocks)
        self.layout = layout
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        for layer in range(num_layers):
            cache = layout.allocate(num_blocks, device)
            self.register_buffer(f"layer_{layer}", cache, persistent=False)

    def __getitem__(self, layer: int) -> Tensor:
        if not -self.num_layers <= layer < self.num_layers:
            raise argument_error(
                "KVCacheBuffers",
                "layer",
                must=f"be in {-self.num_layers}..{self.num_layers - 1}",
                got=layer,
                do="Construct it with more layers",
                kind=IndexError,
            )
        cache: Tensor = getattr(self, f"layer_{layer % self.num_layers}")
        return cache

    def __len__(self) -> int:
        return self.num_layers

    def __iter__(self) -> Iterator[Tensor]:
        return (self[layer] for layer in range(self.num_layers))

    def extra_repr(self) -> str:
        return f"{self.layout}, num_layers={self.num_layers}, num_blocks={self.num_blocks}"

"""Cache buffers that compiled and captured graphs write in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, plain_int
from dsv4_ops.core.ints import at_least
from dsv4_ops.core.layout import Layout
from dsv4_ops.dispatch import in_pool


def mark_static(*tensors: Tensor) -> None:
    """Tell torch.compile that these tensors keep their addresses.

    Inductor skips CUDA graphs for a function that mutates an unmarked argument. Call this function
    before the first compile; module buffers (such as ``KVCacheBuffers``) need no mark.

    Args:
        tensors: Caches passed to the compiled function as arguments.
    """
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def pool_view(pool: Tensor, layout: Layout, *, block_stride: int, offset: int = 0) -> Tensor:
    """Return one layer's cache in a pool of bytes that many layers share, as in vLLM.

    A compiled function must take the pool as its argument and call ``pool_view`` inside: the graph
    then has one input for all caches, and our ops write to it in place. Do not pass views as
    arguments: ``torch.compile`` refuses views of one storage with different dtypes. Views that hide
    their shared memory (from ``torch.from_dlpack``) compile, but the compiled code may overwrite
    with old bytes what another layer has written, so ``check_apart`` refuses such views.
    ``pool_view`` is not for packages of AOTInductor, which have no Python to call.

    Args:
        pool: The bytes of all blocks, [num_blocks * block_stride] or [num_blocks, block_stride],
            uint8, contiguous. Pass two dimensions if the number of blocks is symbolic: with one
            dimension, this number is a quotient, which Inductor refuses as a loop size.
        layout: Layout of the cache.
        block_stride: Bytes from one block of the pool to the next, a multiple of 16.
        offset: First byte of the cache in each block, a multiple of 16.

    Returns:
        The cache, [num_blocks, ...], with the shape and dtype of ``layout.allocate``. The cache
        shares the pool's memory.

    Raises:
        ValueError, TypeError: the pool or a number is not as above, or the cache's part of a
            block does not fit.

    Example:
        >>> import torch
        >>> from dsv4_ops.attention.caches import pool_view
        >>> from dsv4_ops.core.layout import MainLayout, StateLayout
        >>> pool = torch.zeros(8 * 75264, dtype=torch.uint8)
        >>> rows = pool_view(pool, MainLayout(64), block_stride=75264)
        >>> states = pool_view(pool, StateLayout(4, 2048), block_stride=75264, offset=37440)
        >>> rows.shape, states.shape, states.dtype
        (torch.Size([8, 37440]), torch.Size([8, 8208]), torch.float32)
    """
    checks = Checks("pool_view")
    checks.at_least(1, block_stride=block_stride)
    two = isinstance(pool, Tensor) and pool.dim() == 2
    dims = ("num_blocks", block_stride) if two else ("num_bytes",)
    checks.tensor("pool", pool, torch.uint8, *dims)
    checks.at_least(0, offset=offset)
    page = layout.shape(1)[1:]
    values = 1
    for size in page:
        values *= size
    most = block_stride - values * layout.storage_dtype.itemsize
    for name, value in (("block_stride", block_stride), ("offset", offset)):
        if value % _ALIGNMENT:
            raise checks.error(
                name, must="be a multiple of 16", got=value, do="Kernels read 16 bytes at a time"
            )
    if offset > most:
        raise checks.error(
            "offset",
            must=f"be at most {most}, so that it ends in its block",
            got=offset,
            do="Pass the offset of this layer in each block",
        )
    if not two and pool.shape[0] % block_stride:
        raise checks.error(
            "pool",
            must=f"have a multiple of block_stride = {block_stride} bytes",
            got=plain_int(pool.shape[0]),
            do="Pass the bytes of whole blocks",
        )
    dtype = str(layout.storage_dtype).removeprefix("torch.")
    return in_pool.view(pool, block_stride, offset, list(page), dtype)


_ALIGNMENT = 16


def check_apart(**tensors: Tensor) -> None:
    """Raise if tensors share memory in a way that a compiler cannot see.

    Call this function once, with all caches that a compiled function takes as arguments. Views of
    one storage pass, because ``torch.compile`` sees that they share memory.

    Raises:
        ValueError: two tensors of different storages overlap, as after ``torch.from_dlpack``.
    """
    spans = []
    for name, tensor in tensors.items():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel():
            start, storage = tensor.data_ptr(), tensor.untyped_storage()._cdata
            spans.append((start, start + (last + 1) * tensor.itemsize, storage, name))
    spans.sort()
    reach: tuple[int, int, str] = (0, 0, "")
    for start, stop, storage, name in spans:
        if start < reach[0] and storage != reach[1]:
            raise argument_error(
                "check_apart",
                name,
                must=f"share no memory with {reach[2]}",
                got="a storage of its own over the same bytes",
                do="Pass the pool to the compiled function, and make the caches there with "
                "pool_view",
            )
        reach = max(reach, (stop, storage, name))


class KVCacheBuffers(nn.Module):
    """One paged cache per layer, all of one layout, as non-persistent buffers.

    Do not stack the layers into one tensor instead. torch miscompiles an op that writes to
    ``cache[layer]`` of a graph input with symbolic sizes: the op writes to layer 0. (Our ops refuse
    such a view on CUDA; on CPU they are correct but copy the layer.)

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

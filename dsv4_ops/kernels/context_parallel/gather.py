"""Launch the gather between ranks that map each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dsv4_ops.kernels.context_parallel.exchange import PROGRAMS, TILE
from dsv4_ops.kernels.context_parallel.gather_kernel import gather_ranks
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.meta.context_parallel import gathered

TILE_BYTES = (2048, 4096, 8192, int(TILE))
"""Bytes per tile. A call with few bytes has small tiles, so that many programs share the bytes."""

FEW_PROGRAMS = 128
"""A call has the smallest tiles that need at most this many programs."""


class _Source(NamedTuple):
    """A tensor as [rows, inner] integers.

    Args:
        tensor: The bytes of the tensor.
        itemsize: Bytes of an integer.
        rows, inner: Number of rows, and of integers per row.
        stride: Integers from one row to the next.
    """

    tensor: Tensor
    itemsize: int
    rows: int
    inner: int
    stride: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.inner * self.itemsize


def gather(
    launch: Launcher,
    parts: Sequence[Tensor],
    workspace: Tensor,
    rank: int,
    world: int,
    dim: int,
    timeout_ns: int,
) -> list[Tensor]:
    """Gather one or two tensors of all ranks along ``dim``. All ranks make the same calls in the
    same order.

    ``workspace`` is as for ``combine_ranks``; the two functions may share a workspace.
    """
    results = [gathered(part, world, dim) for part in parts]
    sources = [_as_integers(part, dim, launch.aligns_inputs) for part in parts]
    first, second = sources[0], sources[-1]

    def num_tiles(size: int) -> int:
        return sum(triton.cdiv(source.nbytes, size) for source in sources)

    max_size = TILE_BYTES[-1]
    size = next((size for size in TILE_BYTES if num_tiles(size) <= FEW_PROGRAMS), max_size)
    if num_tiles(size) == 0:
        return results
    launch(gather_ranks)[(min(num_tiles(size), int(PROGRAMS)),)](
        first.tensor, second.tensor, results[0].view(torch.uint8), results[-1].view(torch.uint8),
        workspace,
        first.rows * first.inner, second.rows * second.inner, first.inner, second.inner,
        first.stride, second.stride, timeout_ns,
        RANK=rank, WORLD=world, PAIR=len(parts) == 2, ONE_ROW=first.rows == 1,
        FIRST_BYTES=first.itemsize, SECOND_BYTES=second.itemsize, TILE_BYTES=size,
        num_warps=8 if size == max_size else 4,
    )  # fmt: skip
    return results


def _as_integers(part: Tensor, dim: int, is_aligned: bool) -> _Source:
    """Return ``part`` as integers of the largest size (up to 8 bytes) that divides the size of a
    row, the row stride and, unless the part is aligned, the address."""
    rows, inner = prod(part.shape[:dim]), prod(part.shape[dim:])
    flat = part.reshape(rows, inner)
    if flat.stride(1) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    nbytes = inner * part.element_size()
    stride = flat.stride(0) * part.element_size() if rows > 1 else nbytes
    address = 0 if is_aligned else flat.data_ptr()
    size = next(size for size in (8, 4, 2, 1) if not (nbytes | stride | address) & (size - 1))
    return _Source(flat.view(torch.uint8), size, rows, nbytes // size, stride // size)

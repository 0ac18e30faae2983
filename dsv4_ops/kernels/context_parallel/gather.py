"""Launches the gather of ranks that map each other's memory."""

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
"""Of a tile: few where there are few bytes, so that many programs send them."""

FEW_PROGRAMS = 128
"""Who has tiles of fewer bytes for them takes these."""


class _Part(NamedTuple):
    """Bytes of a tensor as [rows, inner] integers."""

    held: Tensor
    bytes: int
    rows: int
    inner: int
    stride: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.inner * self.bytes


def gather(
    launch: Launcher,
    parts: Sequence[Tensor],
    workspace: Tensor,
    rank: int,
    world: int,
    dim: int,
    timeout_ns: int,
) -> list[Tensor]:
    """Gather one or two tensors of all ranks along ``dim``; all ranks make the same calls in order.

    ``workspace`` as for ``combine_ranks``, which may be called with the same one.
    """
    results = [gathered(part, world, dim) for part in parts]
    given = [_part(part, dim) for part in parts]
    first, second = given[0], given[-1]

    def tiles(size: int) -> int:
        return sum(triton.cdiv(part.nbytes, size) for part in given)

    size = next((size for size in TILE_BYTES if tiles(size) <= FEW_PROGRAMS), TILE_BYTES[-1])
    if tiles(size) == 0:
        return results
    launch(gather_ranks)[(min(tiles(size), int(PROGRAMS)),)](
        first.held, second.held, results[0].view(torch.uint8), results[-1].view(torch.uint8),
        workspace,
        first.rows * first.inner, second.rows * second.inner, first.inner, second.inner,
        first.stride, second.stride, timeout_ns,
        RANK=rank, WORLD=world, PAIR=len(parts) == 2, ONE_ROW=first.rows == 1,
        FIRST_BYTES=first.bytes, SECOND_BYTES=second.bytes, TILE_BYTES=size,
        num_warps=8 if size == TILE_BYTES[-1] else 4,
    )  # fmt: skip
    return results


def _part(part: Tensor, dim: int) -> _Part:
    rows, inner = prod(part.shape[:dim]), prod(part.shape[dim:])
    flat = part.reshape(rows, inner)
    if flat.stride(1) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    nbytes = inner * part.element_size()
    stride = flat.stride(0) * part.element_size() if rows > 1 else nbytes
    size = next(
        size for size in (8, 4, 2, 1) if not (nbytes | stride | flat.data_ptr()) & (size - 1)
    )
    return _Part(flat.view(torch.uint8), size, rows, nbytes // size, stride // size)

"""Tensors as kernels take them: flat, each with the strides and sizes that belong to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def strided(*tensors: Tensor) -> tuple[Any, ...]:
    """Each tensor and its strides."""
    return tuple(each for tensor in tensors for each in (tensor, *tensor.stride()))


def paged(cache: Tensor) -> tuple[Any, ...]:
    """A cache, the stride of its blocks, and how many blocks it has."""
    return (cache, cache.stride(0), cache.shape[0])


def listed(block_table: Tensor) -> tuple[Any, ...]:
    """A block table, its strides, and its columns."""
    return (block_table, *block_table.stride(), block_table.shape[1])


def angles(cos_sin_cache: Tensor) -> tuple[Any, ...]:
    """A table of cosines and sines, its strides, and its rows."""
    return (cos_sin_cache, *cos_sin_cache.stride(), cos_sin_cache.shape[0])


def rotation(
    stand_in: Tensor, positions: Tensor | None, cos_sin_cache: Tensor | None
) -> tuple[Any, ...]:
    """Positions, their stride, a dense table of cosines and sines, and its rows; anything for
    none."""
    if positions is None or cos_sin_cache is None:
        return (stand_in, 0, stand_in, 0)
    table = cos_sin_cache.contiguous()
    return (positions, positions.stride(0), table, table.shape[0])

"""Flat arguments of kernels: tensors, each with its strides and sizes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsv4_ops.core.layout import QuantizedLayout
from dsv4_ops.kernels.launcher import Launcher

_STRIDE_MULTIPLE = 16
"""A row stride that is a multiple of this number tells Triton that rows are aligned to 16 bytes."""


def strided(*tensors: Tensor) -> tuple[Any, ...]:
    """Return each tensor and its strides."""
    return tuple(each for tensor in tensors for each in (tensor, *tensor.stride()))


def paged(cache: Tensor) -> tuple[Any, ...]:
    """Return a cache, the stride of its blocks, and its number of blocks."""
    return (cache, cache.stride(0), cache.shape[0])


def listed(block_table: Tensor) -> tuple[Any, ...]:
    """Return a block table, its strides, and its number of columns."""
    return (block_table, *block_table.stride(), block_table.shape[1])


def row_format(launch: Launcher, layout: QuantizedLayout, cache: Tensor) -> tuple[Any, ...]:
    """Return ``FORMAT`` of the rows of a cache: see ``kernels.common``."""
    return (*layout.format, launch.converts_codes(cache.device))


def angles(cos_sin_cache: Tensor) -> tuple[Any, ...]:
    """Return a table of cosines and sines, its strides, and its number of rows."""
    return (cos_sin_cache, *cos_sin_cache.stride(), cos_sin_cache.shape[0])


def rotation(
    stand_in: Tensor, positions: Tensor | None, cos_sin_cache: Tensor | None
) -> tuple[Any, ...]:
    """Return positions, their stride, a dense table of cosines and sines, and its number of rows.
    Without positions or a table, return ``stand_in`` for both tensors."""
    if positions is None or cos_sin_cache is None:
        return (stand_in, 0, stand_in, 0)
    table = cos_sin_cache.contiguous()
    return (positions, positions.stride(0), table, table.shape[0])


def row_strides(values: Tensor) -> list[int]:
    """Return the strides of all dimensions but the last; 0 for dimensions of size 1."""
    sizes = zip(values.shape[:-1], values.stride()[:-1], strict=True)
    return [0 if isinstance(size, int) and size <= 1 else stride for size, stride in sizes]


def copied(launch: Launcher, values: Tensor) -> Tensor:
    """Return ``values``, or a copy of ``values`` if the rows are not aligned to 16 bytes."""
    if values.stride(-1) != 1 or any(stride % _STRIDE_MULTIPLE for stride in row_strides(values)):
        values = values.contiguous()
    return values if launch.is_aligned(values) else values.clone()

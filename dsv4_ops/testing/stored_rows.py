"""Read the rows of a DeepSeek-V4 cache, of one process or of ranks that share it, and compare the
caches of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.layout import SCALE_BIAS, QuantizedLayout, StateLayout
from dsv4_ops.reference.pages import gather_rows, row_columns

WHOLE = ("swa", "states", "indexer_states")
"""Caches that every rank stores whole: window keys and compressor states."""


class Rows(NamedTuple):
    """Rows of one cache of a layer.

    Attributes:
        layer: Number of the layer.
        name: Field of ``LayerCaches``.
        values: Dequantised rows, [num_rows, width], float32.
        stored: The rows as stored, [num_rows, row], bytes if the cache is quantised.
    """

    layer: int
    name: str
    values: Tensor
    stored: Tensor


class Difference(NamedTuple):
    """How the rows of a layer's cache differ between two processes.

    Attributes:
        median: Norm of a row's difference, relative to the row's norm: median over the rows.
        worst: The same relative norm, of the worst row.
        layer: Number of the layer.
        name: Field of ``LayerCaches``.
        is_equal: Whether the rows have the same bits.
    """

    median: float
    worst: float
    layer: int
    name: str
    is_equal: bool


def differences(cache: Any, whole: Any) -> list[Difference]:
    """Compare the rows of a cache with the cache of a process that holds all rows.

    Only the ranks that store a compressed row or an indexer key compare it. A cache in which this
    process stores no row is left out.
    """
    found = []
    both = zip(stored_rows(cache), stored_rows(whole, cache.spec.layers.ranks), strict=True)
    for ours, one in both:
        errors = (ours.values - one.values).norm(dim=-1) / one.values.norm(dim=-1)
        errors = errors.nan_to_num(torch.inf)
        if len(errors):
            error = float(errors.median()), float(errors.max())
            is_equal = torch.equal(ours.stored, one.stored)
            found.append(Difference(*error, one.layer, one.name, is_equal))
    return found


def stored_rows(cache: Any, share: Any = None) -> Iterator[Rows]:
    """Yield the rows of all requests in each cache of each layer, in the order of the requests and
    of their positions.

    Args:
        cache: ``PagedCache`` of a DeepSeek-V4.
        share: ``ContextParallel`` of ranks. Yield only the rows that this process would hold if the
            ranks shared the cache, which holds all rows. Without ``share``, yield all rows.
    """
    layers = zip(cache.spec.kinds, cache.tensors.layers, strict=True)
    for number, (kind, caches) in enumerate(layers):
        for name, layout in cache.spec.layers.layouts(kind).items():
            pages, size = getattr(caches, name), layout.block_size
            found = []
            for row in cache.requests.values():
                table, places = _places(cache, kind, name, row, size, share)
                found.append(_read(pages, layout, table[row, places // size].long(), places % size))
            yield Rows(number, name, *map(torch.cat, zip(*found, strict=True)))


def _places(
    cache: Any, kind: str, name: str, row: int, size: int, share: Any
) -> tuple[Tensor, Tensor]:
    """Return the block table of a cache, and the places of a request's rows in its blocks."""
    spec, tables, length = cache.spec.layers, cache.tensors.tables, int(cache.seq_lens[row])
    if name in WHOLE:
        table = tables.swa if name == "swa" else getattr(tables, f"{kind}_states")
        ring = cache.rings["swa" if name == "swa" else f"{kind}_states"]
        first = 0 if ring >= table.shape[1] else max(0, length - (ring - 1) * size)
        return table, torch.arange(first, length, device=table.device)
    table, ranks = tables.compressed, spec.ranks or share
    places = torch.arange(length // spec.ratio(kind), device=table.device)
    if ranks is not None:
        places = places[places // ranks.interleave % ranks.world_size == ranks.rank(table.device)]
    if spec.ranks is not None:
        places = places // ranks.turn * ranks.interleave + places % ranks.interleave
    return table, places


def _read(pages: Tensor, layout: Any, block: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of rows, and the rows as stored."""
    if not isinstance(layout, QuantizedLayout):
        rows = layout.rows(pages) if isinstance(layout, StateLayout) else pages
        return rows[block, place].float(), rows[block, place]

    def part(byte: int, width: int) -> Tensor:
        return gather_rows(pages, block, place, row_columns(layout, byte, width)).contiguous()

    data, scales = part(0, layout.data_bytes), part(layout.data_bytes, layout.scale_bytes)
    codes = data[:, : layout.code_dim].contiguous().view(torch.float8_e4m3fn).float()
    if layout.float_scales:
        factor = scales.view(torch.float32)
    else:
        factor = torch.exp2(scales[:, : layout.num_scales].float() - SCALE_BIAS)
    values = codes.unflatten(1, (layout.num_scales, -1)) * factor[..., None]
    rope = data[:, layout.code_dim :].contiguous().view(torch.bfloat16).float()
    return torch.cat((values.flatten(1), rope), 1), torch.cat((data, scales), 1)

"""Gather rows of paged FP8 caches as bf16, and list the rows that each token of a prefill sees.

These functions run where Triton is not installed, and define the results of the kernels in
``kernels/sparse_mla/bf16_workspace.py``.

For every request, the workspace has space for all rows of two block tables: first the compressed
rows, then the window rows. So the size of the workspace depends on shapes alone. Only rows that a
token of the call may see are written. Which rows these are, and which window row comes first,
depends on the tensors' values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.torch_compat import sym_max, sym_min
from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.reference.common import masked_index, valid_tokens, visible_rows
from dsv4_ops.reference.kv_cache import gather_k_cache
from dsv4_ops.reference.pages import locate
from dsv4_ops.reference.sanitize import finite_sink


class Source(NamedTuple):
    """A paged cache: its blocks, the block table, and the rows per block."""

    cache: Tensor
    block_table: Tensor
    block_size: int

    @property
    def rows(self) -> int:
        """Maximum rows of a request."""
        return self.block_table.shape[1] * self.block_size


class Prefill(NamedTuple):
    """The arguments of ``sparse_mla_prefill`` that determine which keys its tokens see."""

    positions: Tensor
    req_indices: Tensor
    swa: Source
    extra: Source | None
    topk_indices: Tensor | None
    window_size: int
    compress_ratio: int

    @property
    def extra_rows(self) -> int:
        """Maximum compressed rows of a request."""
        return 0 if self.extra is None else self.extra.rows

    @property
    def widths(self) -> tuple[int, int]:
        """Maximum number of window rows, and of compressed rows, in a token's list. The first is
        ``window_size``, unless a request has fewer rows."""
        swa = sym_min(self.window_size, self.swa.rows)
        return swa, self.extra_rows if self.topk_indices is None else self.topk_indices.shape[1]

    def padded(self, multiple: int) -> int:
        """Return the maximum number of entries in a token's list, rounded up to a multiple of
        ``multiple``; at least ``multiple``."""
        width = sum(self.widths)
        return sym_max(width + -width % multiple, multiple)


class Spans(NamedTuple):
    """The rows of each request that a token of the call may see. Every field is int32 [num_reqs].

    Args:
        ends: Position after the last window row.
        counts: Number of window rows, which end at ``ends``.
        compressed: Number of compressed rows, counted from the first.
    """

    ends: Tensor
    counts: Tensor
    compressed: Tensor


class Rows(NamedTuple):
    """The bf16 rows [num_rows, 512], each token's list of rows [num_tokens, padded], and sinks."""

    kv: Tensor
    slots: Tensor
    lens: Tensor
    sink: Tensor | None


def gather_rows(call: Prefill, sink: Tensor | None, multiple: int) -> Rows:
    """Gather the rows of a call and make its lists, padded to a multiple of ``multiple``."""
    spans = find_spans(call)
    segments = [_gathered(call.swa, spans.ends, spans.counts)]
    if call.extra is not None:
        segments = [_gathered(call.extra, spans.compressed, None), *segments]
    kv = torch.cat(segments, 1).view(-1, MainLayout.head_dim)
    return Rows(kv, *list_rows(call, spans, multiple), finite_sink(sink))


def _gathered(source: Source, seq_lens: Tensor, gather_lens: Tensor | None) -> Tensor:
    lists = (source.cache, seq_lens, gather_lens, source.block_table)
    size, most, layout = source.block_size, source.rows, MainLayout.tag
    return gather_k_cache(*lists, block_size=size, num_rows=most, offset=0, layout=layout)


def find_spans(call: Prefill) -> Spans:
    """Find the span of each request from the positions of its tokens."""
    num_reqs = call.swa.block_table.shape[0]
    real = valid_tokens(call.positions, call.req_indices, num_reqs)
    request = torch.arange(num_reqs, device=real.device)[:, None]
    mine = real & (call.req_indices == request)
    length = torch.where(mine, call.positions + 1, 0).amax(1)
    first = (call.positions - (call.window_size - 1)).clamp(min=0)
    first = torch.where(mine, first, INT32_MAX).amin(1)
    ends = length.clamp(max=call.swa.rows)
    compressed = (length // call.compress_ratio).clamp(max=call.extra_rows)
    counts = (ends - first).clamp(min=0)
    return Spans(*(each.to(torch.int32) for each in (ends, counts, compressed)))


def list_rows(call: Prefill, spans: Spans, multiple: int) -> tuple[Tensor, Tensor]:
    """For each token, list the workspace rows that it sees, with -1 for absent rows. Also return
    the length of each list, which ends at the last row that exists."""
    positions, num_reqs = call.positions[:, None], call.swa.block_table.shape[0]
    real = valid_tokens(call.positions, call.req_indices, num_reqs)[:, None]
    request = torch.where(real, call.req_indices[:, None], 0)
    width = call.widths[0]
    workspace_rows = call.extra_rows + call.swa.rows
    column = torch.arange(width, device=positions.device)
    place = positions.clamp(max=call.swa.rows - 1) - (width - 1) + column
    visible = real & (place >= 0) & (place > positions - call.window_size)
    start = masked_index(spans.ends - spans.counts, real, [request.long()], 0)
    lists = [
        _rows(call.swa, request, place, visible, request * workspace_rows + call.extra_rows - start)
    ]
    if call.extra is not None:
        chosen = call.topk_indices
        if chosen is None:
            chosen = torch.arange(call.extra_rows, device=positions.device).expand(len(real), -1)
        chosen = chosen.long()
        visible = real & (chosen >= 0)
        visible = visible & (chosen < visible_rows(call.positions, call.compress_ratio)[:, None])
        lists.append(_rows(call.extra, request, chosen, visible, request * workspace_rows))
    slots = torch.cat(lists, 1)
    padded = call.padded(multiple)
    slots = pad(slots, (0, padded - slots.shape[1]), value=ABSENT).to(torch.int32)
    place = torch.arange(1, padded + 1, device=positions.device)
    lens = torch.where(slots >= 0, place, 0).amax(1)
    return slots, lens.to(torch.int32)


def _rows(source: Source, request: Tensor, place: Tensor, visible: Tensor, first: Tensor) -> Tensor:
    """Return the workspace positions of visible rows; -1 for other rows and for rows in absent
    blocks."""
    pages, _ = locate(source.block_table, request, place, visible, source.block_size)
    exists = (pages >= 0) & (pages < source.cache.shape[0])
    return torch.where(exists, first + place, ABSENT)

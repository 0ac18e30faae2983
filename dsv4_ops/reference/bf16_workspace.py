"""The rows and lists that a prefill over bf16 rows is given of paged FP8 caches, in ops of torch:
for GPUs without triton, and what the kernels in ``kernels/sparse_mla/bf16_workspace.py`` mean.

The workspace holds, for every request, first its compressed rows and then those of its window, as
many of each as its block tables name; of these the rows are written that a token of the call may
see. Which are written, values decide; where they are, sizes alone.
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
    """A paged cache: its blocks, the blocks of every request, and the rows of a block."""

    cache: Tensor
    block_table: Tensor
    block_size: int

    @property
    def rows(self) -> int:
        """Rows that a request may have."""
        return self.block_table.shape[1] * self.block_size


class Prefill(NamedTuple):
    """What of a call of ``sparse_mla_prefill`` decides which keys its tokens see."""

    positions: Tensor
    req_indices: Tensor
    swa: Source
    extra: Source | None
    topk_indices: Tensor | None
    window_size: int
    compress_ratio: int

    @property
    def extra_rows(self) -> int:
        """Compressed rows that a request may have."""
        return 0 if self.extra is None else self.extra.rows

    @property
    def widths(self) -> tuple[int, int]:
        """Entries of a token's list: of the window, which holds no more than a request, and of the
        compressed rows."""
        swa = sym_min(self.window_size, self.swa.rows)
        return swa, self.extra_rows if self.topk_indices is None else self.topk_indices.shape[1]

    def padded(self, multiple: int) -> int:
        """Entries of a token's list, a multiple and at least one of it."""
        width = sum(self.widths)
        return sym_max(width + -width % multiple, multiple)


class Spans(NamedTuple):
    """Rows of every request that a token of the call may see, int32 [num_reqs] each.

    Args:
        ends: Window rows end before this position.
        counts: Window rows, the last ones before that.
        compressed: Compressed rows, the first ones.
    """

    ends: Tensor
    counts: Tensor
    compressed: Tensor


class Rows(NamedTuple):
    """Rows in bf16 [num_rows, 512], and the lists [num_tokens, padded] of those that tokens see."""

    kv: Tensor
    slots: Tensor
    lens: Tensor
    sink: Tensor | None


def gather_rows(call: Prefill, sink: Tensor | None, multiple: int) -> Rows:
    """The rows of the call and its lists, padded to a ``multiple`` of columns."""
    spans = find_spans(call)
    found = [_gathered(call.swa, spans.ends, spans.counts)]
    if call.extra is not None:
        found = [_gathered(call.extra, spans.compressed, None), *found]
    kv = torch.cat(found, 1).view(-1, MainLayout.head_dim)
    return Rows(kv, *list_rows(call, spans, multiple), finite_sink(sink))


def _gathered(source: Source, seq_lens: Tensor, gather_lens: Tensor | None) -> Tensor:
    lists = (source.cache, seq_lens, gather_lens, source.block_table)
    size, most, layout = source.block_size, source.rows, MainLayout.tag
    return gather_k_cache(*lists, block_size=size, num_rows=most, offset=0, layout=layout)


def find_spans(call: Prefill) -> Spans:
    """By the positions of all tokens of a request."""
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
    """Rows of the workspace that every token sees, -1 where there is none, and the places up to
    the last of them."""
    positions, num_reqs = call.positions[:, None], call.swa.block_table.shape[0]
    real = valid_tokens(call.positions, call.req_indices, num_reqs)[:, None]
    request = torch.where(real, call.req_indices[:, None], 0)
    width = call.widths[0]
    held = call.extra_rows + call.swa.rows
    column = torch.arange(width, device=positions.device)
    place = positions.clamp(max=call.swa.rows - 1) - (width - 1) + column
    seen = real & (place >= 0) & (place > positions - call.window_size)
    start = masked_index(spans.ends - spans.counts, real, [request.long()], 0)
    lists = [_rows(call.swa, request, place, seen, request * held + call.extra_rows - start)]
    if call.extra is not None:
        chosen = call.topk_indices
        if chosen is None:
            chosen = torch.arange(call.extra_rows, device=positions.device).expand(len(real), -1)
        chosen = chosen.long()
        seen = real & (chosen >= 0)
        seen = seen & (chosen < visible_rows(call.positions, call.compress_ratio)[:, None])
        lists.append(_rows(call.extra, request, chosen, seen, request * held))
    slots = torch.cat(lists, 1)
    padded = call.padded(multiple)
    slots = pad(slots, (0, padded - slots.shape[1]), value=ABSENT).to(torch.int32)
    place = torch.arange(1, padded + 1, device=positions.device)
    lens = torch.where(slots >= 0, place, 0).amax(1)
    return slots, lens.to(torch.int32)


def _rows(source: Source, request: Tensor, place: Tensor, seen: Tensor, first: Tensor) -> Tensor:
    """Rows of the workspace of what is seen; -1 of what is on no block."""
    pages, _ = locate(source.block_table, request, place, seen, source.block_size)
    exists = (pages >= 0) & (pages < source.cache.shape[0])
    return torch.where(exists, first + place, ABSENT)

"""Sanitize the index lists that FlashMLA and DeepGEMM do not check.

These functions run where Triton is not installed, and define the results of the kernels in
``kernels/external/sanitize.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.torch_compat import sym_max, sym_min
from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.reference.common import int32_slots
from dsv4_ops.reference.pages import locate

_LARGEST_SINK = 1e30
"""Maximum sink. FlashMLA subtracts the sink from the lse, which is inf for a token without keys,
and inf - inf is NaN."""


class Listed(NamedTuple):
    """The rows of a cache that tokens attend to: slots, or the block tables of the tokens'
    requests.

    Args:
        indices: Slots [num_tokens, width], or blocks [num_reqs, max_blocks].
        lens: Number of valid rows per token, [num_tokens].
        num_blocks: Blocks of the cache.
        block_size: Rows per block.
        req_indices: Request of each token, if ``indices`` are blocks.
    """

    indices: Tensor
    lens: Tensor
    num_blocks: int
    block_size: int
    req_indices: Tensor | None = None

    def width(self) -> int:
        """Maximum rows per token."""
        return self.indices.shape[1] * (1 if self.req_indices is None else self.block_size)


class Prepared(NamedTuple):
    """Lists in the form that FlashMLA takes (padded, with -1 for absent rows), and sinks."""

    slots: Tensor
    lens: Tensor
    extra_slots: Tensor | None
    extra_lens: Tensor | None
    sink: Tensor | None


def list_slots(
    window: Listed, extra: Listed | None, sink: Tensor | None, multiple: int
) -> Prepared:
    """Pad both lists to a multiple of ``multiple`` columns, clamp each length to its list's width,
    and limit sinks as ``finite_sink`` does."""
    finite = finite_sink(sink)
    slots, lens = _listed(window, multiple)
    if extra is None:
        return Prepared(slots, lens, None, None, finite)
    return Prepared(slots, lens, *_listed(extra, multiple), finite)


def finite_sink(sink: Tensor | None) -> Tensor | None:
    """Return the sinks, limited to ``_LARGEST_SINK``, so that none is inf."""
    return None if sink is None else sink.clamp(max=_LARGEST_SINK).contiguous()


def _listed(rows: Listed, multiple: int) -> tuple[Tensor, Tensor]:
    width, slots = rows.width(), rows.indices
    column = torch.arange(width, device=slots.device)
    mask = column < rows.lens[:, None]
    if rows.req_indices is not None:
        located = locate(slots, rows.req_indices[:, None], column, mask, rows.block_size)
        slots = int32_slots(*located, rows.block_size)
    count = sym_min(rows.num_blocks * rows.block_size, INT32_MAX)
    mask = mask & (slots >= 0) & (slots < count)
    padded = sym_max(width + -width % multiple, multiple)
    slots = pad(torch.where(mask, slots, ABSENT), (0, padded - width), value=ABSENT)
    return slots, rows.lens.clamp(0, width).contiguous()


def no_key(lse: Tensor) -> Tensor:
    """Replace an lse of inf, FlashMLA's value for a token without keys, by -inf."""
    return torch.nan_to_num(lse, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def list_pages(
    block_table: Tensor, req_indices: Tensor, lens: Tensor, num_blocks: int, most: int
) -> tuple[Tensor, Tensor]:
    """Return the blocks of each token's request, with 0 for absent blocks, and the token's length,
    clamped to ``most`` rows."""
    real = (req_indices >= 0) & (req_indices < block_table.shape[0])
    pages = block_table[torch.where(real, req_indices, 0)]
    pages = torch.where((pages >= 0) & (pages < num_blocks) & real[:, None], pages, 0)
    return pages, torch.where(real, lens, 0).clamp(0, most).to(torch.int32)


def compact_pages(
    block_table: Tensor, req_indices: Tensor, lens: Tensor, num_blocks: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return the existing blocks of each token without gaps, for libraries that cannot skip a
    block; also return the number of rows in these blocks.

    The result is padded with block 0 and has at least one column. The last block, the only one that
    may be partly full, stays last."""
    width, columns = block_table.shape[1], sym_max(block_table.shape[1], 1)
    column = torch.arange(width, device=lens.device)
    real = (req_indices >= 0) & (req_indices < block_table.shape[0])
    entries = block_table[torch.where(real, req_indices, 0)]
    lens = torch.where(real, lens, 0).clamp(0, width * block_size)
    rows = (lens[:, None] - column * block_size).clamp(0, block_size)
    exists = (rows > 0) & (entries >= 0) & (entries < num_blocks)
    place = torch.where(exists, exists.cumsum(1) - 1, columns)
    compact = entries.new_zeros((entries.shape[0], columns + 1))
    compact = compact.scatter(1, place, torch.where(exists, entries, 0))[:, :-1]
    return compact.contiguous(), torch.where(exists, rows, 0).sum(1).to(torch.int32)


def fill_absent(
    logits: Tensor,
    block_table: Tensor,
    req_indices: Tensor,
    counted: Tensor,
    num_blocks: int,
    block_size: int,
) -> Tensor:
    """Set the logits of rows past the first ``counted``, and of rows in absent blocks, to -inf."""
    row = torch.arange(logits.shape[1], device=logits.device)
    in_count = row < counted[:, None]
    pages, _ = locate(block_table, req_indices[:, None], row, in_count, block_size)
    return torch.where((pages >= 0) & (pages < num_blocks), logits, -torch.inf)

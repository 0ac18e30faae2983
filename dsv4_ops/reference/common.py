"""Bounded table reads and the branch-free search: what makes adversarial values read as absent
instead of out of bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from dsv4_ops.core.types import ABSENT, INT32_MAX, search_steps

_buffers: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("_buffers", default=None)


@contextmanager
def buffers_by(make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have ``materialized`` call ``make``: what a lowering that traces a reference does."""
    token = _buffers.set(make)
    try:
        yield
    finally:
        _buffers.reset(token)


def materialized(values: Tensor) -> Tensor:
    """``values``, which compiled code keeps in a buffer. Without that, a compiler copies what each
    row costs (bounds, look-ups) into the code of every element of the row."""
    make = _buffers.get()
    return values if make is None else make(values)


def runs_on_cpu(values: Tensor) -> bool:
    """Whether this call computes now, on a CPU, and is not traced: then a form may be taken that
    only eager PyTorch is faster with, and sizes may depend on values."""
    return (
        type(values) is Tensor
        and values.device.type == "cpu"
        and _buffers.get() is None
        and not torch.compiler.is_compiling()
    )


def masked_index(values: Tensor, mask: Tensor, indices: list[Tensor], fill: float) -> Tensor:
    """``values[indices]`` where ``mask``, else ``fill``; where it is False the indices may be
    anything."""
    if _nowhere(values, len(indices)):
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        return values.new_full((*shape, *values.shape[len(indices) :]), fill)
    found: Tensor = torch.ops.aten._unsafe_masked_index.default(values, mask, indices, fill)
    return found


def _nowhere(values: Tensor, dims: int) -> bool:
    """Whether no index of the first ``dims`` dimensions exists. Inductor bounds an index by the
    last one, which it has not the range for; a size that it knows to be 0 is no symbol."""
    return any(isinstance(size, int) and size == 0 for size in values.shape[:dims])


def take(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` for indices in range by construction: compiled code checks none of them."""
    if _nowhere(values, 1):
        return values.new_zeros((*index.shape, *values.shape[1:]))
    taken: Tensor = torch.ops.aten._unsafe_index.Tensor(values, [index])
    return taken


def dense(values: Tensor) -> Tensor:
    """A copy with the strides of its shape, also where it is empty."""
    return values.clone(memory_format=torch.contiguous_format)


def masked_rows(values: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """Rows [..., width] of ``values`` [num_rows, width] at ``index`` where ``mask``, else 0; where
    it is False the index may be anything."""
    if runs_on_cpu(values) and values.shape[0] > 0:
        # whole rows: an index per value takes twenty times as long
        return torch.where(mask[..., None], values[torch.where(mask, index, 0)], 0)
    column = torch.arange(values.shape[1], device=values.device)
    rows, exists, column = torch.broadcast_tensors(index[..., None], mask[..., None], column)
    return masked_index(values, exists, [rows, column], 0)


def gather_rows(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """``values[index]`` where ``valid``, else 0. Valid indices must be in range; the others are
    never dereferenced."""
    return masked_index(values, valid, [index], 0)


def valid_tokens(positions: Tensor, req_indices: Tensor, num_reqs: int) -> Tensor:
    """Tokens that belong to a request of the batch; the others are padding. No request is 2**31 - 1
    tokens long."""
    in_request = (positions >= 0) & (positions < INT32_MAX)
    return in_request & (req_indices >= 0) & (req_indices < num_reqs)


def visible_rows(positions: Tensor, compress_ratio: int) -> Tensor:
    """Compressed rows that a token may see: row e covers ``ratio`` positions and counts once its
    last one is there."""
    length = positions.clamp(min=ABSENT, max=INT32_MAX - 1).to(torch.int32) + 1
    return length // compress_ratio


def table_entries(
    block_table: Tensor, req_indices: Tensor, columns: Tensor, wanted: Tensor
) -> Tensor:
    """Block of every (request, column); -1 where unwanted, outside the table, or negative in the
    table."""
    inside = wanted & (req_indices >= 0) & (req_indices < block_table.shape[0])
    inside = inside & (columns >= 0) & (columns < block_table.shape[1])
    rows, columns, inside = torch.broadcast_tensors(req_indices, columns, inside)
    return masked_index(block_table, inside, [rows, columns], ABSENT)


def int32_slots(pages: Tensor, rows: Tensor, block_size: int) -> Tensor:
    """``page * block_size + row`` as int32; -1 for an absent block and for a block whose slots do
    not fit."""
    usable = (pages >= 0) & (pages <= 2**31 // block_size - 1)
    slots = torch.where(usable, pages, 0) * block_size + rows.to(torch.int32)
    return torch.where(usable, slots, ABSENT)


def query_lens(query_start_loc: Tensor) -> Tensor:
    """Query tokens of every request; 0 where ``query_start_loc`` decreases."""
    return (query_start_loc[1:] - query_start_loc[:-1]).clamp(min=0)


def bisect(holds: Callable[[Tensor], Tensor], size: int, start: Tensor) -> Tensor:
    """Largest ``n`` in 0..size for which ``holds(n)``, elementwise, given that it holds for a
    prefix of 1..size.

    ``start`` is a tensor of zeros of the wanted shape. ``holds`` must answer False beyond ``size``
    by itself.
    """
    count = start
    for step in reversed(range(search_steps(size))):
        candidate = count + (1 << step)
        count = torch.where(holds(candidate), candidate, count)
    return count

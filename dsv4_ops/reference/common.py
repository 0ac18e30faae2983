"""Masked table reads, and a search without branches on values. Where a mask is False, an index may
have any value, because the table is not read there."""

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
    """Make ``materialized`` call ``make`` while a lowering traces a reference."""
    token = _buffers.set(make)
    try:
        yield
    finally:
        _buffers.reset(token)


def materialized(values: Tensor) -> Tensor:
    """Return ``values``; compiled code stores them in a buffer of their own.

    Without a buffer, a compiler recomputes a row's bounds and look-ups for every element of the
    row."""
    make = _buffers.get()
    return values if make is None else make(values)


def runs_on_cpu(values: Tensor) -> bool:
    """Whether this is an eager call on a CPU.

    In such a call, a reference may use code that is faster only in eager PyTorch, and tensor sizes
    that depend on values."""
    return (
        type(values) is Tensor
        and values.device.type == "cpu"
        and _buffers.get() is None
        and not torch.compiler.is_compiling()
    )


def masked_index(values: Tensor, mask: Tensor, indices: list[Tensor], fill: float) -> Tensor:
    """Return ``values[indices]`` where ``mask`` is True, else ``fill``. Indices may have any value
    where ``mask`` is False."""
    if _nowhere(values, len(indices)):
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        return values.new_full((*shape, *values.shape[len(indices) :]), fill)
    result: Tensor = torch.ops.aten._unsafe_masked_index.default(values, mask, indices, fill)
    return result


def _nowhere(values: Tensor, dims: int) -> bool:
    """Whether one of the first ``dims`` dimensions is known to be empty.

    Inductor clamps an index to the last valid index, and an empty dimension has none. A size that
    Inductor knows to be 0 is an int, not a symbol."""
    return any(isinstance(size, int) and size == 0 for size in values.shape[:dims])


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[index]`` for indices that are in range by construction; compiled code does
    not check them."""
    if _nowhere(values, 1):
        return values.new_zeros((*index.shape, *values.shape[1:]))
    result: Tensor = torch.ops.aten._unsafe_index.Tensor(values, [index])
    return result


def dense(values: Tensor) -> Tensor:
    """Return a contiguous copy. Even an empty copy has the default strides of its shape."""
    return values.clone(memory_format=torch.contiguous_format)


def products_of_heads(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply rows [tokens, heads, k] by the weights [heads, k, n] of their heads; return [tokens,
    heads, n]."""
    if rows.device.type != "cpu":
        return torch.bmm(rows.transpose(0, 1), weights).transpose(0, 1)
    # make tokens the last, dense dimension; otherwise Inductor on a CPU guards on num_tokens == 1
    columns = dense(rows.permute(1, 2, 0))
    return torch.bmm(weights.transpose(1, 2), columns).permute(2, 0, 1)


def masked_rows(values: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """Return rows [..., width] of ``values`` [num_rows, width] at ``index``; 0 where ``mask`` is
    False.

    Indices may have any value where ``mask`` is False."""
    if runs_on_cpu(values) and values.shape[0] > 0:
        # copy whole rows, because an index per value takes twenty times as long
        return torch.where(mask[..., None], values[torch.where(mask, index, 0)], 0)
    column = torch.arange(values.shape[1], device=values.device)
    rows, exists, column = torch.broadcast_tensors(index[..., None], mask[..., None], column)
    return masked_index(values, exists, [rows, column], 0)


def gather_rows(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Return ``values[index]`` where ``valid`` is True, else 0. Valid indices must be in range;
    other indices are never read."""
    return masked_index(values, valid, [index], 0)


def valid_tokens(positions: Tensor, req_indices: Tensor, num_reqs: int) -> Tensor:
    """Flag the tokens that belong to a request; other tokens, and tokens at position 2**31 - 1, are
    padding."""
    in_request = (positions >= 0) & (positions < INT32_MAX)
    return in_request & (req_indices >= 0) & (req_indices < num_reqs)


def quotient(values: Tensor, divisor: int) -> Tensor:
    """Divide non-negative integers and round down. Quotients of negative values have no meaning.

    ``//`` also rounds negative quotients down. For that, compilers generate a dozen instructions,
    and need seconds longer to compile the metadata of a model's step."""
    return values if divisor == 1 else torch.div(values, divisor, rounding_mode="trunc")


def remainder(values: Tensor, divisor: int) -> Tensor:
    """Return the remainder of ``quotient``. Remainders of negative values have no meaning."""
    return values - quotient(values, divisor) * divisor


def visible_rows(positions: Tensor, compress_ratio: int) -> Tensor:
    """Count the compressed rows that a token may see. A row covers ``compress_ratio`` positions;
    tokens at or after the last of these positions see the row."""
    length = positions.clamp(min=ABSENT, max=INT32_MAX - 1).to(torch.int32) + 1
    return quotient(length, compress_ratio)


def table_entries(
    block_table: Tensor, req_indices: Tensor, columns: Tensor, mask: Tensor
) -> Tensor:
    """Look up the block of every (request, column); -1 if the entry is masked, outside the table,
    or negative."""
    inside = mask & (req_indices >= 0) & (req_indices < block_table.shape[0])
    inside = inside & (columns >= 0) & (columns < block_table.shape[1])
    rows, columns, inside = torch.broadcast_tensors(req_indices, columns, inside)
    return masked_index(block_table, inside, [rows, columns], ABSENT)


def int32_slots(pages: Tensor, rows: Tensor, block_size: int) -> Tensor:
    """Compute the slots ``page * block_size + row`` as int32; -1 for absent blocks, and for blocks
    whose slots exceed int32."""
    usable = (pages >= 0) & (pages <= 2**31 // block_size - 1)
    slots = torch.where(usable, pages, 0) * block_size + rows.to(torch.int32)
    return torch.where(usable, slots, ABSENT)


def query_lens(query_start_loc: Tensor) -> Tensor:
    """Count the query tokens of each request; 0 where ``query_start_loc`` decreases."""
    return (query_start_loc[1:] - query_start_loc[:-1]).clamp(min=0)


def bisect(holds: Callable[[Tensor], Tensor], size: int, start: Tensor) -> Tensor:
    """Find, elementwise, the largest ``n`` in 0..size for which ``holds(n)``.

    ``holds`` must be True for a prefix of 1..size and False beyond ``size``. ``start`` is a tensor
    of zeros in the shape of the result.
    """
    count = start
    for step in reversed(range(search_steps(size))):
        candidate = count + (1 << step)
        count = torch.where(holds(candidate), candidate, count)
    return count

"""Lowerings of the ops on batches. The search of ``token_map`` is Inductor IR; everything else is
traced from the references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.types import ABSENT, search_steps
from dsv4_ops.lowering.kinds import Decompose, PointwiseIR
from dsv4_ops.reference.common import visible_rows


def _token_map(query_start_loc: Any, seq_lens: Any, *, num_tokens: Any) -> tuple[Any, Any]:
    """Search for the request of every token without branches, in unrolled steps that fuse with
    consumers.

    The function makes three buffers with the same iteration space. Inductor fuses them into one
    kernel and keeps the first buffer in registers. The buffers are realized because every entry of
    a later [num_tokens, width] stage reads them; if they were inlined, each entry would search
    again.
    """
    from sympy import sympify

    from dsv4_ops.lowering._compat import ops
    from dsv4_ops.lowering.slot_rows import int32, realized

    # sizes of a tensor that the graph makes, such as arange, are plain ints
    (boundaries,) = map(sympify, query_start_loc.get_size())
    (num_reqs,) = map(sympify, seq_lens.get_size())
    load_start, load_len = query_start_loc.make_loader(), seq_lens.make_loader()

    def start_of(request: Any) -> Any:
        return load_start([ops.indirect_indexing(request, boundaries, check=False, wrap_neg=False)])

    def search(index: Any) -> Any:
        token = ops.index_expr(index[0], torch.int32)
        limit = ops.index_expr(boundaries, torch.int32)
        count = int32(0)
        for stride in _strides(boundaries):
            candidates = [ops.add(count, int32(step * stride)) for step in range(1, _FAN_OUT)]
            for candidate in candidates:  # independent loads wait for memory only once
                boundary = start_of(ops.sub(ops.minimum(candidate, limit), int32(1)))
                take = ops.logical_and(ops.le(candidate, limit), ops.le(boundary, token))
                count = ops.where(take, ops.add(count, int32(stride)), count)
        # ``count`` is the number of boundaries at or before the token: 0 if the token lies before
        # the first request, ``limit`` if it lies after the last
        inside = ops.logical_and(ops.gt(count, int32(0)), ops.lt(count, limit))
        return ops.where(inside, ops.sub(count, int32(1)), int32(ABSENT))

    def position(index: Any) -> Any:
        def of_request() -> Any:
            request = load_found(index)
            row = ops.indirect_indexing(request, num_reqs, check=False, wrap_neg=False)
            end = ops.to_dtype(start_of(ops.add(request, int32(1))), torch.int64)
            before_end = ops.sub(ops.index_expr(index[0], torch.int64), end)
            return ops.add(ops.to_dtype(load_len([row]), torch.int64), before_end)

        is_found = ops.ge(load_found(index), int32(0))
        value = ops.masked(is_found, of_request, ABSENT)
        return ops.maximum(value, ops.constant(ABSENT, torch.int64))

    def request(index: Any) -> Any:
        exists = ops.ge(load_position(index), ops.constant(0, torch.int64))
        return ops.where(exists, load_found(index), int32(ABSENT))

    load_found = realized(seq_lens, torch.int32, [num_tokens], search).make_loader()
    positions = realized(seq_lens, torch.int64, [num_tokens], position)
    load_position = positions.make_loader()
    return realized(seq_lens, torch.int32, [num_tokens], request), positions


_FAN_OUT = 4
"""Each round of the search narrows the range to a quarter. A binary search has twice as many
dependent loads, but only 2/3 as many loads in total."""


def _strides(boundaries: Any) -> list[int]:
    """Return the strides of the search's rounds, largest first. The number of boundaries may be
    symbolic."""
    steps = search_steps(int(boundaries) if boundaries.is_number else boundaries)
    return [_FAN_OUT**level for level in reversed(range((steps + 1) // 2))]


token_map = PointwiseIR(_token_map)


def _flatten_decode(
    query_start_loc: Tensor, seq_lens: Tensor, *, num_tokens: int, compress_ratio: int
) -> tuple[Tensor, Tensor]:
    req_indices, positions = torch.ops.dsv4_ops.token_map.default(
        query_start_loc, seq_lens, num_tokens=num_tokens
    )
    return visible_rows(positions, compress_ratio), req_indices


flatten_decode = Decompose(_flatten_decode)

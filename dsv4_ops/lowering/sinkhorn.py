"""Lowering of ``sinkhorn``: the thread of each entry computes the whole matrix in registers."""

from __future__ import annotations

from functools import reduce
from typing import Any

import sympy
import torch

from dsv4_ops.lowering.kinds import PointwiseIR

Matrix = list[list[Any]]


def _sinkhorn(logits: Any, *, num_streams: int, iterations: int, eps: float) -> Any:
    from dsv4_ops.lowering._compat import ops
    from dsv4_ops.lowering.slot_rows import realized

    logits.realize()
    load, streams = logits.make_loader(), range(num_streams)

    def added(values: list[Any]) -> Any:
        return reduce(ops.add, values)

    def rows_over_sums(mix: Matrix, smallest: Any) -> Matrix:
        scales = [ops.reciprocal(ops.add(added(row), smallest)) for row in mix]
        return [
            [ops.mul(value, scale) for value in row] for row, scale in zip(mix, scales, strict=True)
        ]

    def softmax(row: list[Any], smallest: Any) -> list[Any]:
        row_max = reduce(ops.maximum, row)
        weights = [ops.exp(ops.sub(value, row_max)) for value in row]
        total = added(weights)
        return [ops.add(ops.truediv(weight, total), smallest) for weight in weights]

    def entry(index: Any) -> Any:
        token, row, column = index
        smallest = ops.constant(eps, torch.float32)
        mix = [
            softmax(
                [load([token, sympy.Integer(place * num_streams + other)]) for other in streams],
                smallest,
            )
            for place in streams
        ]
        for iteration in range(iterations):
            if iteration > 0:
                mix = rows_over_sums(mix, smallest)
            mix = _transposed(rows_over_sums(_transposed(mix), smallest))
        return _chosen([_chosen(values, column) for values in mix], row)

    return realized(logits, torch.float32, [logits.get_size()[0], num_streams, num_streams], entry)


def _transposed(mix: Matrix) -> Matrix:
    return [list(column) for column in zip(*mix, strict=True)]


def _chosen(values: list[Any], place: Any) -> Any:
    """Select ``values[place]``, where ``place`` differs between elements of the loop."""
    from dsv4_ops.lowering._compat import ops

    selected, index = values[-1], ops.index_expr(place, torch.int32)
    for other, value in enumerate(values[:-1]):
        selected = ops.where(ops.eq(index, ops.constant(other, torch.int32)), value, selected)
    return selected


sinkhorn = PointwiseIR(_sinkhorn)

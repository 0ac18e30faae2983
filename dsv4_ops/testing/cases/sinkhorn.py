"""Cases, strategy and float64 results of the mixing matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.reference import sinkhorn as reference
from dsv4_ops.testing.case import Case, Exact, OpTesting
from dsv4_ops.testing.strategies.draw import Draw


def _sinkhorn_cases() -> list[Case]:
    one = {"num_streams": 2, "iterations": 1, "eps": 0.25}
    # the softmax has rows (1/4, 3/4) and (1/2, 1/2); eps of 1/4 is added to each value, and to the
    # sums of the columns, 1.25 and 1.75
    thirds = torch.tensor([[0.0, math.log(3.0), 5.0, 5.0]])
    halves = [[[0.5 / 1.5, 1.0 / 2.0], [0.75 / 1.5, 0.75 / 2.0]]]
    even = {"num_streams": 4, "iterations": 20, "eps": 2.0**-140}
    return [
        Case("columns over their sums", (thirds,), one, (torch.tensor(halves).tolist(),)),
        Case("nothing to do", (torch.zeros(1, 16),), even, ([[[0.25] * 4] * 4],)),
        Case("one stream", (torch.zeros(2, 1),), {**even, "num_streams": 1}, ([[[1.0]], [[1.0]]],)),
        Case("no token", (torch.zeros(0, 16),), even, ([],)),
    ]


def _sinkhorn_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 17), min_size)
    width = settings["num_streams"] ** 2
    count = num_tokens * width
    special = draw.st.sampled_from((0.0, -0.0, 30.0, -30.0, -math.inf, math.inf, math.nan))
    values = draw.st.one_of(
        draw.st.floats(-12, 12, width=32), draw.st.floats(-2, 2, width=32), special
    )
    values_of_row = draw(draw.st.lists(values, min_size=count, max_size=count))
    logits = torch.tensor(values_of_row, dtype=torch.float32).view(num_tokens, width)
    return Case("sampled", (logits,), settings)


def _sinkhorn_precise(
    logits: Tensor, *, num_streams: int, iterations: int, eps: float
) -> tuple[Exact | None, ...]:
    return (sinkhorn_error(logits.double(), num_streams, iterations, eps),)


def sinkhorn_error(
    logits: Tensor, num_streams: int, iterations: int, eps: float, errors: Tensor | float = 0.0
) -> Exact:
    """Compute the mixing matrix of float64 ``logits``; ``errors`` are absolute errors of logits."""
    value = reference.sinkhorn(logits, num_streams=num_streams, iterations=iterations, eps=eps)
    # the absolute error of a logit becomes a relative error of its exponential; through the sums of
    # rows and columns, this error reaches all values; each division adds one rounding
    reach = logits.abs().nan_to_num(0.0, 0.0, 0.0) + 4 * errors / 2.0**-24
    return Exact(value, value * (reach.sum(1)[:, None, None] + 2 * iterations))


sinkhorn = OpTesting(
    cases=_sinkhorn_cases,
    settings=(
        {"num_streams": 4, "iterations": 20, "eps": 1e-6},
        {"num_streams": 3, "iterations": 1, "eps": 1e-6},
        {"num_streams": 2, "iterations": 3, "eps": 0.125},
        {"num_streams": 1, "iterations": 2, "eps": 1e-6},
    ),
    make=_sinkhorn_call,
    precise=_sinkhorn_precise,
)

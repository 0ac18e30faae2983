"""Mixing matrices of hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.gradient import REFERENCE
from dsv4_ops.dispatch.define import define_op

MAX_STREAMS = 8
MAX_ITERATIONS = 64
"""Maximum iterations: compiled code unrolls all of them."""

_sinkhorn = define_op(
    "sinkhorn",
    "sinkhorn(Tensor logits, *, int num_streams, int iterations, float eps) -> Tensor",
    lowering={"cpu": "pointwise", "cuda": "pointwise"},
    dynamic=("num_tokens",),
    gradient=REFERENCE,
    source="DeepSeek-V4 manifold-constrained hyper-connections, Sinkhorn-Knopp",
)


def sinkhorn(
    logits: Tensor, *, num_streams: int = 4, iterations: int = 20, eps: float = 1e-6
) -> Tensor:
    """Make an almost doubly stochastic matrix from each token's logits.

    The matrices mix the residual streams. The op takes the softmax of every row and adds ``eps``.
    Then it divides columns and rows in turn by their sums plus ``eps``; columns come first and
    last.

    Args:
        logits: [num_tokens, num_streams * num_streams], float32, any strides: rows of the matrices
            one after the other.
        num_streams: Rows and columns of a matrix. At least 1, at most 8.
        iterations: Number of divisions of the columns; rows are divided in between. At least 1, at
            most 64.
        eps: Added to every weight once, and to every sum. Above 0.

    Returns:
        float32 [num_tokens, num_streams, num_streams], dense. Columns sum to 1 up to ``eps``, and
        rows nearly to 1. A NaN or +inf in a token's logits makes the token's matrix NaN, but no
        other matrix.

    Mutates: nothing.

    Raises:
        ValueError: another shape, or a number out of range.
        TypeError: a dtype other than float32.

    Compile: Inductor IR: one kernel that computes all iterations in registers. If a derivative is
        needed, plain torch ops. Dynamic in num_tokens; CUDA graphs and export: yes.

    Source: DeepSeek-V4's hyper-connections.

    Example:
        >>> import torch, dsv4_ops
        >>> mix = dsv4_ops.sinkhorn(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), num_streams=2)
        >>> mix.sum(1).round(decimals=3).tolist(), mix.sum(2).round(decimals=3).tolist()
        ([[1.0, 1.0]], [[1.0, 1.0]])
    """
    checks = Checks("sinkhorn")
    checks.at_least(1, num_streams=num_streams, iterations=iterations)
    check_at_most(checks.op, "iterations", iterations, MAX_ITERATIONS)
    check_at_most(checks.op, "num_streams", num_streams, MAX_STREAMS)
    checks.tensor("logits", logits, torch.float32, "num_tokens", num_streams * num_streams)
    checks.above(0, eps=eps)
    return _sinkhorn(logits, num_streams=num_streams, iterations=iterations, eps=eps)


def check_at_most(op: str, name: str, value: int, most: int) -> None:
    """Raise an error if ``value`` exceeds ``most``, because compiled code unrolls every step."""
    if value > most:
        raise argument_error(
            op,
            name,
            must=f"be at most {most}",
            got=value,
            do="Pass a smaller one: compiled code has every step of every entry written out",
        )

"""Pack the rows of ragged requests into a rectangle of next_n rows per request, and unpack them."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.dispatch.define import define_op

_SOURCE = "vLLM 0.33 pack_seq_triton and unpack_seq_triton, with static shapes"

_pack_seq = define_op(
    "pack",
    "pack_seq(Tensor x, Tensor query_start_loc, *, int next_n, float pad) -> Tensor",
    dynamic=("num_tokens", "num_reqs"),
    source=_SOURCE,
)
_unpack_seq = define_op(
    "pack",
    "unpack_seq(Tensor packed, Tensor query_start_loc, *, SymInt num_tokens) -> Tensor",
    dynamic=("num_tokens", "num_reqs"),
    source=_SOURCE,
)


def pack_seq(x: Tensor, query_start_loc: Tensor, *, next_n: int, pad: float = 0.0) -> Tensor:
    """Pack the first next_n tokens of every request into a rectangle.

    Kernels that need equal lengths take such a rectangle. Pack everything that such a kernel reads
    per token, such as queries and their weights.

    Args:
        x: A row per token, [num_tokens, ...], any dtype and strides.
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing.
        next_n: Rows per request of the result. At least 1.
        pad: Value of the rows after the end of a shorter request. An integer dtype must be able to
            represent ``pad``; for float8, ``pad`` must be 0.

    Returns:
        [num_reqs, next_n, ...] of the dtype of ``x``, dense: row t of a request is the request's
        token t, or ``pad`` if the request or ``x`` ends before token t. A request's tokens from
        token next_n on are dropped.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``next_n`` below 1, a ``pad`` that the dtype cannot hold,
            or several devices.
        TypeError: a dtype other than those above.

    Compile: Inductor generates one loop; dynamic in num_tokens, num_reqs and trailing sizes; CUDA
        graphs and export: yes.

    Source: vLLM 0.33 ``pack_seq_triton``; here the caller passes the longest length.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
        >>> dsv4_ops.pack_seq(torch.arange(1, 6), query_start_loc, next_n=2)
        tensor([[1, 2],
                [0, 0],
                [3, 4]])
    """
    checks = Checks("pack_seq")
    checks.at_least(1, next_n=next_n)
    checks.rows_of("x", x, "num_tokens")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.value_of("pad", pad, "x", x.dtype)
    return _pack_seq(x, query_start_loc, next_n=next_n, pad=pad)


def unpack_seq(packed: Tensor, query_start_loc: Tensor, *, num_tokens: int) -> Tensor:
    """Unpack a row for each token from a rectangle of requests.

    This op is the inverse of ``pack_seq``.

    Args:
        packed: Rows of every request, [num_reqs, next_n, ...], any dtype and strides.
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing.
        num_tokens: Tokens of the padded batch. At least 0.

    Returns:
        [num_tokens, ...] of the dtype of ``packed``, dense. Token t of a request gets row t of the
        request. A request's tokens from token next_n on, and padding tokens, get zeros.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``num_tokens`` below 0, more than 16383 requests, or
            several devices.
        TypeError: a dtype other than those above.

    Compile: a search per token, and a loop that Inductor generates; dynamic in num_tokens,
        num_reqs, next_n and trailing sizes; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``unpack_seq_triton``; here the caller passes the sum of the lengths.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
        >>> packed = torch.tensor([[1, 2], [0, 0], [3, 0]])
        >>> dsv4_ops.unpack_seq(packed, query_start_loc, num_tokens=4)
        tensor([1, 2, 3, 0])
    """
    checks = Checks("unpack_seq")
    checks.at_least(0, num_tokens=num_tokens)
    checks.rows_of("packed", packed, "num_reqs", "next_n")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.request_limit()
    return _unpack_seq(packed, query_start_loc, num_tokens=num_tokens)

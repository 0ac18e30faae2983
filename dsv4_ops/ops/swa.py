"""Sliding-window slots per token, and the rows a prefill gathers."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import SwaIndices
from dsv4_ops.meta import swa as meta
from dsv4_ops.reference import swa as reference

_swa_indices_and_lens = define_op(
    OpSpec(
        stem="swa",
        schema="swa_indices_and_lens(Tensor positions, Tensor req_indices, Tensor "
        "block_table, *, int block_size, "
        "int window_size) -> (Tensor, Tensor)",
        meta=meta.swa_indices_and_lens,
        reference=reference.swa_indices_and_lens,
        lowering={"cpu": "pointwise", "cuda": "pointwise"},
        dynamic=("num_tokens", "num_reqs", "max_blocks"),
        source="vLLM 0.33 _compute_swa_indices_and_lens_kernel; semantics re-derived",
        gradient=INTEGERS,
    )
)


def swa_indices_and_lens(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window_size: int,
) -> SwaIndices:
    """Cache slots of the sliding window of every token, decode and prefill alike.

    The window of a token at position p is max(p - window_size + 1, 0) .. p, oldest first.

    Args:
        positions: Absolute position of every token, [num_tokens], int64; outside 0..2**31-2 means
            padding.
        req_indices: Request of every token, [num_tokens], int32; outside 0..num_reqs-1 means
            padding.
        block_table: Page of every logical block of the window cache, [num_reqs, max_blocks], int32,
            any strides.
        block_size: Rows per page. At least 1.
        window_size: Keys of a full window, the token itself included. At least 1.

    Returns:
        ``SwaIndices(indices, lens)``: int32 [num_tokens, window_size] slots, -1 past the window,
        and int32 [num_tokens] window lengths. Padding tokens have a row of -1 and length 0. A key
        whose page lies past the table, is negative, or has slots beyond int32 is -1 inside the
        window.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: pointwise lowering (one masked table read per entry); dynamic in all tensor sizes; CUDA
        graphs and export: yes.

    Source: vLLM 0.33 ``_compute_swa_indices_and_lens_kernel``.

    Example:
        >>> import torch, dsv4_ops
        >>> block_table = torch.tensor([[7, 3], [2, 5]], dtype=torch.int32)
        >>> positions, req_indices = torch.tensor([5, 1]), torch.tensor([0, 1], dtype=torch.int32)
        >>> window = dsv4_ops.swa_indices_and_lens(
        ...     positions, req_indices, block_table, block_size=4, window_size=4
        ... )
        >>> window.indices.tolist()
        [[30, 31, 12, 13], [8, 9, -1, -1]]
    """
    checks = Checks("swa_indices_and_lens")
    checks.tensor("positions", positions, torch.int64, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.at_least(1, block_size=block_size, window_size=window_size)
    return SwaIndices(
        *_swa_indices_and_lens(
            positions, req_indices, block_table, block_size=block_size, window_size=window_size
        )
    )


_prefill_gather_lens = define_op(
    OpSpec(
        stem="swa",
        schema="prefill_gather_lens(Tensor query_start_loc, Tensor seq_lens, *, int "
        "window_size) -> Tensor",
        meta=meta.prefill_gather_lens,
        reference=reference.prefill_gather_lens,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=("num_reqs",),
        source="vLLM 0.33 _compute_prefill_metadata_kernel; semantics re-derived",
        gradient=INTEGERS,
    )
)


def prefill_gather_lens(query_start_loc: Tensor, seq_lens: Tensor, *, window_size: int) -> Tensor:
    """Trailing positions of every request whose window keys its query tokens need.

    Args:
        query_start_loc: First token of every request and one past the last, [num_reqs + 1], int32,
            non-decreasing.
        seq_lens: Tokens of every request, context included, [num_reqs], int32. 0 marks a padding
            request.
        window_size: Keys of a full window, the token itself included. At least 1.

    Returns:
        int32 [num_reqs]: query length + min(context length, window_size - 1), never more than the
        request has.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, or several devices.
        TypeError: a dtype other than int32.

    Compile: decomposes to one pointwise kernel; dynamic in num_reqs; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``_compute_prefill_metadata_kernel``.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 2, 4], dtype=torch.int32)
        >>> seq_lens = torch.tensor([9, 3], dtype=torch.int32)
        >>> dsv4_ops.prefill_gather_lens(query_start_loc, seq_lens, window_size=4).tolist()
        [5, 3]
    """
    checks = Checks("prefill_gather_lens")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.at_least(1, window_size=window_size)
    result: Tensor = _prefill_gather_lens(query_start_loc, seq_lens, window_size=window_size)
    return result

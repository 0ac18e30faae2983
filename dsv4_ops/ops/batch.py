"""Split a batch into decodes and prefills, and find the request and position of every token."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.types import FlattenedDecode, TokenMap
from dsv4_ops.dispatch.define import define_op

_split_decodes_and_prefills = define_op(
    "batch",
    "split_decodes_and_prefills(Tensor query_start_loc, *, int decode_threshold, "
    "bool require_uniform) -> Tensor",
    dynamic=("num_reqs",),
    source="vLLM 0.33 split_decodes_and_prefills; semantics re-derived, on device tensors",
    gradient=INTEGERS,
)


def split_decodes_and_prefills(
    query_start_loc: Tensor, *, decode_threshold: int, require_uniform: bool = False
) -> Tensor:
    """Find where the decodes of a decode-first batch end and its prefills begin.

    A request is a prefill if it has more than ``decode_threshold`` query tokens. With
    ``require_uniform``, a request is also a prefill if its number of query tokens differs from that
    of the first non-empty request. A padding request has no query tokens, so it is never the first
    prefill. From the first prefill on, all requests count as prefills.

    Args:
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing.
        decode_threshold: Maximum query tokens of a decode: 1 + speculative tokens. At least 1.
        require_uniform: Whether all decodes must have the same number of query tokens.

    Returns:
        int32 [4] on the device of the input: (num_decodes, num_prefills, num_decode_tokens,
        num_prefill_tokens).

    Mutates: nothing.

    Raises:
        ValueError: wrong shape, ``decode_threshold`` below 1, or more than 16383 requests.
        TypeError: a dtype other than int32, or an argument that is not an int or bool.

    Compile: decomposes to aten; dynamic in num_reqs; CUDA graphs and export: yes. No host
        synchronisation.

    Source: vLLM 0.33 ``split_decodes_and_prefills``.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 2, 4, 5, 12], dtype=torch.int32)
        >>> dsv4_ops.split_decodes_and_prefills(query_start_loc, decode_threshold=2).tolist()
        [3, 1, 5, 7]
    """
    checks = Checks("split_decodes_and_prefills")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.request_limit()
    checks.at_least(1, decode_threshold=decode_threshold)
    checks.flag("require_uniform", require_uniform)
    return _split_decodes_and_prefills(
        query_start_loc, decode_threshold=decode_threshold, require_uniform=require_uniform
    )


_token_map = define_op(
    "batch",
    "token_map(Tensor query_start_loc, Tensor seq_lens, *, SymInt num_tokens) -> (Tensor, Tensor)",
    lowering={"cpu": "pointwise", "cuda": "pointwise"},
    dynamic=("num_reqs", "num_tokens"),
    source="vLLM 0.33 compute_token_to_req_indices and the position arithmetic of its builders",
    gradient=INTEGERS,
)


def token_map(query_start_loc: Tensor, seq_lens: Tensor, *, num_tokens: int) -> TokenMap:
    """Find the request and the absolute position of every token.

    Later ops of the step take this result instead of searching ``query_start_loc`` again.

    Args:
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing. If values decrease, a token may get any request in range.
        seq_lens: Number of tokens of each request, context included, [num_reqs], int32. 0 marks a
            padding request.
        num_tokens: Tokens of the padded batch. ``query_start_loc`` may end before or after
            ``num_tokens``.

    Returns:
        ``TokenMap(req_indices, positions)``: int32 [num_tokens] and int64 [num_tokens]. Both values
        are -1 for a token of no request, and for a token whose position would be negative because
        ``seq_lens`` is below the request's number of query tokens.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a negative ``num_tokens``, several devices, or more than
            16383 requests.
        TypeError: a dtype other than int32.

    Compile: pointwise lowering (an unrolled binary search that fuses with its consumers); dynamic
        in num_reqs and num_tokens; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``compute_token_to_req_indices``.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> seq_lens = torch.tensor([10, 7], dtype=torch.int32)
        >>> tokens = dsv4_ops.token_map(query_start_loc, seq_lens, num_tokens=5)
        >>> tokens.req_indices.tolist(), tokens.positions.tolist()
        ([0, 0, 0, 1, -1], [7, 8, 9, 6, -1])
    """
    checks = Checks("token_map")
    _check_batch(checks, query_start_loc, seq_lens)
    checks.at_least(0, num_tokens=num_tokens)
    return TokenMap(*_token_map(query_start_loc, seq_lens, num_tokens=num_tokens))


_flatten_decode = define_op(
    "batch",
    "flatten_decode(Tensor query_start_loc, Tensor seq_lens, *, SymInt "
    "num_tokens, int compress_ratio) "
    "-> (Tensor, Tensor)",
    dynamic=("num_reqs", "num_tokens"),
    source="vLLM 0.33 fused decode metadata; replaces its uniform, variable and native paths",
    gradient=INTEGERS,
)


def flatten_decode(
    query_start_loc: Tensor, seq_lens: Tensor, *, num_tokens: int, compress_ratio: int = 1
) -> FlattenedDecode:
    """Turn ragged decode requests into one row per token.

    Requests may differ in their numbers of tokens, as with multi-token prediction (MTP).

    Args:
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing.
        seq_lens: Number of tokens of each request, context included, [num_reqs], int32. 0 marks a
            padding request.
        num_tokens: Tokens of the padded batch.
        compress_ratio: Positions per cache row: 1, 4 or 128 in DeepSeek-V4. At least 1.

    Returns:
        ``FlattenedDecode(seq_lens, req_indices)``: int32 [num_tokens] each. ``seq_lens`` counts the
        cache rows that the token may see, (position + 1) // compress_ratio. A padding token has
        length 0 and request -1.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, several devices, or more than 16383
            requests.
        TypeError: a dtype other than int32.

    Compile: decomposes to ``token_map`` and pointwise aten; dynamic in num_reqs and num_tokens;
        CUDA graphs and export: yes.

    Source: vLLM 0.33 ``_indexer_decode_metadata_kernel``.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> seq_lens = torch.tensor([10, 7], dtype=torch.int32)
        >>> rows = dsv4_ops.flatten_decode(
        ...     query_start_loc, seq_lens, num_tokens=5, compress_ratio=4
        ... )
        >>> rows.seq_lens.tolist()
        [2, 2, 2, 1, 0]
    """
    checks = Checks("flatten_decode")
    _check_batch(checks, query_start_loc, seq_lens)
    checks.at_least(0, num_tokens=num_tokens)
    checks.at_least(1, compress_ratio=compress_ratio)
    sizes = {"num_tokens": num_tokens, "compress_ratio": compress_ratio}
    return FlattenedDecode(*_flatten_decode(query_start_loc, seq_lens, **sizes))


_expand_block_table = define_op(
    "batch",
    "expand_block_table(Tensor block_table, Tensor req_indices) -> Tensor",
    dynamic=("num_reqs", "max_blocks", "num_tokens"),
    source="vLLM 0.33 decode flattening: one block-table row per token",
    gradient=INTEGERS,
)


def expand_block_table(block_table: Tensor, req_indices: Tensor) -> Tensor:
    """Give every token the block-table row of its request.

    The result is for kernels that need one block-table row per query row.

    Args:
        block_table: Physical block of every logical block, [num_reqs, max_blocks], int32, any
            strides. Entries are copied as they are.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.

    Returns:
        int32 [num_tokens, max_blocks]; rows of padding tokens are 0.

    Mutates: nothing.

    Raises:
        ValueError: wrong shapes or several devices.
        TypeError: a dtype other than int32.

    Compile: decomposes to one masked gather; dynamic in all sizes; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``_indexer_decode_metadata_kernel``.

    Example:
        >>> import torch, dsv4_ops
        >>> block_table = torch.tensor([[7, 3], [2, 5]], dtype=torch.int32)
        >>> req_indices = torch.tensor([1, -1], dtype=torch.int32)
        >>> dsv4_ops.expand_block_table(block_table, req_indices).tolist()
        [[2, 5], [0, 0]]
    """
    checks = Checks("expand_block_table")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    return _expand_block_table(block_table, req_indices)


_mtp_seq_lens = define_op(
    "batch",
    "mtp_seq_lens(Tensor query_start_loc, Tensor seq_lens, *, int next_n, int "
    "compress_ratio) -> Tensor",
    dynamic=("num_reqs",),
    source="vLLM 0.33 native multi-token lengths, made right for requests shorter than next_n",
    gradient=INTEGERS,
)


def mtp_seq_lens(
    query_start_loc: Tensor, seq_lens: Tensor, *, next_n: int, compress_ratio: int = 1
) -> Tensor:
    """Count the cache rows that each token of a multi-token decode may see.

    Args:
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing.
        seq_lens: Number of tokens of each request, context included, [num_reqs], int32. 0 marks a
            padding request.
        next_n: Maximum tokens of a decode request. At least 1.
        compress_ratio: Positions per cache row. At least 1.

    Returns:
        int32 [num_reqs, next_n], contiguous. Entry j is (position + 1) // compress_ratio of the
        request's query token j. Entries past the request's last query token are 0, never -1. A
        request with more than next_n query tokens has entries for its first next_n tokens only.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, or several devices.
        TypeError: a dtype other than int32.

    Compile: decomposes to one pointwise kernel; dynamic in num_reqs; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``_prepare_decode_tensors``, native path.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
        >>> seq_lens = torch.tensor([10, 7, 0], dtype=torch.int32)
        >>> dsv4_ops.mtp_seq_lens(query_start_loc, seq_lens, next_n=2).tolist()
        [[9, 10], [7, 0], [0, 0]]
    """
    checks = Checks("mtp_seq_lens")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.at_least(1, next_n=next_n, compress_ratio=compress_ratio)
    return _mtp_seq_lens(query_start_loc, seq_lens, next_n=next_n, compress_ratio=compress_ratio)


def _check_batch(checks: Checks, query_start_loc: Tensor, seq_lens: Tensor) -> None:
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.request_limit()

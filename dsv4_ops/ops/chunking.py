"""Split prefill requests into chunks that fit the workspace, and find the key rows that each query
row may see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.ints import INT64_MAX
from dsv4_ops.core.types import PrefillChunks, PrefillRowBounds
from dsv4_ops.dispatch.define import define_op

_split_prefill_chunks = define_op(
    "chunking",
    "split_prefill_chunks(Tensor seq_lens, Tensor query_lens, *, int "
    "workspace_size, int max_logits_bytes, "
    "int max_chunks, SymInt request_offset) -> (Tensor, Tensor)",
    dynamic=("num_reqs",),
    source="vLLM 0.33 split_indexer_prefill_chunks; the plan as tensors, without a loop",
    gradient=INTEGERS,
)


def split_prefill_chunks(
    seq_lens: Tensor,
    query_lens: Tensor,
    *,
    workspace_size: int,
    max_logits_bytes: int,
    max_chunks: int,
    request_offset: int = 0,
) -> PrefillChunks:
    """Split prefill requests into chunks on the device.

    A request is added to a chunk if the chunk then has at most ``workspace_size`` key rows, and if
    its query rows times its key rows are at most ``max_logits_bytes`` / 4. A request that exceeds a
    limit by itself gets chunks of its own. These chunks divide the request's query rows, so that
    each chunk stays within the logits limit or has a single query row. Chunks do not divide the
    request's keys, so make ``workspace_size`` at least the key rows of the longest request.

    Args:
        seq_lens: Number of key rows of each request (its compressed length), [num_reqs], int32.
            Negative values count as 0.
        query_lens: Number of query rows of each request, [num_reqs], int32. Negative values count
            as 0.
        workspace_size: Key rows that the gather workspace holds. At least 1.
        max_logits_bytes: Maximum bytes of fp32 logits of one chunk. At least 4.
        max_chunks: Rows of ``chunks``; ``max_prefill_chunks`` returns a number that suffices for
            any batch. At least 1.
        request_offset: Number added to request numbers: the number of decodes before the first
            prefill.

    Returns:
        ``PrefillChunks(chunks, num_chunks)``. ``chunks``, int32 [max_chunks, 4], has rows
        (req_start, req_stop, query_start, query_stop); query rows are numbered from the first query
        row of req_start, and unused rows are 0. ``num_chunks``, int32 [1], is the number of chunks
        in the plan. If num_chunks exceeds max_chunks, the plan does not fit and only its first
        max_chunks chunks are stored.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, several devices, or more than 16383
            requests.
        TypeError: a dtype other than int32.

    Compile: decomposes to aten; dynamic in num_reqs; CUDA graphs and export: yes. On CPU the prefix
        sums call aten.cumsum.

    Source: vLLM 0.33 ``split_indexer_prefill_chunks``.

    Example:
        >>> import torch, dsv4_ops
        >>> seq_lens = torch.tensor([100, 50, 400], dtype=torch.int32)
        >>> query_lens = torch.tensor([10, 5, 40], dtype=torch.int32)
        >>> plan = dsv4_ops.split_prefill_chunks(
        ...     seq_lens,
        ...     query_lens,
        ...     workspace_size=160,
        ...     max_logits_bytes=16000,
        ...     max_chunks=6,
        ...     request_offset=2,
        ... )
        >>> plan.num_chunks.item(), plan.chunks.tolist()[:3]
        (5, [[2, 4, 0, 15], [4, 5, 0, 10], [4, 5, 10, 20]])
    """
    checks = Checks("split_prefill_chunks")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.tensor("query_lens", query_lens, torch.int32, "num_reqs")
    checks.request_limit()
    budgets = {"workspace_size": workspace_size, "max_logits_bytes": max_logits_bytes}
    _check_budgets(checks, **budgets, request_offset=request_offset)
    checks.at_least(1, max_chunks=max_chunks)
    chunks = {"max_chunks": max_chunks, "request_offset": request_offset}
    return PrefillChunks(*_split_prefill_chunks(seq_lens, query_lens, **budgets, **chunks))


def plan_prefill_chunks(
    seq_lens: Sequence[int] | Tensor,
    query_lens: Sequence[int] | Tensor,
    *,
    workspace_size: int,
    max_logits_bytes: int,
    request_offset: int = 0,
) -> list[tuple[slice, slice]]:
    """Return the plan of ``split_prefill_chunks`` as Python slices.

    Use this function in eager code that has the lengths on the host.

    Args:
        seq_lens: Number of key rows of each request, non-negative ints or a CPU tensor.
        query_lens: Number of query rows of each request, with as many entries as ``seq_lens``.
        workspace_size: Key rows that the gather workspace holds. At least 1.
        max_logits_bytes: Maximum bytes of fp32 logits of one chunk. At least 4.
        request_offset: Number added to the request numbers.

    Returns:
        ``(requests, queries)`` slices, one pair per chunk.

    Raises:
        ValueError: a negative length, lists of different sizes, or a budget out of range.
        TypeError: a length or a budget that is not an int.

    Example:
        >>> import dsv4_ops
        >>> dsv4_ops.plan_prefill_chunks(
        ...     [100, 50], [10, 5], workspace_size=160, max_logits_bytes=16000
        ... )
        [(slice(0, 2, None), slice(0, 15, None))]
    """
    checks = Checks("plan_prefill_chunks")
    _check_budgets(checks, workspace_size, max_logits_bytes, request_offset)
    rows = checks.host_lens("seq_lens", seq_lens)
    queries = checks.host_lens("query_lens", query_lens)
    if len(rows) != len(queries):
        raise checks.error(
            "query_lens",
            must=f"have as many entries as seq_lens ({len(rows)})",
            got=len(queries),
            do="Pass one length per request in both",
        )
    max_logits = max_logits_bytes // 4
    plan: list[tuple[slice, slice]] = []
    start = 0
    while start < len(rows):
        stop, num_rows, num_queries = start + 1, rows[start], queries[start]
        while stop < len(rows) and num_rows + rows[stop] <= workspace_size:
            if (num_queries + queries[stop]) * (num_rows + rows[stop]) > max_logits:
                break
            num_rows += rows[stop]
            num_queries += queries[stop]
            stop += 1
        size = max(1, max_logits // num_rows) if num_rows else max(1, num_queries)
        requests = slice(start + request_offset, stop + request_offset)
        plan += [
            (requests, slice(first, min(first + size, num_queries)))
            for first in range(0, num_queries, size)
        ]
        start = stop
    return plan


def max_prefill_chunks(
    *, num_reqs: int, num_tokens: int, max_seq_len: int, max_logits_bytes: int
) -> int:
    """Return an upper bound on the number of chunks, for ``max_chunks``.

    Args:
        num_reqs: Maximum prefill requests of a batch. At least 0.
        num_tokens: Maximum query tokens of a batch. At least 0.
        max_seq_len: Maximum key rows of one request (compressed length). At least 0.
        max_logits_bytes: Maximum bytes of fp32 logits of one chunk. At least 4.

    Returns:
        An upper bound, at least 1, that follows from the sizes alone: every chunk has a query row,
        at most num_reqs chunks contain the last query row of a request, and every other chunk has
        at least as many query rows as the logits budget allows for the longest request.

    Raises:
        ValueError: an argument out of range.
        TypeError: an argument that is not an int.

    Example:
        >>> import dsv4_ops
        >>> dsv4_ops.max_prefill_chunks(
        ...     num_reqs=4, num_tokens=8192, max_seq_len=262144, max_logits_bytes=2**29
        ... )
        20
    """
    checks = Checks("max_prefill_chunks")
    checks.at_least(0, num_reqs=num_reqs, num_tokens=num_tokens, max_seq_len=max_seq_len)
    checks.at_least(4, most=INT64_MAX, max_logits_bytes=max_logits_bytes)
    smallest_piece = max(1, max_logits_bytes // 4 // max(1, max_seq_len))
    return max(1, min(num_tokens, num_reqs + num_tokens // smallest_piece))


_prefill_row_bounds = define_op(
    "chunking",
    "prefill_row_bounds(Tensor positions, Tensor req_indices, Tensor seq_lens, *, "
    "int compress_ratio) "
    "-> (Tensor, Tensor, Tensor)",
    dynamic=("num_tokens", "num_reqs"),
    source="vLLM 0.33 build_prefill_chunk_metadata, for the whole batch at once",
    gradient=INTEGERS,
)


def prefill_row_bounds(
    positions: Tensor, req_indices: Tensor, seq_lens: Tensor, *, compress_ratio: int
) -> PrefillRowBounds:
    """Find the rows of the gathered compressed keys that each token may see.

    The keys of the requests lie one after another; each request has seq_len // compress_ratio rows.

    Args:
        positions: Absolute position of every token, [num_tokens], int64; values outside 0..2**31-2
            mark padding.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        seq_lens: Number of tokens of each request, context included, [num_reqs], int32. Negative
            values count as 0.
        compress_ratio: Positions per compressed row. At least 1.

    Returns:
        ``PrefillRowBounds(cu_seq_lens, row_start, row_stop)``: the prefix sum of compressed
        lengths, int32 [num_reqs + 1], saturating at 2**31 - 1; and each token's first row and one
        past its last row, int32 [num_tokens]. Padding tokens have bounds 0 and 0. ``row_stop`` is
        never past the end of the token's request.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``compress_ratio`` below 1, or several devices.
        TypeError: a dtype other than those above.

    Compile: decomposes to a scan and one pointwise kernel; dynamic in num_tokens and num_reqs; CUDA
        graphs and export: yes. On CPU the prefix sum calls aten.cumsum.

    Source: vLLM 0.33 ``build_prefill_chunk_metadata``.

    Example:
        >>> import torch, dsv4_ops
        >>> positions, req_indices = torch.tensor([6, 7, 8]), torch.zeros(3, dtype=torch.int32)
        >>> seq_lens = torch.tensor([9], dtype=torch.int32)
        >>> bounds = dsv4_ops.prefill_row_bounds(positions, req_indices, seq_lens, compress_ratio=4)
        >>> bounds.row_stop.tolist()
        [1, 2, 2]
    """
    checks = Checks("prefill_row_bounds")
    checks.tokens(positions, req_indices)
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.at_least(1, compress_ratio=compress_ratio)
    tensors = (positions, req_indices, seq_lens)
    return PrefillRowBounds(*_prefill_row_bounds(*tensors, compress_ratio=compress_ratio))


_prefill_chunk_row_bounds = define_op(
    "chunking",
    "prefill_chunk_row_bounds(Tensor positions, Tensor req_indices, Tensor "
    "seq_lens, Tensor query_start_loc, "
    "Tensor chunk, *, int compress_ratio) -> (Tensor, Tensor, Tensor)",
    dynamic=("num_tokens", "num_reqs"),
    source="vLLM 0.33 build_prefill_chunk_metadata, with the chunk as a device tensor",
    gradient=INTEGERS,
)


def prefill_chunk_row_bounds(
    positions: Tensor,
    req_indices: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    chunk: Tensor,
    *,
    compress_ratio: int,
) -> PrefillRowBounds:
    """Compute the ``prefill_row_bounds`` of one chunk.

    Row 0 is the first key of the chunk's first request.

    Results have the shapes of the whole batch, so a compiled call serves every row of the plan of
    ``split_prefill_chunks``.

    Args:
        positions: Absolute position of every token, [num_tokens], int64; values outside 0..2**31-2
            mark padding.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        seq_lens: Number of tokens of each request, context included, [num_reqs], int32. Negative
            values count as 0.
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32.
        chunk: (req_start, req_stop, query_start, query_stop), int32 [4], on the device.
        compress_ratio: Positions per compressed row. At least 1.

    Returns:
        ``PrefillRowBounds`` in the shapes of the whole batch; requests outside the chunk have no
        rows in ``cu_seq_lens``, and tokens outside the chunk have bounds 0 and 0. An empty chunk
        gives zeros.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``compress_ratio`` below 1, or several devices.
        TypeError: a dtype other than those above.

    Compile: decomposes to a scan and pointwise kernels; dynamic in num_tokens and num_reqs; CUDA
        graphs and export: yes. On CPU the prefix sum calls aten.cumsum.

    Source: vLLM 0.33 ``build_prefill_chunk_metadata``.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> seq_lens = torch.tensor([9, 13], dtype=torch.int32)
        >>> tokens = dsv4_ops.token_map(query_start_loc, seq_lens, num_tokens=8)
        >>> chunk = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
        >>> dsv4_ops.prefill_chunk_row_bounds(
        ...     *reversed(tokens), seq_lens, query_start_loc, chunk, compress_ratio=4
        ... ).row_stop.tolist()
        [0, 0, 2, 4, 4, 0, 0, 0]
    """
    checks = Checks("prefill_chunk_row_bounds")
    checks.tokens(positions, req_indices)
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.tensor("chunk", chunk, torch.int32, 4)
    checks.at_least(1, compress_ratio=compress_ratio)
    tensors = (positions, req_indices, seq_lens, query_start_loc, chunk)
    return PrefillRowBounds(*_prefill_chunk_row_bounds(*tensors, compress_ratio=compress_ratio))


def _check_budgets(
    checks: Checks, workspace_size: int, max_logits_bytes: int, request_offset: int
) -> None:
    checks.at_least(1, most=INT64_MAX, workspace_size=workspace_size)
    checks.at_least(4, most=INT64_MAX, max_logits_bytes=max_logits_bytes)
    checks.at_least(0, request_offset=request_offset)

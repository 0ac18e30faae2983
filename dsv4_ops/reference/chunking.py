"""Split prefill requests into chunks that fit the workspace, and find the key rows that each query
row may see.

The chunk plan is greedy but needs no loop. A group is a range of requests that fits both limits, on
rows and on logits. If a range fits, so does a shorter range with the same start. So a binary search
finds the end of the longest group that starts at request i, for every i at once. The next group
starts at this end. So pointer doubling, which begins with request 0, finds the starts of all
groups. A group is one chunk, unless it is a single request with too many logits. The queries of
this request are divided among several chunks, which a prefix sum and a search find.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import INT32_MAX, search_steps
from dsv4_ops.reference.common import bisect, gather_rows, take, valid_tokens, visible_rows


def split_prefill_chunks(
    seq_lens: Tensor,
    query_lens: Tensor,
    *,
    workspace_size: int,
    max_logits_bytes: int,
    max_chunks: int,
    request_offset: int,
) -> tuple[Tensor, Tensor]:
    max_logits = max_logits_bytes // 4
    rows, queries = _prefix_sum(seq_lens.clamp(min=0)), _prefix_sum(query_lens.clamp(min=0))
    stop_after = _group_stops(rows, queries, workspace_size, max_logits)
    start = _orbit(stop_after)
    stop = take(stop_after, start)
    num_queries = take(queries, stop) - take(queries, start)
    num_rows = take(rows, stop) - take(rows, start)
    size = _queries_per_chunk(num_queries, num_rows, max_logits)
    counts = (num_queries + size - 1) // size
    last = torch.cumsum(counts, 0)

    chunk = torch.arange(max_chunks, device=seq_lens.device)
    group = _search(last, chunk)
    query_start = (chunk - take(last - counts, group)) * take(size, group)
    query_stop = torch.minimum(query_start + take(size, group), take(num_queries, group))
    table = torch.stack(
        (
            take(start, group) + request_offset,
            take(stop, group) + request_offset,
            query_start,
            query_stop,
        ),
        1,
    )
    table = torch.where((chunk < last[-1])[:, None], table.clamp(max=INT32_MAX), 0)
    return table.to(torch.int32), last[-1:].clamp(max=INT32_MAX).to(torch.int32)


def _prefix_sum(values: Tensor) -> Tensor:
    """Return the sums of the first 0, 1, .. n values, int64 [n + 1]."""
    return torch.nn.functional.pad(torch.cumsum(values.long(), 0), (1, 0))


def _group_stops(rows: Tensor, queries: Tensor, workspace_size: int, max_logits: int) -> Tensor:
    """Return the end of the group that starts at each request, [P + 1] for P requests. A request
    that is too large is a group by itself."""
    num_reqs = rows.shape[0] - 1
    start = torch.arange(num_reqs + 1, dtype=torch.int32, device=rows.device)

    def fits(count: Tensor) -> Tensor:
        stop = (start + count).clamp(max=num_reqs)
        num_rows, num_queries = take(rows, stop) - rows, take(queries, stop) - queries
        # queries * rows <= max_logits without a product, which could overflow
        bounded = (num_rows == 0) | (num_queries <= max_logits // num_rows.clamp(min=1))
        return (start + count <= num_reqs) & (num_rows <= workspace_size) & bounded

    count = bisect(fits, num_reqs, torch.zeros_like(start))
    return (start + count.clamp(min=1)).clamp(max=num_reqs)


def _orbit(successor: Tensor) -> Tensor:
    """Return 0, successor(0), successor(successor(0)), ..., [P + 1], by pointer doubling. The last
    index, P, must be its own successor."""
    rank = torch.arange(successor.shape[0], dtype=torch.int32, device=successor.device)
    node, jump = torch.zeros_like(rank), successor
    for step in range(search_steps(successor.shape[0])):
        node = torch.where((rank >> step) & 1 == 1, take(jump, node), node)
        jump = take(jump, jump)
    return node


def _queries_per_chunk(num_queries: Tensor, num_rows: Tensor, max_logits: int) -> Tensor:
    """Return the number of queries per chunk of a group: all queries, or as many as have at most
    ``max_logits`` logits; at least one."""
    bounded = (max_logits // num_rows.clamp(min=1)).clamp(min=1)
    all_queries = num_queries.clamp(min=1)
    return torch.where(num_rows > 0, torch.minimum(bounded, all_queries), all_queries)


def _search(last: Tensor, value: Tensor) -> Tensor:
    """Return the index of the first entry of the non-decreasing ``last`` that exceeds ``value``, or
    the last index."""
    final = last.shape[0] - 1

    def not_beyond(count: Tensor) -> Tensor:
        return (count <= final) & (take(last, (count - 1).clamp(max=final)) <= value)

    return bisect(not_beyond, final, torch.zeros_like(value, dtype=torch.int32))


def prefill_row_bounds(
    positions: Tensor, req_indices: Tensor, seq_lens: Tensor, *, compress_ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    valid = valid_tokens(positions, req_indices, seq_lens.shape[0])
    cu_seq_lens = _cumulative_rows(seq_lens.clamp(min=0) // compress_ratio)
    return cu_seq_lens, *_row_bounds(cu_seq_lens, positions, req_indices, valid, compress_ratio)


def prefill_chunk_row_bounds(
    positions: Tensor,
    req_indices: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    chunk: Tensor,
    *,
    compress_ratio: int,
) -> tuple[Tensor, Tensor, Tensor]:
    num_reqs = seq_lens.shape[0]
    req_start, req_stop, query_start, query_stop = chunk.long().unbind()
    request = torch.arange(num_reqs, device=seq_lens.device)
    in_chunk = (request >= req_start) & (request < req_stop)
    cu_seq_lens = _cumulative_rows(
        torch.where(in_chunk, seq_lens.clamp(min=0) // compress_ratio, 0)
    )
    valid = valid_tokens(positions, req_indices, num_reqs)
    valid = valid & (req_indices >= req_start) & (req_indices < req_stop)
    token = torch.arange(positions.shape[0], device=positions.device)
    # shape [1], not []: indexing with a 0-d tensor synchronises with the host
    first = req_start.clamp(min=0, max=num_reqs).reshape(1)
    query = token - take(query_start_loc, first)
    valid = valid & (query >= query_start) & (query < query_stop)
    return cu_seq_lens, *_row_bounds(cu_seq_lens, positions, req_indices, valid, compress_ratio)


def _cumulative_rows(rows: Tensor) -> Tensor:
    return _prefix_sum(rows).clamp(max=INT32_MAX).to(torch.int32)


def _row_bounds(
    cu_seq_lens: Tensor, positions: Tensor, req_indices: Tensor, valid: Tensor, compress_ratio: int
) -> tuple[Tensor, Tensor]:
    row_start = gather_rows(cu_seq_lens, req_indices, valid)
    end = gather_rows(cu_seq_lens, req_indices + 1, valid)
    row_stop = row_start + torch.minimum(visible_rows(positions, compress_ratio), end - row_start)
    return row_start, torch.where(valid, row_stop, 0)

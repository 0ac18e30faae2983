"""Attention of a tile of queries of one request and one head over the request's keys."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.attention.mainloop import log2_sum, softmax_step
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies kernels, not modules
    multiply_add,
    round_to,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)

_STARTS = tl.constexpr(128)
"""Entries of ``query_start_loc`` that are read at a time."""


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _load_rows(rows, wanted, dim_stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH]: DIM values of each row; zeros behind them, and of rows that are not wanted."""
    dim = tl.arange(0, WIDTH)[None, :]
    mask = wanted[:, None]
    if DIM != WIDTH:
        mask = mask & (dim < DIM)
    return tl.load(rows[:, None] + dim.to(tl.int64) * dim_stride, mask=mask, other=0.0)


@triton.jit
def _attend(
    sums, queries, keys, span, limit,
    SIZES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running sums after the keys of ``span``.

    Args:
        sums: Weighted values, row_max and row_sum of every query.
        queries: Their values without and with RoPE.
        keys: Pointers to a head's first row, row and column strides of k_nope, k_pe and v.
        span: First key, and the one behind the last.
        limit: First key that each query does not see.
        SIZES: Columns of k_nope, k_pe and v and of their tiles, keys of a tile, softmax_scale,
            stages, and whether queries see no key behind their own.
        MASKED: Whether queries see some of these keys only, or the last tile is not full.
    """
    NOPE_DIM: tl.constexpr = SIZES[0]
    ROPE_DIM: tl.constexpr = SIZES[1]
    VALUE_DIM: tl.constexpr = SIZES[2]
    NOPE: tl.constexpr = SIZES[3]
    ROPE: tl.constexpr = SIZES[4]
    VALUE: tl.constexpr = SIZES[5]
    KEYS: tl.constexpr = SIZES[6]
    SCALE: tl.constexpr = SIZES[7] * _LOG2_E
    STAGES: tl.constexpr = SIZES[8]
    CAUSAL: tl.constexpr = SIZES[9]
    out, row_max, row_sum = sums
    q_nope, q_pe = queries
    nope, nope_stride, nope_step, rope, rope_stride, rope_step, value, value_stride, value_step = (
        keys
    )
    first, last = span
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        there = key < last
        row = key.to(tl.int64)
        k_nope = _load_rows(nope + row * nope_stride, there, nope_step, NOPE_DIM, NOPE)
        k_pe = _load_rows(rope + row * rope_stride, there, rope_step, ROPE_DIM, ROPE)
        logits = tl.zeros((q_nope.shape[0], KEYS), dtype=tl.float32)
        logits = multiply_add(q_nope, tl.trans(k_nope), logits)
        logits = multiply_add(q_pe, tl.trans(k_pe), logits) * SCALE
        if MASKED:
            seen = there[None, :] & (key[None, :] < limit[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        weights, factor, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        values = _load_rows(value + row * value_stride, there, value_step, VALUE_DIM, VALUE)
        if MASKED and CAUSAL:
            # P of an unseen key is 0, and its product with no number NaN
            is_number = tl.abs(values.to(tl.float32)) < float("inf")
            lost = tl.max(tl.where(is_number, 0, 1), axis=1)
            values = tl.where(is_number, values, 0.0)
            weights = tl.where(seen & (lost > 0)[None, :], float("nan"), weights)
        out = multiply_add(round_to(weights, values.dtype), values, out * factor[:, None])
    return out, row_max, row_sum


@triton.jit
def mla_prefill_kernel(
    q, q_stride, q_head_stride, q_dim_stride,
    k_nope, nope_stride, nope_head_stride, nope_dim_stride,
    k_pe, rope_stride, rope_dim_stride,
    v, value_stride, value_head_stride, value_dim_stride,
    query_start_loc, loc_stride,
    cu_seq_lens, cu_stride,
    out, lse,
    num_tokens, num_k, num_reqs,
    SOFTMAX_SCALE: tl.constexpr, CAUSAL: tl.constexpr, NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries and a head.

    The tokens before the first request, each request, and the tokens behind the last one are the
    spans 0 to num_reqs + 1. Span n begins with tile number first // QUERIES + n, which leaves it as
    many tiles as it needs. A start below the one before it counts as that one, so that every row is
    written whatever the starts are. Tiles of late queries, which see the most keys, come first.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    low, first = tl.program_id(0) * 0, tl.program_id(0) * 0
    end, highest, some = low + (2**31 - 1), low, low
    while some <= num_reqs:
        index = some + tl.arange(0, _STARTS)
        there = index <= num_reqs
        begin = tl.load(query_start_loc + index.to(tl.int64) * loc_stride, mask=there, other=0)
        begin = tl.maximum(tl.associative_scan(begin, 0, _larger), highest)
        inside = tl.minimum(begin, num_tokens)
        before = there & (inside // QUERIES + index + 1 <= tile)
        low += tl.sum(before.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(before, inside, 0)))
        end = tl.minimum(end, tl.min(tl.where(there & (before == 0), begin, 2**31 - 1)))
        highest = tl.max(begin)
        some += _STARTS
    is_request = (low > 0) & (low <= num_reqs)
    stop = tl.minimum(end, num_tokens)
    query = first + (tile - first // QUERIES - low) * QUERIES + tl.arange(0, QUERIES)
    exists = query < stop
    bounds = cu_seq_lens + (low - 1).to(tl.int64) * cu_stride
    key_first = tl.load(bounds, mask=is_request, other=0)
    key_last = tl.load(bounds + cu_stride, mask=is_request, other=0)
    key_first = tl.minimum(tl.maximum(key_first, 0), num_k)
    key_last = tl.minimum(tl.maximum(key_last, 0), num_k)
    # what the first query of the tile sees, all of them see
    seen_by_all = key_last
    most = key_last
    limit = tl.zeros((QUERIES,), dtype=tl.int32) + key_last
    if CAUSAL:
        behind = end.to(tl.int64) - 1 - query
        limit = tl.maximum(key_last - behind, key_first).to(tl.int32)
        most = tl.max(tl.where(exists, limit, key_first))
        seen_by_all = tl.minimum(tl.min(limit), key_last)
    most = tl.where(tl.min(query) < stop, most, key_first)
    whole = tl.maximum(seen_by_all - key_first, 0) // KEYS * KEYS
    whole = tl.where(most > key_first, whole, 0)

    heads = q + query.to(tl.int64) * q_stride + head * q_head_stride
    q_nope = _load_rows(heads, exists, q_dim_stride, NOPE_DIM, NOPE)
    q_pe = _load_rows(heads + NOPE_DIM * q_dim_stride, exists, q_dim_stride, ROPE_DIM, ROPE)
    keys = (
        k_nope + head * nope_head_stride, nope_stride, nope_dim_stride,
        k_pe, rope_stride, rope_dim_stride,
        v + head * value_head_stride, value_stride, value_dim_stride,
    )  # fmt: skip
    SIZES: tl.constexpr = (
        NOPE_DIM, ROPE_DIM, VALUE_DIM, NOPE, ROPE, VALUE, KEYS, SOFTMAX_SCALE, STAGES, CAUSAL
    )  # fmt: skip
    sums = (
        tl.zeros((QUERIES, VALUE), dtype=tl.float32),
        tl.full((QUERIES,), float("-inf"), dtype=tl.float32),
        tl.zeros((QUERIES,), dtype=tl.float32),
    )
    queries = (q_nope, q_pe)
    middle = key_first + whole
    sums = _attend(sums, queries, keys, (key_first, middle), limit, SIZES, False)
    sums = _attend(sums, queries, keys, (middle, most), limit, SIZES, True)
    summed, row_max, row_sum = sums
    summed = summed / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    target = query.to(tl.int64) * tl.num_programs(1) + head
    dim = tl.arange(0, VALUE)[None, :]
    place = out + target[:, None] * VALUE_DIM + dim
    summed = round_to(summed, q_nope.dtype)
    tl.store(place, summed, mask=exists[:, None] & (dim < VALUE_DIM))
    tl.store(lse + target, log2_sum(row_max, row_sum) * _LN_2, mask=exists)

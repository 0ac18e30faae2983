"""Attention of a tile of queries, all of one request and head, over the keys of the request."""

import triton
import triton.language as tl

from dsv4_ops.kernels.common.attention.mainloop import log2_sum, softmax_step
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import (  # by name: Inductor copies no modules
    multiply_add,
    round_to,
)
from dsv4_ops.kernels.common.sizes import SIZES

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)

_STARTS = tl.constexpr(128)
"""Entries of ``query_start_loc`` per load."""


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _load_rows(rows, row_valid, dim_stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load [rows, WIDTH]: the DIM values of each row, padded with zeros; zeros for invalid rows."""
    dim = tl.arange(0, WIDTH)[None, :]
    mask = row_valid[:, None]
    if DIM != WIDTH:
        mask = mask & (dim < DIM)
    return tl.load(rows[:, None] + dim.to(tl.int64) * dim_stride, mask=mask, other=0.0)


@triton.jit
def _attend(
    state, queries, keys, span, key_limit,
    SIZES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the online-softmax state after the keys of ``span``.

    Args:
        state: acc, row_max and row_sum of the queries.
        queries: The NoPE part and the RoPE part of the queries.
        keys: For each of k_nope, k_pe and v: the head's first row, row stride and column stride.
        span: The first key, and one past the last key.
        key_limit: For each query, one past the last key that the query sees.
        SIZES: Columns of k_nope, k_pe and v; columns of their tiles; keys per tile; softmax_scale;
            stages; and whether the mask is causal.
        MASKED: Whether some queries do not see all of these keys, or the last tile is partial.
    """
    NOPE_DIM: tl.constexpr = SIZES[0]
    ROPE_DIM: tl.constexpr = SIZES[1]
    VALUE_DIM: tl.constexpr = SIZES[2]
    NOPE: tl.constexpr = SIZES[3]
    ROPE: tl.constexpr = SIZES[4]
    VALUE: tl.constexpr = SIZES[5]
    KEYS: tl.constexpr = SIZES[6]
    SOFTMAX_SCALE: tl.constexpr = SIZES[7]
    STAGES: tl.constexpr = SIZES[8]
    CAUSAL: tl.constexpr = SIZES[9]
    SCALE: tl.constexpr = SOFTMAX_SCALE * _LOG2_E
    acc, row_max, row_sum = state
    q_nope, q_pe = queries
    (
        nope_rows, nope_stride, nope_dim_stride,
        rope_rows, rope_stride, rope_dim_stride,
        value_rows, value_stride, value_dim_stride,
    ) = keys  # fmt: skip
    start, stop = span
    for key_start in tl.range(start, stop, KEYS, num_stages=STAGES):
        key = key_start + tl.arange(0, KEYS)
        kv_valid = key < stop
        row = key.to(tl.int64)
        address = nope_rows + row * nope_stride
        k_nope = _load_rows(address, kv_valid, nope_dim_stride, NOPE_DIM, NOPE)
        address = rope_rows + row * rope_stride
        k_pe = _load_rows(address, kv_valid, rope_dim_stride, ROPE_DIM, ROPE)
        logits = tl.zeros((q_nope.shape[0], KEYS), dtype=tl.float32)
        logits = multiply_add(q_nope, tl.trans(k_nope), logits)
        logits = multiply_add(q_pe, tl.trans(k_pe), logits) * SCALE
        if MASKED:
            mask = kv_valid[None, :] & (key[None, :] < key_limit[:, None])
            logits = tl.where(mask, logits, float("-inf"))
        p, alpha, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        address = value_rows + row * value_stride
        values = _load_rows(address, kv_valid, value_dim_stride, VALUE_DIM, VALUE)
        if MASKED and CAUSAL:
            # P of a masked key is 0, and 0 times NaN or infinity would be NaN
            is_finite = tl.abs(values.to(tl.float32)) < float("inf")
            has_nonfinite = tl.max(tl.where(is_finite, 0, 1), axis=1)
            values = tl.where(is_finite, values, 0.0)
            p = tl.where(mask & (has_nonfinite > 0)[None, :], float("nan"), p)
        acc = multiply_add(round_to(p, values.dtype), values, acc * alpha[:, None])
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=SIZES)
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
    """Compute a tile of queries of one head.

    Span 0 is the tokens before the first request, span n the tokens of request n - 1, and span
    num_reqs + 1 the tokens after the last request. The tiles of span n start at tile
    first // QUERIES + n, where ``first`` is the span's first token, so each span has enough tiles.
    An entry of ``query_start_loc`` that is below an earlier entry counts as equal to that entry, so
    that every row is written whatever the entries are. Tiles of late queries run first, because
    they see the most keys.
    """
    wait_for_previous_kernel()
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    span, first = tl.program_id(0) * 0, tl.program_id(0) * 0
    end, last_start, step = span + (2**31 - 1), span, span
    while step <= num_reqs:
        index = step + tl.arange(0, _STARTS)
        mask = index <= num_reqs
        start = tl.load(query_start_loc + index.to(tl.int64) * loc_stride, mask=mask, other=0)
        start = tl.maximum(tl.associative_scan(start, 0, _larger), last_start)
        in_batch = tl.minimum(start, num_tokens)
        is_before = mask & (in_batch // QUERIES + index + 1 <= tile)
        span += tl.sum(is_before.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(is_before, in_batch, 0)))
        end = tl.minimum(end, tl.min(tl.where(mask & (is_before == 0), start, 2**31 - 1)))
        last_start = tl.max(start)
        step += _STARTS
    is_request = (span > 0) & (span <= num_reqs)
    stop = tl.minimum(end, num_tokens)
    query = first + (tile - first // QUERIES - span) * QUERIES + tl.arange(0, QUERIES)
    query_valid = query < stop
    bounds = cu_seq_lens + (span - 1).to(tl.int64) * cu_stride
    key_start = tl.load(bounds, mask=is_request, other=0)
    key_stop = tl.load(bounds + cu_stride, mask=is_request, other=0)
    key_start = tl.minimum(tl.maximum(key_start, 0), num_k)
    key_stop = tl.minimum(tl.maximum(key_stop, 0), num_k)
    # one past the last key that all queries of the tile see, and that any of them sees
    common_stop = key_stop
    max_stop = key_stop
    key_limit = tl.zeros((QUERIES,), dtype=tl.int32) + key_stop
    if CAUSAL:
        later_queries = end.to(tl.int64) - 1 - query
        key_limit = tl.maximum(key_stop - later_queries, key_start).to(tl.int32)
        max_stop = tl.max(tl.where(query_valid, key_limit, key_start))
        common_stop = tl.minimum(tl.min(key_limit), key_stop)
    max_stop = tl.where(tl.min(query) < stop, max_stop, key_start)
    unmasked = tl.maximum(common_stop - key_start, 0) // KEYS * KEYS
    unmasked = tl.where(max_stop > key_start, unmasked, 0)

    heads = q + query.to(tl.int64) * q_stride + head * q_head_stride
    q_nope = _load_rows(heads, query_valid, q_dim_stride, NOPE_DIM, NOPE)
    q_pe = _load_rows(heads + NOPE_DIM * q_dim_stride, query_valid, q_dim_stride, ROPE_DIM, ROPE)
    keys = (
        k_nope + head * nope_head_stride, nope_stride, nope_dim_stride,
        k_pe, rope_stride, rope_dim_stride,
        v + head * value_head_stride, value_stride, value_dim_stride,
    )  # fmt: skip
    SIZES: tl.constexpr = (
        NOPE_DIM, ROPE_DIM, VALUE_DIM, NOPE, ROPE, VALUE, KEYS, SOFTMAX_SCALE, STAGES, CAUSAL
    )  # fmt: skip
    state = (
        tl.zeros((QUERIES, VALUE), dtype=tl.float32),
        tl.full((QUERIES,), float("-inf"), dtype=tl.float32),
        tl.zeros((QUERIES,), dtype=tl.float32),
    )
    queries = (q_nope, q_pe)
    middle = key_start + unmasked
    state = _attend(state, queries, keys, (key_start, middle), key_limit, SIZES, False)
    state = _attend(state, queries, keys, (middle, max_stop), key_limit, SIZES, True)
    acc, row_max, row_sum = state
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    row = query.to(tl.int64) * tl.num_programs(1) + head
    dim = tl.arange(0, VALUE)[None, :]
    dst = out + row[:, None] * VALUE_DIM + dim
    acc = round_to(acc, q_nope.dtype)
    tl.store(dst, acc, mask=query_valid[:, None] & (dim < VALUE_DIM))
    tl.store(lse + row, log2_sum(row_max, row_sum) * _LN_2, mask=query_valid)

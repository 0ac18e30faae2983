"""Batch description: split, token map, flattening, block-table expansion, MTP lengths."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from tests.helpers import (
    INT32_MAX,
    INT32_MIN,
    NIGHTLY,
    Result,
    assert_exact,
    call,
    check_stream,
    i32,
    i64,
    maybe_strided,
    random_batch,
    rows32,
    strided,
    widened,
)
from tests.oracles import batch as oracles

SEEDS = range(300)

# query_start_loc, decode_threshold, require_uniform -> result
SPLIT = {
    "ragged decodes, then a prefill": ([0, 2, 4, 5, 12], 2, False, [3, 1, 5, 7]),
    "uniform stops at another length": ([0, 2, 4, 5, 12], 2, True, [2, 2, 4, 8]),
    "uniform ignores empty tail": ([0, 2, 4, 4, 4], 2, True, [4, 0, 4, 0]),
    "uniform ignores empty head": ([0, 0, 2, 4], 2, True, [3, 0, 4, 0]),
    "uniform ignores an empty middle": ([0, 2, 2, 4, 7], 2, True, [3, 1, 4, 3]),
    "all prefill": ([0, 5, 6], 2, False, [0, 2, 0, 6]),
    "uniform but too long": ([0, 3, 6], 2, True, [0, 2, 0, 6]),
    "uniform, too long after an empty one": ([0, 0, 3, 6], 2, True, [1, 2, 0, 6]),
    "uniform, longer but within the threshold": ([0, 1, 2, 4], 2, True, [2, 1, 2, 2]),
    "not uniform, within the threshold": ([0, 1, 2, 4], 2, False, [3, 0, 4, 0]),
    "uniform, shorter": ([0, 2, 3, 5], 2, True, [1, 2, 2, 3]),
    "decode behind a prefill counts as prefill": ([0, 1, 6, 7], 1, False, [1, 2, 1, 6]),
    "at the threshold": ([0, 4], 4, False, [1, 0, 4, 0]),
    "above the threshold": ([0, 5], 4, False, [0, 1, 0, 5]),
    "nothing but padding": ([0, 0, 0, 0], 1, False, [3, 0, 0, 0]),
    "nothing but padding, uniform": ([0, 0, 0, 0], 1, True, [3, 0, 0, 0]),
    "no request": ([0], 1, False, [0, 0, 0, 0]),
    "no request, uniform": ([0], 1, True, [0, 0, 0, 0]),
    "a decreasing start counts as empty": ([0, 2, 1, 2], 2, False, [3, 0, 2, 0]),
}

# query_start_loc, seq_lens, num_tokens -> req_indices, positions
TOKEN_MAP = {
    "worked example": (
        [0, 3, 4, 8, 8],
        [10, 7, 12, 0],
        10,
        [0, 0, 0, 1, 2, 2, 2, 2, -1, -1],
        [7, 8, 9, 6, 8, 9, 10, 11, -1, -1],
    ),
    "exact": (
        [0, 3, 4, 8, 8],
        [10, 7, 12, 0],
        8,
        [0, 0, 0, 1, 2, 2, 2, 2],
        [7, 8, 9, 6, 8, 9, 10, 11],
    ),
    "empty requests": ([0, 0, 2, 2, 2, 3], [5, 2, 0, 9, 4], 3, [1, 1, 4], [0, 1, 3]),
    "more queries than tokens": ([0, 2, 6], [2, 9], 4, [0, 0, 1, 1], [0, 1, 5, 6]),
    "request cut off": ([0, 2, 6], [2, 9], 1, [0], [0]),
    "starts late": ([2, 4], [7], 5, [-1, -1, 0, 0, -1], [-1, -1, 5, 6, -1]),
    "seq_len below query": ([0, 3, 5], [2, 0], 5, [-1, 0, 0, -1, -1], [-1, 0, 1, -1, -1]),
    "negative seq_len": ([0, 2, 3], [-3, 1], 3, [-1, -1, 1], [-1, -1, 0]),
    "least seq_len": ([0, 2], [INT32_MIN], 2, [-1, -1], [-1, -1]),
    "greatest seq_len": ([0, 2], [INT32_MAX], 2, [0, 0], [2147483645, 2147483646]),
    "greatest query": ([0, INT32_MAX], [INT32_MAX], 3, [0, 0, 0], [0, 1, 2]),
    "one token": ([0, 1], [1], 1, [0], [0]),
    "only padding": ([0, 0, 0], [0, 0], 2, [-1, -1], [-1, -1]),
    "no token": ([0, 2], [4], 0, [], []),
    "no request": ([0], [], 2, [-1, -1], [-1, -1]),
}

# query_start_loc, seq_lens, num_tokens, compress_ratio -> seq_lens, req_indices
FLATTEN = {
    "worked example": (
        [0, 3, 4, 8, 8],
        [10, 7, 12, 0],
        10,
        1,
        [8, 9, 10, 7, 9, 10, 11, 12, 0, 0],
        [0, 0, 0, 1, 2, 2, 2, 2, -1, -1],
    ),
    "worked example, ratio 4": (
        [0, 3, 4, 8, 8],
        [10, 7, 12, 0],
        10,
        4,
        [2, 2, 2, 1, 2, 2, 2, 3, 0, 0],
        [0, 0, 0, 1, 2, 2, 2, 2, -1, -1],
    ),
    "around one row": ([0, 5], [5], 5, 4, [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]),
    "around 128": ([0, 2, 3], [128, 127], 3, 128, [0, 1, 0], [0, 0, 1]),
    "seq_len below query": ([0, 2, 4], [1, 0], 4, 1, [0, 1, 0, 0], [-1, 0, -1, -1]),
    "greatest seq_len": ([0, 1], [INT32_MAX], 1, 1, [INT32_MAX], [0]),
    "least seq_len": ([0, 1], [INT32_MIN], 1, 4, [0], [-1]),
    "no token": ([0, 2], [4], 0, 4, [], []),
    "no request": ([0], [], 2, 4, [0, 0], [-1, -1]),
}

# query_start_loc, seq_lens, next_n, compress_ratio -> rows
MTP = {
    "uniform": ([0, 2, 4, 6], [10, 7, 0], 2, 1, [[9, 10], [6, 7], [0, 0]]),
    "uniform, ratio 4": ([0, 2, 4, 6], [10, 7, 0], 2, 4, [[2, 2], [1, 1], [0, 0]]),
    "ragged": (
        [0, 3, 4, 8, 8],
        [10, 7, 12, 0],
        4,
        1,
        [[8, 9, 10, 0], [7, 0, 0, 0], [9, 10, 11, 12], [0, 0, 0, 0]],
    ),
    "ragged, ratio 4": (
        [0, 3, 4, 8, 8],
        [10, 7, 12, 0],
        4,
        4,
        [[2, 2, 2, 0], [1, 0, 0, 0], [2, 2, 2, 3], [0, 0, 0, 0]],
    ),
    "longer than next_n": ([0, 3, 4, 8], [10, 7, 12], 2, 1, [[8, 9], [7, 0], [9, 10]]),
    "seq_len below query": ([0, 3], [2], 3, 1, [[0, 1, 2]]),
    "empty request with context": ([0, 0, 1], [9, 3], 2, 1, [[0, 0], [3, 0]]),
    "least seq_len": ([0, 1], [INT32_MIN], 2, 1, [[0, 0]]),
    "greatest seq_len": ([0, 2], [INT32_MAX], 3, 1, [[2147483646, 2147483647, 0]]),
    "decreasing start": ([0, 2, 1, 2], [4, 4, 4], 2, 1, [[3, 4], [0, 0], [4, 0]]),
    "no request": ([0], [], 2, 1, []),
}

# query_start_loc that decreases somewhere: which request a token gets is open, but not the range
UNORDERED = {
    "falling": [5, 3, 1],
    "falling to zero": [9, 6, 3, 0],
    "one step back": [0, 4, 2, 6],
    "zigzag": [0, 9, 1, 8, 2, 7, 3],
    "end before start": [6, 6, 6, 0],
    "back to zero": [0, 3, 0],
    "below zero": [3, -2, 8, -9],
    "starts below zero": [-5, -7, 4],
    "only negative": [-3, -1, -2],
    "greatest first": [INT32_MAX, INT32_MIN, 0],
    "extremes in turn": [INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN],
    "one request that ends before it starts": [4, 0],
    "one request at the extremes": [INT32_MAX, INT32_MIN],
}

TABLE = [[1, -1], [INT32_MAX, -7], [0, 5]]
EXPAND_REQS = [1, 0, 2, 1, -1, 3, -5, 10**9, INT32_MAX, INT32_MIN]
EXPANDED = [TABLE[1], TABLE[0], TABLE[2], TABLE[1], *([[0, 0]] * 6)]


@pytest.mark.parametrize("case", SPLIT.values(), ids=SPLIT)
def test_split(case: tuple[Any, ...]) -> None:
    query_start_loc, threshold, uniform, expected = case
    settings = {"decode_threshold": threshold, "require_uniform": uniform}
    assert oracles.split_decodes_and_prefills(query_start_loc, **settings) == expected
    result = call(ops.split_decodes_and_prefills, i32(query_start_loc), **settings)
    assert_exact(result, i32(expected))


def test_split_is_not_uniform_by_default() -> None:
    result = ops.split_decodes_and_prefills(i32([0, 1, 3]), decode_threshold=2)
    assert result.tolist() == [2, 0, 3, 0]


@pytest.mark.parametrize("case", TOKEN_MAP.values(), ids=TOKEN_MAP)
def test_token_map(case: tuple[Any, ...]) -> None:
    query_start_loc, seq_lens, num_tokens, requests, positions = case
    oracle = oracles.token_map(query_start_loc, seq_lens, num_tokens=num_tokens)
    assert oracle == (requests, positions)
    result = call(ops.token_map, i32(query_start_loc), i32(seq_lens), num_tokens=num_tokens)
    assert_exact(result.req_indices, i32(requests))
    assert_exact(result.positions, i64(positions))


@pytest.mark.parametrize("case", FLATTEN.values(), ids=FLATTEN)
def test_flatten_decode(case: tuple[Any, ...]) -> None:
    query_start_loc, seq_lens, num_tokens, ratio, lens, requests = case
    settings = {"num_tokens": num_tokens, "compress_ratio": ratio}
    assert oracles.flatten_decode(query_start_loc, seq_lens, **settings) == (lens, requests)
    result = call(ops.flatten_decode, i32(query_start_loc), i32(seq_lens), **settings)
    assert_exact(result.seq_lens, i32(lens))
    assert_exact(result.req_indices, i32(requests))


def check_unordered(
    map_tokens: Callable[..., Any], flatten: Callable[..., Any], starts: Tensor, seq_lens: Tensor
) -> None:
    num_reqs, num_tokens = seq_lens.shape[0], 12
    mapped = call(map_tokens, starts, seq_lens, num_tokens=num_tokens)
    flat = call(flatten, starts, seq_lens, num_tokens=num_tokens, compress_ratio=4)
    for requests in (mapped.req_indices, flat.req_indices):
        assert (requests.dtype, requests.shape) == (torch.int32, (num_tokens,))
        assert all(-1 <= request < num_reqs for request in requests.tolist()), requests
    assert (mapped.positions.dtype, mapped.positions.shape) == (torch.int64, (num_tokens,))
    assert all(position >= -1 for position in mapped.positions.tolist()), mapped
    assert torch.equal(mapped.req_indices == -1, mapped.positions == -1), mapped
    assert (flat.seq_lens.dtype, flat.seq_lens.shape) == (torch.int32, (num_tokens,))
    assert all(0 <= length <= 2**29 - 1 for length in flat.seq_lens.tolist()), flat
    assert flat.seq_lens[flat.req_indices == -1].tolist() == [0] * flat.req_indices.eq(-1).sum()


def unordered_batches() -> Iterator[tuple[Tensor, Tensor]]:
    lengths = (INT32_MIN, -1, 0, 1, 7, 10**6, INT32_MAX)
    for starts in UNORDERED.values():
        for length in lengths:
            yield i32(starts), i32([length] * (len(starts) - 1))
    for seed in SEEDS:
        rng = Random(seed)
        entries = (INT32_MIN, INT32_MAX, 12, 13, *range(-3, 12))
        starts = [rng.choice(entries) for _ in range(rng.randrange(2, 20))]
        seq_lens = i32([rng.choice(lengths) for _ in starts[1:]])
        yield maybe_strided(rng, i32(starts)), maybe_strided(rng, seq_lens)


def test_unordered_starts_stay_in_range() -> None:
    for starts, seq_lens in unordered_batches():
        check_unordered(ops.token_map, ops.flatten_decode, starts, seq_lens)


@pytest.mark.slow
def test_unordered_starts_stay_in_range_when_compiled() -> None:
    """Compiled code reads without bounds checks, so here a wrong index would be a wild read."""
    map_tokens = torch.compile(ops.token_map, fullgraph=True, dynamic=True)
    flatten = torch.compile(ops.flatten_decode, fullgraph=True, dynamic=True)
    for starts, seq_lens in unordered_batches():
        if NIGHTLY or len(seq_lens) > 1:  # a batch of one request is a graph of its own
            check_unordered(map_tokens, flatten, starts.contiguous(), seq_lens.contiguous())


@pytest.mark.parametrize("case", MTP.values(), ids=MTP)
def test_mtp_seq_lens(case: tuple[Any, ...]) -> None:
    query_start_loc, seq_lens, next_n, ratio, expected = case
    settings = {"next_n": next_n, "compress_ratio": ratio}
    assert oracles.mtp_seq_lens(query_start_loc, seq_lens, **settings) == expected
    result = call(ops.mtp_seq_lens, i32(query_start_loc), i32(seq_lens), **settings)
    assert_exact(result, rows32(expected, next_n))


@pytest.mark.parametrize("layout", [torch.clone, strided, widened], ids=lambda f: f.__name__)
def test_expand_block_table(layout: Any) -> None:
    assert oracles.expand_block_table(TABLE, EXPAND_REQS, columns=2) == EXPANDED
    result = call(ops.expand_block_table, layout(i32(TABLE)), i32(EXPAND_REQS))
    assert_exact(result, i32(EXPANDED))


def test_expand_block_table_without_tokens_requests_or_columns() -> None:
    assert_exact(ops.expand_block_table(i32(TABLE), i32([])), rows32([], 2))
    assert_exact(ops.expand_block_table(rows32([], 2), i32([0, -1])), i32([[0, 0], [0, 0]]))
    assert_exact(ops.expand_block_table(rows32([[], []], 0), i32([0, 1, 5])), rows32([[]] * 3, 0))


def test_compress_ratio_is_one_by_default() -> None:
    starts, seq_lens = i32([0, 2]), i32([9])
    assert ops.flatten_decode(starts, seq_lens, num_tokens=2).seq_lens.tolist() == [8, 9]
    assert ops.mtp_seq_lens(starts, seq_lens, next_n=2).tolist() == [[8, 9]]


@pytest.mark.filterwarnings("error")
def test_inputs_may_have_any_stride() -> None:
    starts, seq_lens = strided(i32([0, 3, 4, 8, 8])), strided(i32([10, 7, 12, 0]))
    assert not starts.is_contiguous()
    mapped = call(ops.token_map, starts, seq_lens, num_tokens=9)
    assert mapped.req_indices.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, -1]
    assert mapped.positions.tolist() == [7, 8, 9, 6, 8, 9, 10, 11, -1]
    flat = call(ops.flatten_decode, starts, seq_lens, num_tokens=9, compress_ratio=4)
    assert flat.seq_lens.tolist() == [2, 2, 2, 1, 2, 2, 2, 3, 0]
    rows = call(ops.mtp_seq_lens, starts, seq_lens, next_n=2)
    assert rows.tolist() == [[8, 9], [7, 0], [9, 10], [0, 0]]
    split = call(ops.split_decodes_and_prefills, starts, decode_threshold=3)
    assert split.tolist() == [2, 2, 4, 4]


def split_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {
            "decode_threshold": layout.choice((1, 2, 3, 5)),
            "require_uniform": layout.random() < 0.5,
        }
        expected = oracles.split_decodes_and_prefills(batch.query_start_loc, **settings)
        yield call(ops.split_decodes_and_prefills, batch.qsl(layout), **settings), i32(expected)


def token_map_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {"num_tokens": batch.num_tokens}
        requests, positions = oracles.token_map(batch.query_start_loc, batch.seq_lens, **settings)
        result = call(ops.token_map, batch.qsl(layout), batch.seq(layout), **settings)
        yield result, (i32(requests), i64(positions))


def flatten_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {"num_tokens": batch.num_tokens, "compress_ratio": batch.compress_ratio}
        lens, requests = oracles.flatten_decode(batch.query_start_loc, batch.seq_lens, **settings)
        result = call(ops.flatten_decode, batch.qsl(layout), batch.seq(layout), **settings)
        yield result, (i32(lens), i32(requests))


def mtp_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {
            "next_n": layout.choice((1, 2, 4, 7)),
            "compress_ratio": batch.compress_ratio,
        }
        expected = oracles.mtp_seq_lens(batch.query_start_loc, batch.seq_lens, **settings)
        result = call(ops.mtp_seq_lens, batch.qsl(layout), batch.seq(layout), **settings)
        yield result, rows32(expected, settings["next_n"])


def expand_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        expected = oracles.expand_block_table(
            batch.block_table, batch.req_indices, columns=batch.columns
        )
        result = call(ops.expand_block_table, batch.table(layout), batch.req(layout))
        yield result, rows32(expected, batch.columns)


@pytest.mark.parametrize(
    "pairs", [split_pairs, token_map_pairs, flatten_pairs, mtp_pairs, expand_pairs]
)
def test_random_batches(pairs: Any) -> None:
    check_stream(pairs())

"""Row ranges of prefill queries in the gathered keys: whole batch and one chunk."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import dsv4_ops as ops
from tests.helpers import (
    HUGE_POSITION,
    INT32_MAX,
    INT32_MIN,
    LAST_POSITION,
    LATE_POSITIONS,
    Result,
    assert_exact,
    call,
    check_stream,
    i32,
    i64,
    maybe_strided,
    random_batch,
    strided,
)
from tests.oracles import batch as oracles

SEEDS = range(400)

# positions, req_indices, seq_lens, compress_ratio -> cu_seq_lens, row_start, row_stop
CASES: dict[str, tuple[Any, ...]] = {
    "worked example": (
        [6, 7, 8, 8, 9, 10, 11, 12],
        [0, 0, 0, 1, 1, 1, 1, 1],
        [9, 13],
        4,
        [0, 2, 5],
        [0, 0, 0, 2, 2, 2, 2, 2],
        [1, 2, 2, 4, 4, 4, 5, 5],
    ),
    "ratio 1": ([0, 1, 2, 0], [0, 0, 0, 1], [3, 1], 1, [0, 3, 4], [0, 0, 0, 3], [1, 2, 3, 4]),
    "around 128": (
        [126, 127, 128, 255],
        [0, 1, 1, 1],
        [127, 256],
        128,
        [0, 0, 2],
        [0, 0, 0, 0],
        [0, 1, 1, 2],
    ),
    "shorter than a row": ([0, 2, 3], [0, 0, 1], [3, 4], 4, [0, 0, 1], [0, 0, 0], [0, 0, 1]),
    "empty and padding requests": (
        [3, 7, -1],
        [1, 3, -1],
        [0, 4, 0, 8, 0],
        4,
        [0, 0, 1, 1, 3, 3],
        [0, 1, 0],
        [1, 3, 0],
    ),
    "position past the sequence": (
        [8, 99, LAST_POSITION, 99, LAST_POSITION],
        [0, 0, 0, 1, 1],
        [9, 4],
        4,
        [0, 2, 3],
        [0, 0, 0, 2, 2],
        [2, 2, 2, 3, 3],
    ),
    "position past every sequence": (
        [*LATE_POSITIONS, *LATE_POSITIONS, 3],
        [0] * 5 + [1] * 6,
        [9, 4],
        4,
        [0, 2, 3],
        [0] * 10 + [2],
        [0] * 10 + [3],
    ),
    "greatest length": (
        [LAST_POSITION - 1, LAST_POSITION, *LATE_POSITIONS],
        [0] * 7,
        [INT32_MAX],
        1,
        [0, INT32_MAX],
        [0] * 7,
        [2_147_483_646, 2_147_483_647, *([0] * 5)],
    ),
    "no such token": (
        [7] * 7 + [-1, -5, -HUGE_POSITION],
        [1, -1, 2, -5, 10**9, INT32_MAX, INT32_MIN, 1, 1, 1],
        [8, 8],
        4,
        [0, 2, 4],
        [2] + [0] * 9,
        [4] + [0] * 9,
    ),
    "negative lengths are empty": (
        [7, 3, 3],
        [2, 0, 1],
        [-1, INT32_MIN, 8],
        4,
        [0, 0, 0, 2],
        [0, 0, 0],
        [2, 0, 0],
    ),
    "the sum saturates": (
        [5, 5, 5],
        [0, 1, 2],
        [INT32_MAX, INT32_MAX, 1],
        1,
        [0, INT32_MAX, INT32_MAX, INT32_MAX],
        [0, INT32_MAX, INT32_MAX],
        [6, INT32_MAX, INT32_MAX],
    ),
    "the sum just fits": (
        [0, 9],
        [1, 1],
        [INT32_MAX - 2, 2],
        1,
        [0, INT32_MAX - 2, INT32_MAX],
        [INT32_MAX - 2] * 2,
        [INT32_MAX - 1, INT32_MAX],
    ),
    "no token": ([], [], [9, 13], 4, [0, 2, 5], [], []),
    "no request": ([3, 7], [0, -1], [], 4, [0], [0, 0], [0, 0]),
}

# Two decodes of four tokens, the two prefills of the worked example, two padding tokens.
STARTS = [0, 4, 8, 11, 16]
SEQ_LENS = [20, 30, 9, 13]
REQUESTS = [0] * 4 + [1] * 4 + [2] * 3 + [3] * 5 + [-1] * 2
POSITIONS = [*range(16, 20), *range(26, 30), *range(6, 9), *range(8, 13), -1, -1]
NONE = [0] * 18
BOTH_START = [*([0] * 8), 0, 0, 0, 2, 2, 2, 2, 2, 0, 0]
BOTH_STOP = [*([0] * 8), 1, 2, 2, 4, 4, 4, 5, 5, 0, 0]
# all four: 5, 7, 2 and 3 rows
ALL_START = [*([0] * 4), *([5] * 4), 12, 12, 12, 14, 14, 14, 14, 14, 0, 0]
ALL_STOP = [4, 4, 4, 5, 11, 12, 12, 12, 13, 14, 14, 16, 16, 16, 17, 17, 0, 0]

# chunk -> cu_seq_lens, row_start, row_stop
CHUNKS: dict[str, tuple[list[int], list[int], list[int], list[int]]] = {
    "both prefills": ([2, 4, 0, 8], [0, 0, 0, 2, 5], BOTH_START, BOTH_STOP),
    "worked example, queries 2 to 5": (
        [2, 4, 2, 5],
        [0, 0, 0, 2, 5],
        [*([0] * 10), 0, 2, 2, *([0] * 5)],
        [*([0] * 10), 2, 4, 4, *([0] * 5)],
    ),
    "last prefill": (
        [3, 4, 0, 5],
        [0, 0, 0, 0, 3],
        NONE,
        [*([0] * 11), 2, 2, 2, 3, 3, 0, 0],
    ),
    "last prefill, part": (
        [3, 4, 2, 4],
        [0, 0, 0, 0, 3],
        NONE,
        [*([0] * 13), 2, 3, 0, 0, 0],
    ),
    "a decode": ([1, 2, 0, 4], [0, 0, 7, 7, 7], NONE, [*([0] * 4), 6, 7, 7, 7, *([0] * 10)]),
    "everything": ([0, 4, 0, 16], [0, 5, 12, 14, 17], ALL_START, ALL_STOP),
    "empty": ([0, 0, 0, 0], [0] * 5, NONE, NONE),
    "no query": ([2, 4, 0, 0], [0, 0, 0, 2, 5], NONE, NONE),
    "queries inverted": ([2, 4, 5, 2], [0, 0, 0, 2, 5], NONE, NONE),
    "requests inverted": ([3, 2, 0, 8], [0] * 5, NONE, NONE),
    "stops too large": ([2, 99, 0, 99], [0, 0, 0, 2, 5], BOTH_START, BOTH_STOP),
    "query_start negative": (
        [2, 4, -7, 3],
        [0, 0, 0, 2, 5],
        NONE,
        [*([0] * 8), 1, 2, 2, *([0] * 7)],
    ),
    "req_start negative": (
        [-3, 1, 0, 99],
        [0, 5, 5, 5, 5],
        NONE,
        [4, 4, 4, 5, *([0] * 14)],
    ),
    "req_start too large": ([99, 100, 0, 5], [0] * 5, NONE, NONE),
    "widest": (
        [INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX],
        [0, 5, 12, 14, 17],
        ALL_START,
        ALL_STOP,
    ),
    "widest from the prefills on": (
        [2, INT32_MAX, INT32_MIN, INT32_MAX],
        [0, 0, 0, 2, 5],
        BOTH_START,
        BOTH_STOP,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prefill_row_bounds(case: tuple[Any, ...]) -> None:
    positions, requests, seq_lens, ratio, *expected = case
    oracle = oracles.prefill_row_bounds(positions, requests, seq_lens, compress_ratio=ratio)
    assert oracle == tuple(expected)
    result = call(
        ops.prefill_row_bounds, i64(positions), i32(requests), i32(seq_lens), compress_ratio=ratio
    )
    assert_exact(result.cu_seq_lens, i32(expected[0]))
    assert_exact(result.row_start, i32(expected[1]))
    assert_exact(result.row_stop, i32(expected[2]))


@pytest.mark.parametrize("case", CHUNKS.values(), ids=CHUNKS)
def test_prefill_chunk_row_bounds(case: tuple[list[int], ...]) -> None:
    chunk, *expected = case
    oracle = oracles.prefill_chunk_row_bounds(
        POSITIONS, REQUESTS, SEQ_LENS, STARTS, chunk, compress_ratio=4
    )
    assert oracle == tuple(expected)
    result = call(
        ops.prefill_chunk_row_bounds,
        i64(POSITIONS),
        i32(REQUESTS),
        i32(SEQ_LENS),
        i32(STARTS),
        i32(chunk),
        compress_ratio=4,
    )
    assert_exact(result.cu_seq_lens, i32(expected[0]))
    assert_exact(result.row_start, i32(expected[1]))
    assert_exact(result.row_stop, i32(expected[2]))


@pytest.mark.parametrize("seq_lens", [[-1, 8], [INT32_MIN, 9]])
def test_chunk_treats_negative_lengths_as_empty(seq_lens: list[int]) -> None:
    result = ops.prefill_chunk_row_bounds(
        i64([7, 7]), i32([0, 1]), i32(seq_lens), i32([0, 1, 2]), i32([0, 2, 0, 2]), compress_ratio=4
    )
    assert_exact(result, (i32([0, 0, 2]), i32([0, 0]), i32([0, 2])))


def test_chunk_ignores_tokens_that_do_not_exist() -> None:
    requests = i32([0, -1, 1, -5, 10**9, *([0] * 7)])
    positions = i64([7, 7, 7, 7, 7, -1, LAST_POSITION, *LATE_POSITIONS])
    result = ops.prefill_chunk_row_bounds(
        positions, requests, i32([8]), i32([0, 12]), i32([0, 1, 0, 12]), compress_ratio=4
    )
    expected = [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert_exact(result, (i32([0, 2]), i32([0] * 12), i32(expected)))


def test_chunk_without_tokens_or_requests() -> None:
    chunk = i32([0, 1, 0, 4])
    empty = ops.prefill_chunk_row_bounds(
        i64([]), i32([]), i32([9, 13]), i32([0, 3, 8]), chunk, compress_ratio=4
    )
    assert_exact(empty, (i32([0, 2, 2]), i32([]), i32([])))
    nobody = ops.prefill_chunk_row_bounds(
        i64([3, 7]), i32([0, -1]), i32([]), i32([0]), chunk, compress_ratio=4
    )
    assert_exact(nobody, (i32([0]), i32([0, 0]), i32([0, 0])))


def test_inputs_may_have_any_stride() -> None:
    positions, requests = strided(i64(POSITIONS)), strided(i32(REQUESTS))
    seq_lens = strided(i32(SEQ_LENS))
    whole = call(ops.prefill_row_bounds, positions, requests, seq_lens, compress_ratio=4)
    assert_exact(whole, (i32([0, 5, 12, 14, 17]), i32(ALL_START), i32(ALL_STOP)))
    # a row of a chunk table laid out column by column
    chunks = i32([[0, 0, 0, 0], [2, 4, 0, 8]]).t().contiguous().t()
    part = call(
        ops.prefill_chunk_row_bounds,
        positions,
        requests,
        seq_lens,
        strided(i32(STARTS)),
        chunks[1],
        compress_ratio=4,
    )
    assert_exact(part, (i32([0, 0, 0, 2, 5]), i32(BOTH_START), i32(BOTH_STOP)))


def whole_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        ratio = batch.compress_ratio
        expected = oracles.prefill_row_bounds(
            batch.positions, batch.req_indices, batch.seq_lens, compress_ratio=ratio
        )
        result = call(
            ops.prefill_row_bounds,
            batch.pos(layout),
            batch.req(layout),
            batch.seq(layout),
            compress_ratio=ratio,
        )
        yield result, tuple(map(i32, expected))


def random_chunk(rng: Random, num_reqs: int) -> list[int]:
    start, stop = (rng.randrange(num_reqs + 1) for _ in range(2))
    chunk = [min(start, stop), max(start, stop), rng.choice((0, 0, 1, 3)), rng.choice((1, 4, 50))]
    if rng.random() < 0.3:
        chunk[rng.randrange(4)] = rng.choice((-1, -4, 0, 99, INT32_MIN, INT32_MAX))
    return chunk


def chunk_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        chunk, ratio = random_chunk(layout, batch.num_reqs), batch.compress_ratio
        expected = oracles.prefill_chunk_row_bounds(
            batch.positions,
            batch.req_indices,
            batch.seq_lens,
            batch.query_start_loc,
            chunk,
            compress_ratio=ratio,
        )
        result = call(
            ops.prefill_chunk_row_bounds,
            batch.pos(layout),
            batch.req(layout),
            batch.seq(layout),
            batch.qsl(layout),
            maybe_strided(layout, i32(chunk)),
            compress_ratio=ratio,
        )
        yield result, tuple(map(i32, expected))


@pytest.mark.parametrize("pairs", [whole_pairs, chunk_pairs])
def test_random_batches(pairs: Any) -> None:
    check_stream(pairs())

"""Sliding-window slots and the rows a prefill has to gather."""

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
    random_batch,
    rows32,
    strided,
    widened,
)
from tests.oracles import batch as oracles

SEEDS = range(300)
EMPTY = [-1, -1, -1, -1]

# positions, req_indices, block_table, block_size, window_size -> indices, lengths
CASES: dict[str, tuple[Any, ...]] = {
    "worked example": (
        [5, 1, 2],
        [0, 1, 1],
        [[7, 3], [2, 5]],
        4,
        4,
        [[30, 31, 12, 13], [8, 9, -1, -1], [8, 9, 10, -1]],
        [4, 2, 3],
    ),
    "around window and page": (
        [0, 2, 3, 4, 7],
        [0] * 5,
        [[7, 3]],
        4,
        4,
        [
            [28, -1, -1, -1],
            [28, 29, 30, -1],
            [28, 29, 30, 31],
            [29, 30, 31, 12],
            [12, 13, 14, 15],
        ],
        [1, 3, 4, 4, 4],
    ),
    "past the end of the table": (
        [8, 10, 11, 12],
        [0, 0, 0, 1],
        [[7, 3], [2, 5]],
        4,
        4,
        [[13, 14, 15, -1], [15, -1, -1, -1], EMPTY, EMPTY],
        [4, 4, 4, 4],
    ),
    "window of one": ([0, 6, 9], [0] * 3, [[7, 3]], 4, 1, [[28], [14], [-1]], [1, 1, 1]),
    "window longer than the sequence": (
        [2],
        [0],
        [[7, 3]],
        2,
        6,
        [[14, 15, 6, -1, -1, -1]],
        [3],
    ),
    "pages of one row": ([4], [0], [[9, 8, 7, 6, 5]], 1, 3, [[7, 6, 5]], [3]),
    "page size that is no power of two": ([4], [0], [[4, 1]], 3, 4, [[13, 14, 3, 4]], [4]),
    "a hole in the middle": ([4], [0], [[7, -1, 3]], 2, 5, [[14, 15, -1, -1, 6]], [5]),
    "no such request": (
        [3] * 7,
        [0, -1, 1, -5, 10**9, INT32_MAX, INT32_MIN],
        [[7, 3]],
        4,
        4,
        [[28, 29, 30, 31], EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY],
        [4, 0, 0, 0, 0, 0, 0],
    ),
    "no such position": (
        [-1, -4, -HUGE_POSITION, 2**33 + 3, *LATE_POSITIONS],
        [0] * 9,
        [[7, 3]],
        4,
        4,
        [EMPTY] * 9,
        [0] * 9,
    ),
    "the last position there is, past the table": (
        [LAST_POSITION, *LATE_POSITIONS],
        [0] * 6,
        [[7, 3]],
        4,
        4,
        [EMPTY] * 6,
        [4, 0, 0, 0, 0, 0],
    ),
    # blocks of 2^30: the window is rows 2^30 - 5 to 2^30 - 2 of block 1
    "the last position there is": (
        [LAST_POSITION, *LATE_POSITIONS],
        [0] * 6,
        [[0, 1]],
        2**30,
        4,
        [[2_147_483_643, 2_147_483_644, 2_147_483_645, 2_147_483_646], *([EMPTY] * 5)],
        [4, 0, 0, 0, 0, 0],
    ),
    # 2^31 / 4 = 536870912 blocks fit
    "pages at the edge of int32": (
        [3] * 5,
        [0, 1, 2, 3, 4],
        [[536_870_911], [536_870_912], [INT32_MAX], [-1], [INT32_MIN]],
        4,
        4,
        [[2_147_483_644, 2_147_483_645, 2_147_483_646, 2_147_483_647], *([EMPTY] * 4)],
        [4, 4, 4, 4, 4],
    ),
    # 2^31 / 3 = 715827882 blocks fit; the next one would end at 2^31
    "a page that fits only in part": (
        [2, 2],
        [0, 1],
        [[715_827_881], [715_827_882]],
        3,
        3,
        [[2_147_483_643, 2_147_483_644, 2_147_483_645], [-1, -1, -1]],
        [3, 3],
    ),
    "page 0 is a page": ([0], [0], [[0, 3]], 4, 4, [[0, -1, -1, -1]], [1]),
    "no token": ([], [], [[7, 3]], 4, 4, [], []),
    "no request": ([3, 5], [0, -1], [], 4, 4, [EMPTY, EMPTY], [0, 0]),
    "no column": ([3, 5], [0, 1], [[], []], 4, 4, [EMPTY, EMPTY], [4, 4]),
}

# query_start_loc, seq_lens, window_size -> gather_lens
GATHER = {
    "worked example": ([0, 2, 4], [9, 6], 4, [5, 5]),
    "context around the window": ([0, 2, 4, 6, 8], [2, 4, 5, 6], 4, [2, 4, 5, 5]),
    "window of one": ([0, 2, 4], [9, 2], 1, [2, 2]),
    "window of 128": ([0, 5, 10, 15], [131, 132, 133], 128, [131, 132, 132]),
    "padding requests": ([0, 2, 2, 2], [9, 0, 0], 4, [5, 0, 0]),
    "empty request with context": ([0, 0, 0], [10, 2], 4, [3, 2]),
    "seq_len below query": ([0, 3, 6, 9], [2, 0, 3], 4, [2, 0, 3]),
    "negative seq_len": ([0, 2, 2, 7], [-5, INT32_MIN, INT32_MIN], 4, [0, 0, 0]),
    "greatest seq_len": ([0, 2], [INT32_MAX], 4, [5]),
    "greatest query": ([0, INT32_MAX], [INT32_MAX], 128, [INT32_MAX]),
    "greatest window": ([0, 2], [9], INT32_MAX, [9]),
    "decreasing start": ([0, 2, 1], [5, 5], 4, [5, 3]),
    "no request": ([0], [], 4, []),
}


@pytest.mark.parametrize("layout", [lambda table: table, strided, widened])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_swa_indices_and_lens(case: tuple[Any, ...], layout: Any) -> None:
    positions, requests, table, block_size, window_size, indices, lens = case
    settings = {"block_size": block_size, "window_size": window_size}
    oracle = oracles.swa_indices_and_lens(positions, requests, table, **settings)
    assert oracle == (indices, lens)
    columns = len(table[0]) if table else 2
    result = call(
        ops.swa_indices_and_lens,
        i64(positions),
        i32(requests),
        layout(rows32(table, columns)),
        **settings,
    )
    assert_exact(result.indices, rows32(indices, window_size))
    assert_exact(result.lens, i32(lens))


def test_window_of_128_over_pages_of_64() -> None:
    """Position 200 sees 73..200: the last 55 rows of block 1, all of block 2 and 9 rows of block
    3."""
    result = ops.swa_indices_and_lens(
        i64([200, 126]), i32([0, 0]), i32([[10, 30, 20, 40]]), block_size=64, window_size=128
    )
    assert result.lens.tolist() == [128, 127]
    late, early = result.indices.tolist()
    assert late == [*range(1929, 1984), *range(1280, 1344), *range(2560, 2569)]
    assert early == [*range(640, 704), *range(1920, 1983), -1]


def test_token_columns_may_have_any_stride() -> None:
    result = call(
        ops.swa_indices_and_lens,
        strided(i64([5, 1, 2])),
        strided(i32([0, 1, -1])),
        strided(i32([[7, 3], [2, 5]])),
        block_size=4,
        window_size=3,
    )
    assert_exact(result, (i32([[31, 12, 13], [8, 9, -1], [-1, -1, -1]]), i32([3, 2, 0])))


@pytest.mark.parametrize("layout", [lambda tensor: tensor, strided])
@pytest.mark.parametrize("case", GATHER.values(), ids=GATHER)
def test_prefill_gather_lens(case: tuple[Any, ...], layout: Any) -> None:
    query_start_loc, seq_lens, window_size, expected = case
    oracle = oracles.prefill_gather_lens(query_start_loc, seq_lens, window_size=window_size)
    assert oracle == expected
    result = call(
        ops.prefill_gather_lens,
        layout(i32(query_start_loc)),
        layout(i32(seq_lens)),
        window_size=window_size,
    )
    assert_exact(result, i32(expected))


def swa_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {"block_size": batch.block_size, "window_size": batch.window_size}
        indices, lens = oracles.swa_indices_and_lens(
            batch.positions, batch.req_indices, batch.block_table, **settings
        )
        result = call(
            ops.swa_indices_and_lens,
            batch.pos(layout),
            batch.req(layout),
            batch.table(layout),
            **settings,
        )
        yield result, (rows32(indices, batch.window_size), i32(lens))


def gather_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {"window_size": batch.window_size}
        expected = oracles.prefill_gather_lens(batch.query_start_loc, batch.seq_lens, **settings)
        result = call(ops.prefill_gather_lens, batch.qsl(layout), batch.seq(layout), **settings)
        yield result, i32(expected)


@pytest.mark.parametrize("pairs", [swa_pairs, gather_pairs])
def test_random_batches(pairs: Any) -> None:
    check_stream(pairs())

"""Cache slots of selected (top-k) and of all compressed rows."""

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
    Batch,
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
EMPTY = [-1, -1, -1, -1]

# topk_indices, req_indices, block_table, block_size -> indices, lengths
TOPK: dict[str, tuple[Any, ...]] = {
    "worked example": ([[0, 64, -1, -1]], [0], [[10, 11]], 64, [[640, 704, -1, -1]], [2]),
    "order and place are kept": (
        [[-1, 64, -1, 0], [0, -1, 64, -1], [65, 1, 2, 66], EMPTY],
        [0, 0, 0, 0],
        [[10, 11]],
        64,
        [[-1, 704, -1, 640], [640, -1, 704, -1], [705, 641, 642, 706], EMPTY],
        [4, 3, 4, 0],
    ),
    "around pages and the end of the table": (
        [[63, 64, 127, 128], [0, 128, 127, 10**6]],
        [0, 0],
        [[10, 12]],
        64,
        [[703, 768, 831, -1], [640, -1, 831, -1]],
        [3, 3],
    ),
    "adversarial indices": (
        [[INT32_MAX, INT32_MIN, -64, -2], [INT32_MAX, 1, INT32_MIN, -65]],
        [0, 0],
        [[10, 11]],
        64,
        [EMPTY, [-1, 641, -1, -1]],
        [0, 2],
    ),
    "no such request": (
        [[0, 1]] * 7,
        [0, -1, 1, -5, 10**9, INT32_MAX, INT32_MIN],
        [[10, 11]],
        64,
        [[640, 641], *([[-1, -1]] * 6)],
        [2, 0, 0, 0, 0, 0, 0],
    ),
    # 2^31 / 64 = 33554432 blocks fit
    "pages absent or beyond int32": (
        [[0, 63, 64, 127]] * 4,
        [0, 1, 2, 3],
        [[-1, 5], [33_554_431, 33_554_432], [50_000_000, INT32_MIN], [INT32_MAX, 0]],
        64,
        [[-1, -1, 320, 383], [2_147_483_584, 2_147_483_647, -1, -1], EMPTY, [-1, -1, 0, 63]],
        [4, 2, 0, 4],
    ),
    "page size that is no power of two": (
        [[0, 2, 3, 5], [6, 4, -1, -1]],
        [0, 1],
        [[4, 1], [715_827_882, 715_827_881]],
        3,
        [[12, 14, 3, 5], [-1, 2_147_483_644, -1, -1]],
        [4, 2],
    ),
    "a column past the row is not the next row": (
        [[0, 1], [0, 1]],
        [0, 1],
        [[1], [2]],
        1,
        [[1, -1], [2, -1]],
        [1, 1],
    ),
    "page 0 is a page": ([[1, 0, -1, -1]], [0], [[0, 5]], 64, [[1, 0, -1, -1]], [2]),
    "no token": ([], [], [[10, 11]], 64, [], []),
    "no request": ([[0, 1]], [0], [], 64, [[-1, -1]], [0]),
    "no selection": ([[], []], [0, -1], [[10, 11]], 64, [[], []], [0, 0]),
    "no column": ([[0, 1]], [0], [[]], 64, [[-1, -1]], [0]),
}

C128 = {"block_size": 2, "compress_ratio": 128}

# positions, req_indices, block_table, settings -> indices, lengths
DENSE: dict[str, tuple[Any, ...]] = {
    "around every row": (
        [0, 126, 127, 254, 255, 383, 511, 639],
        [0] * 8,
        [[3, 8]],
        {**C128, "max_compressed": 4},
        [
            EMPTY,
            EMPTY,
            [6, -1, -1, -1],
            [6, -1, -1, -1],
            [6, 7, -1, -1],
            [6, 7, 16, -1],
            [6, 7, 16, 17],
            [6, 7, 16, 17],
        ],
        [0, 0, 1, 1, 2, 3, 4, 4],
    ),
    "past the end of the table": (
        [639, 1000],
        [0, 0],
        [[3, 8]],
        {**C128, "max_compressed": 6},
        [[6, 7, 16, 17, -1, -1]] * 2,
        [5, 6],
    ),
    "every request its own pages": (
        [255, 255, 127],
        [1, 0, 2],
        [[3, 8], [5, 9], [0, 1]],
        {**C128, "max_compressed": 2},
        [[10, 11], [6, 7], [0, -1]],
        [2, 2, 1],
    ),
    "cut to one row": (
        [511],
        [0],
        [[3, 8]],
        {**C128, "max_compressed": 1},
        [[6]],
        [1],
    ),
    "ratio 4, pages of three": (
        [18, 19],
        [0, 0],
        [[4, 1]],
        {"block_size": 3, "compress_ratio": 4, "max_compressed": 6},
        [[12, 13, 14, 3, -1, -1], [12, 13, 14, 3, 4, -1]],
        [4, 5],
    ),
    "a hole": (
        [1, 2],
        [0, 0],
        [[-1, 5, INT32_MIN]],
        {"block_size": 1, "compress_ratio": 1, "max_compressed": 4},
        [[-1, 5, -1, -1], [-1, 5, -1, -1]],
        [2, 3],
    ),
    # 2^31 / 2 = 1073741824 blocks fit
    "pages at the edge of int32": (
        [511, 255],
        [0, 1],
        [[1_073_741_823, 1_073_741_824], [INT32_MAX, 0]],
        {**C128, "max_compressed": 4},
        [[2_147_483_646, 2_147_483_647, -1, -1], EMPTY],
        [4, 2],
    ),
    "no such request": (
        [127] * 7,
        [0, -1, 1, -5, 10**9, INT32_MAX, INT32_MIN],
        [[3, 8]],
        {**C128, "max_compressed": 1},
        [[6], *([[-1]] * 6)],
        [1, 0, 0, 0, 0, 0, 0],
    ),
    "adversarial positions": (
        [-1, -128, -HUGE_POSITION, 2**32, 2**39 - 1, *LATE_POSITIONS],
        [0] * 10,
        [[3, 8]],
        {**C128, "max_compressed": 4},
        [EMPTY] * 10,
        [0] * 10,
    ),
    "the last position there is": (
        [LAST_POSITION, INT32_MAX],
        [0, 0],
        [[3, 8]],
        {**C128, "max_compressed": 5},
        [[6, 7, 16, 17, -1], [-1] * 5],
        [5, 0],
    ),
    # rows of 2^30 positions: the second one lacks its last position, which is 2^31 - 1
    "the last position there is, few rows": (
        [LAST_POSITION, INT32_MAX],
        [0, 0],
        [[3, 8]],
        {"block_size": 1, "compress_ratio": 2**30, "max_compressed": 3},
        [[3, -1, -1], [-1, -1, -1]],
        [1, 0],
    ),
    "page 0 is a page": ([127], [0], [[0, 5]], {**C128, "max_compressed": 2}, [[0, -1]], [1]),
    "no token": ([], [], [[3, 8]], {**C128, "max_compressed": 4}, [], []),
    "no request": ([127], [0], [], {**C128, "max_compressed": 4}, [EMPTY], [0]),
    "no column": ([255], [0], [[]], {**C128, "max_compressed": 4}, [EMPTY], [2]),
}


@pytest.mark.parametrize("layout", [lambda table: table, strided, widened])
@pytest.mark.parametrize("case", TOPK.values(), ids=TOPK)
def test_global_topk_indices_and_lens(case: tuple[Any, ...], layout: Any) -> None:
    local, requests, table, block_size, indices, lens = case
    oracle = oracles.global_topk_indices_and_lens(local, requests, table, block_size=block_size)
    assert oracle == (indices, lens)
    topk = len(local[0]) if local else 4
    columns = len(table[0]) if table else 2
    result = call(
        ops.global_topk_indices_and_lens,
        layout(rows32(local, topk)),
        i32(requests),
        layout(rows32(table, columns)),
        block_size=block_size,
    )
    assert_exact(result.indices, rows32(indices, topk))
    assert_exact(result.lens, i32(lens))


@pytest.mark.parametrize("layout", [lambda table: table, strided, widened])
@pytest.mark.parametrize("case", DENSE.values(), ids=DENSE)
def test_dense_compressed_indices(case: tuple[Any, ...], layout: Any) -> None:
    positions, requests, table, settings, indices, lens = case
    oracle = oracles.dense_compressed_indices(positions, requests, table, **settings)
    assert oracle == (indices, lens)
    columns = len(table[0]) if table else 2
    result = call(
        ops.dense_compressed_indices,
        i64(positions),
        i32(requests),
        layout(rows32(table, columns)),
        **settings,
    )
    assert_exact(result.indices, rows32(indices, settings["max_compressed"]))
    assert_exact(result.lens, i32(lens))


def test_lengths_of_rows_with_holes_reach_behind_the_last_entry() -> None:
    """vLLM would count 2, and a reader of the first two would miss slot 704."""
    rows, table = i32([[0, -1, 64, -1]]), i32([[10, 11]])
    found = ops.global_topk_indices_and_lens(rows, i32([0]), table, block_size=64)
    assert found.indices.tolist() == [[640, -1, 704, -1]]
    assert found.lens.tolist() == [3]


def test_token_columns_may_have_any_stride() -> None:
    requests, table = strided(i32([1, 0, -1])), strided(i32([[3, 8], [5, 9]]))
    chosen = call(
        ops.global_topk_indices_and_lens,
        strided(i32([[3, -1], [0, 1], [0, 1]])),
        requests,
        table,
        block_size=2,
    )
    assert_exact(chosen, (i32([[19, -1], [6, 7], [-1, -1]]), i32([1, 2, 0])))
    dense = call(
        ops.dense_compressed_indices,
        strided(i64([255, 383, 255])),
        requests,
        table,
        **C128,
        max_compressed=3,
    )
    assert_exact(dense, (i32([[10, 11, -1], [6, 7, 16], [-1, -1, -1]]), i32([2, 3, 0])))


def random_selection(rng: Random, batch: Batch, topk: int) -> list[list[int]]:
    """Rows of ids around block and table ends, some with the usual -1 tail."""
    last = batch.columns * batch.block_size
    odd = (-1, -2, last, last - 1, last + 1, batch.block_size, INT32_MAX, INT32_MIN)
    rows = []
    for _ in range(batch.num_tokens):
        used = rng.randrange(topk + 1)
        ids = [rng.randrange(last + 1) for _ in range(used)]
        ids = [rng.choice(odd) if rng.random() < 0.25 else index for index in ids]
        rows.append(ids + [-1] * (topk - used))
    return rows


def topk_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        topk = layout.choice((1, 2, 5, 16))
        local = random_selection(layout, batch, topk)
        indices, lens = oracles.global_topk_indices_and_lens(
            local, batch.req_indices, batch.block_table, block_size=batch.block_size
        )
        result = call(
            ops.global_topk_indices_and_lens,
            maybe_strided(layout, rows32(local, topk)),
            batch.req(layout),
            batch.table(layout),
            block_size=batch.block_size,
        )
        yield result, (rows32(indices, topk), i32(lens))


def dense_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {
            "block_size": batch.block_size,
            "compress_ratio": batch.compress_ratio,
            "max_compressed": layout.choice((1, 2, 5, 16)),
        }
        indices, lens = oracles.dense_compressed_indices(
            batch.positions, batch.req_indices, batch.block_table, **settings
        )
        result = call(
            ops.dense_compressed_indices,
            batch.pos(layout),
            batch.req(layout),
            batch.table(layout),
            **settings,
        )
        yield result, (rows32(indices, settings["max_compressed"]), i32(lens))


@pytest.mark.parametrize("pairs", [topk_pairs, dense_pairs])
def test_random_batches(pairs: Any) -> None:
    check_stream(pairs())

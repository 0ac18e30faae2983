"""Slots of the compressed rows that each token completes."""

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
C4 = {"block_size": 64, "compress_ratio": 4}
SMALL = {"block_size": 2, "compress_ratio": 4}

# positions, req_indices, block_table, slot_mapping, settings -> slots
CASES: dict[str, tuple[Any, ...]] = {
    "worked example": (
        [7, 8, 9, 6, 8, 9, 10, 11],
        [0, 0, 0, 1, 2, 2, 2, 2],
        [[5], [6], [9]],
        [0, 1, 2, 3, 4, 5, 6, 7],
        C4,
        [321, -1, -1, -1, -1, -1, -1, 578],
    ),
    "page ends and the end of the table": (
        [2, 3, 4, 7, 11, 14, 15, 19],
        [0] * 8,
        [[3, 8]],
        [0] * 8,
        SMALL,
        [-1, 6, -1, 7, 16, -1, 17, -1],
    ),
    "ratio 1 writes for every token": (
        [0, 1, 2, 3, 4],
        [0] * 5,
        [[5, 7]],
        [9] * 5,
        {"block_size": 2, "compress_ratio": 1},
        [10, 11, 14, 15, -1],
    ),
    "ratio 128": (
        [126, 127, 128, 254, 255, 256, 383],
        [0] * 7,
        [[4]],
        [0] * 7,
        {"block_size": 2, "compress_ratio": 128},
        [-1, 8, -1, -1, 9, -1, -1],
    ),
    "sizes that are no powers of two": (
        [1, 2, 5, 8, 11, 14, 17],
        [0] * 7,
        [[2, 10]],
        [0] * 7,
        {"block_size": 3, "compress_ratio": 3},
        [-1, 6, 7, 8, 30, 31, 32],
    ),
    "own slot missing": (
        [3, 7, 3, 7],
        [0] * 4,
        [[3, 8]],
        [0, -1, -7, INT32_MIN],
        SMALL,
        [6, -1, -1, -1],
    ),
    "own slot beyond int32": ([3, 7], [0, 0], [[3, 8]], [0, 2**40], SMALL, [6, 7]),
    "no such request": (
        [3] * 7,
        [0, -1, 1, -5, 10**9, INT32_MAX, INT32_MIN],
        [[3, 8]],
        [0] * 7,
        SMALL,
        [6, -1, -1, -1, -1, -1, -1],
    ),
    "no such position": (
        [
            *(-1, -4, -5, -HUGE_POSITION, -HUGE_POSITION - 1),
            *(HUGE_POSITION - 1, 2**33 + 3),
            *LATE_POSITIONS,
        ],
        [0] * 12,
        [[3, 8]],
        [0] * 12,
        SMALL,
        [-1] * 12,
    ),
    # 2^31 - 2 is row 2^30 - 2 of block 8, 2^33 + 2^30 - 2; 2^31 - 1 would be the row behind it
    "the last position there is": (
        [LAST_POSITION, *LATE_POSITIONS],
        [0] * 6,
        [[3, 8]],
        [0] * 6,
        {"block_size": 2**30, "compress_ratio": 1},
        [9_663_676_414, -1, -1, -1, -1, -1],
    ),
    # 2^31 - 5 ends row 2^29 - 2 and 2^31 - 1 would end the next one, both of block 3
    "the last row there is": (
        [2**31 - 5, LAST_POSITION, INT32_MAX, 2**31 + 3, 2**32 + 3, 2**40 - 1, 2**63 - 1],
        [0] * 7,
        [[3, 8]],
        [0] * 7,
        {"block_size": 2**29, "compress_ratio": 4},
        [2_147_483_646, -1, -1, -1, -1, -1, -1],
    ),
    "pages absent or far away": (
        [3, 3, 3, 7, 3],
        [0, 1, 2, 2, 3],
        [[-1], [INT32_MIN], [50_000_000], [INT32_MAX]],
        [0] * 5,
        C4,
        [-1, -1, 3_200_000_000, 3_200_000_001, 137_438_953_408],
    ),
    "a hole in the middle": (
        [3, 7, 11],
        [0, 0, 0],
        [[4, -1, 6]],
        [0] * 3,
        {"block_size": 1, "compress_ratio": 4},
        [4, -1, 6],
    ),
    "a column past the row is not the next row": (
        [0, 1, 0],
        [0, 0, 1],
        [[1], [2]],
        [0] * 3,
        {"block_size": 1, "compress_ratio": 1},
        [1, -1, 2],
    ),
    # ranks own blocks of 4 positions in turn: 0..3, 8..11, 16..19 | 4..7, 12..15, 20..23
    "two ranks": (
        [3, 7, 11, 15, 19, 23],
        [0] * 6,
        [[3, 8]],
        [0] * 6,
        {**SMALL, "cp_world_size": 2, "cp_interleave": 4},
        [6, 6, 7, 7, 16, 16],
    ),
    "two ranks, seen from rank 0": (
        [3, 7, 11, 15, 19, 23],
        [0] * 6,
        [[3, 8]],
        [0, -1, 1, -1, 2, -1],
        {**SMALL, "cp_world_size": 2, "cp_interleave": 4},
        [6, -1, 7, -1, 16, -1],
    ),
    "two ranks, two rows a turn": (
        [3, 7, 11, 15, 19, 22, 23, 35],
        [0] * 8,
        [[3, 8]],
        [0] * 8,
        {**SMALL, "cp_world_size": 2, "cp_interleave": 8},
        [6, 7, 6, 7, 16, -1, 17, -1],
    ),
    "four ranks": (
        [3, 15, 16, 19, 31, 35],
        [0] * 6,
        [[3, 8]],
        [0] * 6,
        {**SMALL, "cp_world_size": 4, "cp_interleave": 4},
        [6, 6, -1, 7, 7, 16],
    ),
    "two ranks, token by token": (
        [0, 1, 2, 3, 7, 8],
        [0] * 6,
        [[3, 8]],
        [0] * 6,
        {"block_size": 2, "compress_ratio": 1, "cp_world_size": 2, "cp_interleave": 1},
        [6, 6, 7, 7, 17, -1],
    ),
    "one rank: the interleave does not matter": (
        [3, 7, 11],
        [0] * 3,
        [[3, 8]],
        [0] * 3,
        {**SMALL, "cp_world_size": 1, "cp_interleave": 3},
        [6, 7, 16],
    ),
    "page 0 is a page": ([3, 7], [0, 0], [[0, 8]], [0, 0], SMALL, [0, 1]),
    "no token": ([], [], [[3, 8]], [], SMALL, []),
    "no request": ([3, 7], [0, -1], [], [0, 0], SMALL, [-1, -1]),
    "no column": ([3, 7], [0, 1], [[], []], [0, 0], SMALL, [-1, -1]),
}


@pytest.mark.parametrize("layout", [lambda table: table, strided, widened])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compressed_slot_mapping(case: tuple[Any, ...], layout: Any) -> None:
    positions, requests, table, slots, settings, expected = case
    assert oracles.compressed_slot_mapping(*case[:4], **settings) == expected
    columns = len(table[0]) if table else 2
    result = call(
        ops.compressed_slot_mapping,
        i64(positions),
        i32(requests),
        layout(rows32(table, columns)),
        i64(slots),
        **settings,
    )
    assert_exact(result, i64(expected))


def test_token_columns_may_have_any_stride() -> None:
    result = call(
        ops.compressed_slot_mapping,
        strided(i64([3, 7, 3])),
        strided(i32([0, 1, -1])),
        strided(i32([[3, 8], [4, 9]])),
        strided(i64([0, 1, 2])),
        **SMALL,
    )
    assert_exact(result, i64([6, 9, -1]))


@pytest.mark.parametrize("interleave", [1, 2, 6])
def test_interleave_must_hold_whole_rows(interleave: int) -> None:
    tokens, requests, table = i64([3]), i32([0]), i32([[3]])
    with pytest.raises(ValueError, match=r"^compressed_slot_mapping: "):
        ops.compressed_slot_mapping(
            tokens, requests, table, tokens, **SMALL, cp_world_size=2, cp_interleave=interleave
        )


def slot_pairs() -> Iterator[tuple[Result, Result]]:
    for seed in SEEDS:
        batch, layout = random_batch(seed), Random(seed)
        settings = {"block_size": batch.block_size, "compress_ratio": batch.compress_ratio}
        if layout.random() < 0.4:
            settings["cp_world_size"] = layout.choice((1, 2, 3, 4))
            settings["cp_interleave"] = batch.compress_ratio * layout.choice((1, 2, 3))
        expected = oracles.compressed_slot_mapping(
            batch.positions, batch.req_indices, batch.block_table, batch.slot_mapping, **settings
        )
        result = call(
            ops.compressed_slot_mapping,
            batch.pos(layout),
            batch.req(layout),
            batch.table(layout),
            batch.slots(layout),
            **settings,
        )
        yield result, i64(expected)


def test_random_batches() -> None:
    check_stream(slot_pairs())

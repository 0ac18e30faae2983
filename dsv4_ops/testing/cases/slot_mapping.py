"""Cases and strategies of the slot stages."""

from __future__ import annotations

from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.strategies.batches import (
    BAD_POSITIONS,
    BAD_REQUESTS,
    INT32_MIN,
    LAST_POSITION,
    LATE_POSITIONS,
    calls_of,
)

_PLAIN = {"block_size": 64, "compress_ratio": 4, "cp_world_size": 1, "cp_interleave": 1}


def _case(
    name: str, table: list[list[int]], *tokens: tuple[int, int, int, int], **settings: int
) -> Case:
    """Make a call for tokens of (position, request, own slot, compressed slot)."""
    positions, requests, slots, expected = ([token[i] for token in tokens] for i in range(4))
    tensors = (i64(positions), i32(requests), i32(table).reshape(len(table), -1), i64(slots))
    return Case(name, tensors, {**_PLAIN, **settings}, (expected,))


def _of_one(name: str, table: list[int], slots: dict[int, int], **settings: int) -> Case:
    """Make a call for one request's positions, with the compressed slot of each."""
    return _case(name, [table], *[(p, 0, 0, slot) for p, slot in slots.items()], **settings)


def _cases() -> list[Case]:
    three, two, small = [[5], [6], [9]], [3, 8], {"block_size": 2}
    worked = [
        *((7, 0, 0, 321), (8, 0, 1, -1), (9, 0, 2, -1), (6, 1, 3, -1)),
        *((8, 2, 4, -1), (9, 2, 5, -1), (10, 2, 6, -1), (11, 2, 7, 578)),
    ]
    late = (*LATE_POSITIONS, 2**33 + 3, 2**40 - 1, 2**31 + 3)
    none = dict.fromkeys((*BAD_POSITIONS, *late, -5, -(2**40) - 1), -1)
    # rank 0 owns positions 0..3, 8..11 and 16..19, rank 1 owns 4..7, 12..15 and 20..23
    ranks = {**small, "cp_world_size": 2, "cp_interleave": 4}
    return [
        _case("worked example", three, *worked),
        _case("PAD in, PAD out", three, (7, 0, -1, -1), *worked[1:]),
        _case(
            "pages absent or beyond int32",
            [[-1], [INT32_MIN], [50_000_000], [INT32_MAX]],
            *((3, 0, 0, -1), (3, 1, 0, -1), (3, 2, 0, 3_200_000_000), (7, 2, 0, 3_200_000_001)),
            (3, 3, 0, 137_438_953_408),
        ),
        _of_one(
            "around pages and the table, no such position",
            two,
            {2: -1, 3: 6, 4: -1, 7: 7, 11: 16, 14: -1, 15: 17, 19: -1, **none},
            **small,
        ),
        _case(
            "no own slot, no such request",
            [two],
            *((3, 0, 0, 6), (7, 0, -1, -1), (3, 0, -7, -1), (7, 0, -(2**31), -1)),
            *((3, 0, 0, 6), (7, 0, 2**40, 7)),
            *[(3, request, 0, -1) for request in (1, *BAD_REQUESTS)],
            **small,
        ),
        _of_one(
            "every token",
            [5, 7],
            {0: 10, 1: 11, 2: 14, 3: 15, 4: -1},
            block_size=2,
            compress_ratio=1,
        ),
        _of_one(
            "ratio 128",
            [4],
            {126: -1, 127: 8, 128: -1, 254: -1, 255: 9, 256: -1, 383: -1},
            block_size=2,
            compress_ratio=128,
        ),
        _of_one(
            "sizes that are no powers of two",
            [2, 10],
            {1: -1, 2: 6, 5: 7, 8: 8, 11: 30, 14: 31, 17: 32},
            block_size=3,
            compress_ratio=3,
        ),
        _of_one("a hole, page 0", [4, -1, 0], {3: 4, 7: -1, 11: 0}, block_size=1),
        _case(
            "a column past the row is not the next row",
            [[1], [2]],
            *((0, 0, 0, 1), (1, 0, 0, -1), (0, 1, 0, 2)),
            block_size=1,
            compress_ratio=1,
        ),
        _of_one(
            "the last position there is",
            two,
            {LAST_POSITION: 9_663_676_414, **dict.fromkeys(late, -1)},
            block_size=2**30,
            compress_ratio=1,
        ),
        _of_one(
            "the last row there is",
            two,
            {2**31 - 5: 2_147_483_646, LAST_POSITION: -1, **dict.fromkeys(late, -1)},
            block_size=2**29,
        ),
        _of_one("two ranks", two, {3: 6, 7: 6, 11: 7, 15: 7, 19: 16, 23: 16}, **ranks),
        _case(
            "two ranks, seen from rank 0",
            [two],
            *((3, 0, 0, 6), (7, 0, -1, -1), (11, 0, 1, 7), (15, 0, -1, -1), (19, 0, 2, 16)),
            (23, 0, -1, -1),
            **ranks,
        ),
        _of_one(
            "two ranks, two rows in turn",
            two,
            {3: 6, 7: 7, 11: 6, 15: 7, 19: 16, 22: -1, 23: 17, 35: -1},
            **{**ranks, "cp_interleave": 8},
        ),
        _of_one(
            "four ranks",
            two,
            {3: 6, 15: 6, 16: -1, 19: 7, 31: 7, 35: 16},
            **{**ranks, "cp_world_size": 4},
        ),
        _of_one(
            "two ranks, token by token",
            two,
            {0: 6, 1: 6, 2: 7, 3: 7, 7: 17, 8: -1},
            block_size=2,
            compress_ratio=1,
            cp_world_size=2,
        ),
        _of_one(
            "turns of one rank do not matter", two, {3: 6, 7: 7, 11: 16}, **small, cp_interleave=3
        ),
        _of_one(
            "turns beyond int32",
            two,
            {3: 6, 7: 7, 11: 16},
            block_size=2,
            cp_world_size=4,
            cp_interleave=2**30,
        ),
        _case("no token", [two], **small),
        _case("no column", [[], []], (3, 0, 0, -1), (7, 1, 0, -1), **small),
        Case(
            "no request",
            (i64([3, 7]), i32([0, -1]), i32([]).reshape(0, 2), i64([0, 0])),
            _PLAIN,
            ([-1, -1],),
        ),
    ]


compressed_slot_mapping = OpTesting(
    cases=_cases,
    settings=(
        _PLAIN,
        {**_PLAIN, "block_size": 2, "compress_ratio": 128},
        {**_PLAIN, "cp_world_size": 2, "cp_interleave": 4},
        {**_PLAIN, "block_size": 3, "compress_ratio": 1, "cp_world_size": 3, "cp_interleave": 5},
    ),
    make=calls_of("positions", "req_indices", "block_table", "slot_mapping"),
)

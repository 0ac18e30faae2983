"""Cases and strategies of the prefill chunking stages."""

from __future__ import annotations

from functools import partial
from typing import Any

from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.strategies.batches import (
    BAD_POSITIONS,
    BAD_REQUESTS,
    INT32_MIN,
    LAST_POSITION,
    LATE_POSITIONS,
    calls_of,
    lengths,
    ragged_batch,
)
from dsv4_ops.testing.strategies.draw import Draw, strategy_of


def _split_case(
    name: str,
    seq_lens: list[int],
    query_lens: list[int],
    workspace_size: int,
    max_logits_bytes: int,
    *chunks: list[int],
    max_chunks: int | None = None,
    offset: int = 0,
) -> Case:
    """Make a call with capacity for one chunk more than ``chunks``, or for ``max_chunks``
    chunks."""
    capacity = len(chunks) + 1 if max_chunks is None else max_chunks
    settings = {"workspace_size": workspace_size, "max_logits_bytes": max_logits_bytes}
    settings |= {"max_chunks": capacity, "request_offset": offset}
    rows = [*chunks, *[[0] * 4] * capacity][:capacity]
    return Case(name, (i32(seq_lens), i32(query_lens)), settings, (rows, [len(chunks)]))


def _split_cases() -> list[Case]:
    case, least = _split_case, INT32_MIN
    worked = ([100, 50, 400], [10, 5, 40], 160, 16000)
    plan = ([2, 4, 0, 15], [4, 5, 0, 10], [4, 5, 10, 20], [4, 5, 20, 30], [4, 5, 30, 40])
    halves = ([0, 1, 0, 28_571], [0, 1, 28_571, 40_000], [1, 2, 0, 28_571], [1, 2, 28_571, 40_000])
    one_each, long = ([0, 1, 0, 2], [1, 2, 0, 2]), [70_000, 70_000]
    far = (INT32_MAX, 2**33)
    return [
        *[
            case(f"worked example, {count} stored", *worked, *plan, max_chunks=count, offset=2)
            for count in (6, 5, 4, 2, 1)
        ],
        case("both budgets met exactly", [3, 3], [2, 2], 6, 99, [0, 2, 0, 4]),
        case("one element short", [3, 3], [2, 2], 6, 95, *one_each),
        case("one row short", [3, 3], [2, 2], 5, 99, *one_each),
        case("remainder of a split", [4], [7], 4, 48, [0, 1, 0, 3], [0, 1, 3, 6], [0, 1, 6, 7]),
        case("no logits of one query", [10], [2], 10, 20, [0, 1, 0, 1], [0, 1, 1, 2]),
        case("smallest budgets", [2], [2], 1, 4, [5, 6, 0, 1], [5, 6, 1, 2], offset=5),
        case("a long request is alone", [500, 0], [1, 1], 100, 4000, [0, 1, 0, 1], [1, 2, 0, 1]),
        case("long request without a query", [500, 5], [0, 2], 100, 4000, [1, 2, 0, 2]),
        case("no keys yet", [0, 0], [3, 5], 10, 4, [0, 2, 0, 8]),
        case("nothing to do", [0], [0], 10, 40),
        case("an empty request joins", [2, 2, 2], [1, 0, 1], 4, 400, [0, 2, 0, 1], [2, 3, 0, 1]),
        case("no chunk of nothing", [4, 4, 4], [1, 0, 1], 4, 400, [0, 1, 0, 1], [2, 3, 0, 1]),
        case("padding requests at the end", [4, 0, 0], [2, 0, 0], 4, 400, [0, 3, 0, 2]),
        case("negative", [-5, 3, least], [2, -1, 4], 10, 400, [0, 3, 0, 6]),
        case("product beyond int32", long, [40_000, 40_000], 10**6, 8 * 10**9, *halves),
        case("sum beyond int32", [INT32_MAX] * 2, [1, 1], *far, [0, 1, 0, 1], [1, 2, 0, 1]),
        case("no request", [], [], 10, 40),
    ]


def _split_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    kinds = draw.st.tuples(strategy_of(lengths), draw.st.integers(0, 60)) | draw.st.sampled_from(
        ((-3, 4), (5, -1), (0, 0), (400, 40))
    )
    lens = draw(draw.st.lists(kinds, min_size=min_size, max_size=14))
    return Case(
        "sampled", (i32([rows for rows, _ in lens]), i32([query for _, query in lens])), settings
    )


split_prefill_chunks = OpTesting(
    cases=_split_cases,
    settings=tuple(
        {
            "workspace_size": rows,
            "max_logits_bytes": size,
            "max_chunks": chunks,
            "request_offset": offset,
        }
        for rows, size, chunks, offset in (
            (160, 16000, 7, 2),
            (1, 4, 3, 0),
            (1000, 2**29, 5, 0),
            (300, 4000, 40, 1),
        )
    ),
    make=_split_call,
)


def _bounds_cases() -> list[Case]:
    second, minus = [2] * 5, [-1, INT32_MIN, 8]
    worked = ([6, 7, 8, 8, 9, 10, 11, 12], [0, 0, 0, 1, 1, 1, 1, 1])
    past, late = [8, 99, LAST_POSITION], len(LATE_POSITIONS)
    greatest = [INT32_MAX, INT32_MAX, 1]
    none = len(BAD_REQUESTS) + 1 + len(BAD_POSITIONS)
    # name, positions, requests, seq_lens, compress_ratio, cu_seq_lens, row_start, row_stop
    calls: list[tuple[Any, ...]] = [
        (
            "worked example",
            *worked,
            [9, 13],
            4,
            [0, 2, 5],
            [0] * 3 + second,
            [1, 2, 2, 4, 4, 4, 5, 5],
        ),
        ("ratio 1", [0, 1, 2, 0], [0, 0, 0, 1], [3, 1], 1, [0, 3, 4], [0, 0, 0, 3], [1, 2, 3, 4]),
        (
            "around 128",
            *([126, 127, 128, 255], [0, 1, 1, 1], [127, 256], 128),
            *([0, 0, 2], [0] * 4, [0, 1, 1, 2]),
        ),
        ("less than a row", [0, 2, 3], [0, 0, 1], [3, 4], 4, [0, 0, 1], [0] * 3, [0, 0, 1]),
        (
            "empty and padding requests",
            *([3, 7, -1], [1, 3, -1], [0, 4, 0, 8, 0], 4),
            *([0, 0, 1, 1, 3, 3], [0, 1, 0], [1, 3, 0]),
        ),
        (
            "never past the request",
            *([*past, *past[1:]], [0, 0, 0, 1, 1], [9, 4], 4),
            *([0, 2, 3], [0, 0, 0, 2, 2], [2, 2, 2, 3, 3]),
        ),
        (
            "greatest length",
            *(
                [LAST_POSITION - 1, LAST_POSITION, *LATE_POSITIONS],
                [0] * (2 + late),
                [INT32_MAX],
                1,
            ),
            *([0, INT32_MAX], [0] * (2 + late), [INT32_MAX - 1, INT32_MAX, *[0] * late]),
        ),
        (
            "no such token",
            [7] * (2 + len(BAD_REQUESTS)) + [*BAD_POSITIONS],
            [1, 2, *BAD_REQUESTS, *[1] * len(BAD_POSITIONS)],
            *([8, 8], 4, [0, 2, 4], [2, *[0] * none], [4, *[0] * none]),
        ),
        ("negative lengths", [7, 3, 3], [2, 0, 1], minus, 4, [0, 0, 0, 2], [0] * 3, [2, 0, 0]),
        (
            "the sum saturates",
            *([5, 5, 5], [0, 1, 2], greatest, 1, [0, *[INT32_MAX] * 3]),
            *([0, INT32_MAX, INT32_MAX], [6, INT32_MAX, INT32_MAX]),
        ),
        (
            "the sum just fits",
            *([0, 9], [1, 1], [INT32_MAX - 2, 2], 1, [0, INT32_MAX - 2, INT32_MAX]),
            *([INT32_MAX - 2] * 2, [INT32_MAX - 1, INT32_MAX]),
        ),
        ("no token", [], [], [9, 13], 4, [0, 2, 5], [], []),
        ("no request", [3, 7], [0, -1], [], 4, [0], [0, 0], [0, 0]),
    ]
    return [
        Case(
            name,
            (i64(positions), i32(requests), i32(lens)),
            {"compress_ratio": ratio},
            tuple(expected),
        )
        for name, positions, requests, lens, ratio, *expected in calls
    ]


prefill_row_bounds = OpTesting(
    cases=_bounds_cases,
    settings=({"compress_ratio": 4}, {"compress_ratio": 1}, {"compress_ratio": 128}),
    make=calls_of("positions", "req_indices", "seq_lens"),
)


_POSITIONS = [*range(16, 20), *range(26, 30), *range(6, 9), *range(8, 13), -1, -1]
_TOKENS = (
    i64(_POSITIONS),
    i32([0] * 4 + [1] * 4 + [2] * 3 + [3] * 5 + [-1] * 2),
    i32([20, 30, 9, 13]),
    i32([0, 4, 8, 11, 16]),
)
"""Two decodes of four tokens, two prefills, two padding tokens."""


def _at(first: int, *rows: int) -> list[int]:
    """Return a bound for each token: ``rows`` from token ``first`` on, and 0 for other tokens."""
    return [*[0] * first, *rows, *[0] * (len(_POSITIONS) - first - len(rows))]


def _chunk_case(tokens: tuple[Any, ...], name: str, chunk: list[int], *expected: list[int]) -> Case:
    return Case(name, (*tokens, i32(chunk)), {"compress_ratio": 4}, expected)


def _chunk_cases() -> list[Case]:
    case, none = partial(_chunk_case, _TOKENS), _at(0)
    starts, stops = _at(8, 0, 0, 0, 2, 2, 2, 2, 2), _at(8, 1, 2, 2, 4, 4, 4, 5, 5)
    both, most = ([0, 0, 0, 2, 5], starts, stops), INT32_MAX
    # the four requests have 5, 7, 2 and 3 rows
    all_starts = _at(0, *[0] * 4, *[5] * 4, 12, 12, 12, *[14] * 5)
    all_stops = _at(0, 4, 4, 4, 5, 11, 12, 12, 12, 13, 14, 14, 16, 16, 16, 17, 17)
    every = ([0, 5, 12, 14, 17], all_starts, all_stops)
    negative = (i64([7, 7]), i32([0, 1]), i32([INT32_MIN, 9]), i32([0, 1, 2]))
    bad = i64([7] * 7 + [LAST_POSITION, *BAD_POSITIONS])
    count = len(BAD_POSITIONS)
    absent = (bad, i32([0, *BAD_REQUESTS, 1, *[0] * (count + 1)]), i32([8]), i32([0, 8 + count]))
    nobody = (i64([3, 7]), i32([0, -1]), i32([]), i32([0]))
    return [
        case("both prefills", [2, 4, 0, 8], *both),
        case("queries 2 to 5", [2, 4, 2, 5], both[0], _at(11, 2, 2), _at(10, 2, 4, 4)),
        case("last prefill", [3, 4, 0, 5], [0, 0, 0, 0, 3], none, _at(11, 2, 2, 2, 3, 3)),
        case("part of it", [3, 4, 2, 4], [0, 0, 0, 0, 3], none, _at(13, 2, 3)),
        case("a decode", [1, 2, 0, 4], [0, 0, 7, 7, 7], none, _at(4, 6, 7, 7, 7)),
        case("everything", [0, 4, 0, 16], *every),
        case("unused chunk", [0, 0, 0, 0], [0] * 5, none, none),
        case("no query", [2, 4, 0, 0], both[0], none, none),
        case("queries inverted", [2, 4, 5, 2], both[0], none, none),
        case("requests inverted", [3, 2, 0, 8], [0] * 5, none, none),
        case("stops too large", [2, 99, 0, 99], *both),
        case("negative query", [2, 4, -7, 3], both[0], none, _at(8, 1, 2, 2)),
        case("negative request", [-3, 1, 0, 99], [0, 5, 5, 5, 5], none, _at(0, 4, 4, 4, 5)),
        case("request too large", [99, 100, 0, 5], [0] * 5, none, none),
        case("widest", [INT32_MIN, most, INT32_MIN, most], *every),
        case("widest from the prefills on", [2, most, INT32_MIN, most], *both),
        _chunk_case(
            negative, "negative lengths are empty", [0, 2, 0, 2], [0, 0, 2], [0, 0], [0, 2]
        ),
        _chunk_case(
            absent,
            "no such token",
            [0, 1, 0, 8 + count],
            *([0, 2], [0] * (8 + count), [2, *[0] * 6, 2, *[0] * count]),
        ),
        _chunk_case(
            (i64([]), i32([]), i32([9, 13]), i32([0, 3, 8])),
            "no token",
            [0, 1, 0, 4],
            [0, 2, 2],
            [],
            [],
        ),
        _chunk_case(nobody, "no request", [0, 1, 0, 4], [0], [0, 0], [0, 0]),
    ]


def _chunk_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size)
    bounds = draw(draw.st.lists(draw.st.integers(0, 13), min_size=4, max_size=4))
    chunk = i32([min(bounds[:2]), max(bounds[:2]), min(bounds[2:]), max(bounds[2:])])
    tensors = (batch.positions, batch.req_indices, batch.seq_lens, batch.query_start_loc, chunk)
    return Case("sampled", tensors, settings)


prefill_chunk_row_bounds = OpTesting(
    cases=_chunk_cases,
    settings=({"compress_ratio": 4}, {"compress_ratio": 1}, {"compress_ratio": 128}),
    make=_chunk_call,
)

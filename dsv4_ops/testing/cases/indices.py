"""Cases and strategies of window, top-k and sparse index building."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.strategies.batches import (
    BAD_POSITIONS,
    BAD_REQUESTS,
    INT32_MIN,
    LAST_POSITION,
    LATE_POSITIONS,
    calls_of,
    ragged_batch,
    tables,
)
from dsv4_ops.testing.strategies.draw import Draw


def _table(rows: list[list[int]]) -> Tensor:
    return i32(rows) if rows else i32([]).reshape(0, 2)


def _of_tokens(
    name: str,
    settings: dict[str, Any],
    width: int,
    table: list[list[int]],
    *tokens: tuple[Any, ...],
) -> Case:
    """Make a call for tokens of (position, request, slots, length). If a token leaves out the
    length, the length is the number of slots."""
    rows = _padded([token[2] for token in tokens], width)
    lens = [token[3] if len(token) == 4 else len(token[2]) for token in tokens]
    places = (i64([token[0] for token in tokens]), i32([token[1] for token in tokens]))
    return Case(name, (*places, _table(table)), settings, (rows, lens))


def _padded(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows]


def _window_case(
    name: str,
    table: list[list[int]],
    *tokens: tuple[Any, ...],
    block_size: int = 4,
    window_size: int = 4,
) -> Case:
    settings = {"block_size": block_size, "window_size": window_size}
    return _of_tokens(name, settings, window_size, table, *tokens)


def _window_cases() -> list[Case]:
    case, two = _window_case, [[7, 3], [2, 5]]
    late = [*range(1929, 1984), *range(1280, 1344), *range(2560, 2569)]
    early = [*range(640, 704), *range(1920, 1983)]
    real = {"block_size": 64, "window_size": 128}
    return [
        case("worked example", two, (5, 0, [30, 31, 12, 13]), (1, 1, [8, 9]), (2, 1, [8, 9, 10])),
        case(
            "around window, page and table",
            two,
            *((0, 0, [28]), (2, 0, [28, 29, 30]), (3, 0, [28, 29, 30, 31])),
            *((4, 0, [29, 30, 31, 12]), (7, 0, [12, 13, 14, 15]), (8, 0, [13, 14, 15], 4)),
            *((9, 0, [14, 15], 4), (10, 0, [15], 4), (11, 0, [], 4), (12, 1, [], 4)),
            (LAST_POSITION, 0, [], 4),
        ),
        case(
            "no such token",
            two,
            *[(3, request, []) for request in (2, *BAD_REQUESTS)],
            *[(position, 0, []) for position in (*BAD_POSITIONS, 2**33 + 3)],
        ),
        case("no page, page 0", [[-1, 5], [0, 3]], (5, 0, [-1, -1, 20, 21]), (0, 1, [0])),
        case(
            "a hole in the middle",
            [[7, -1, 3]],
            (4, 0, [14, 15, -1, -1, 6]),
            block_size=2,
            window_size=5,
        ),
        case(
            "pages at the edge of int32",  # 2^31 / 4 blocks fit into int32
            [[536_870_911], [536_870_912], [INT32_MAX], [INT32_MIN]],
            (3, 0, [INT32_MAX - 3, INT32_MAX - 2, INT32_MAX - 1, INT32_MAX]),
            *[(3, request, [], 4) for request in (1, 2, 3)],
        ),
        case(
            "a page that fits only in part",  # the second block would end at 2^31
            [[715_827_881], [715_827_882]],
            *((2, 0, [2_147_483_643, 2_147_483_644, 2_147_483_645]), (2, 1, [], 3)),
            block_size=3,
            window_size=3,
        ),
        case(
            "the last position there is",
            [[0, 1]],
            (LAST_POSITION, 0, [INT32_MAX - 4, INT32_MAX - 3, INT32_MAX - 2, INT32_MAX - 1]),
            *[(position, 0, []) for position in LATE_POSITIONS],
            block_size=2**30,
        ),
        case("one row", [[7, 3]], (0, 0, [28]), (6, 0, [14]), (9, 0, [], 1), window_size=1),
        case("a long window", [[7, 3]], (2, 0, [14, 15, 6]), block_size=2, window_size=6),
        case("pages of one", [[9, 8, 7, 6, 5]], (4, 0, [7, 6, 5]), block_size=1, window_size=3),
        case("pages of three", [[4, 1]], (4, 0, [13, 14, 3, 4]), block_size=3),
        case("real sizes", [[10, 30, 20, 40]], (200, 0, late), (126, 0, early), **real),
        case("no token", two),
        case("no request", [], (3, 0, []), (5, -1, [])),
        case("no column", [[], []], (3, 0, [], 4), (5, 1, [], 4)),
    ]


swa_indices_and_lens = OpTesting(
    cases=_window_cases,
    settings=(
        {"block_size": 64, "window_size": 128},
        {"block_size": 4, "window_size": 4},
        {"block_size": 3, "window_size": 7},
        {"block_size": 1, "window_size": 1},
    ),
    make=calls_of("positions", "req_indices", "block_table"),
)


def _gather_cases() -> list[Case]:
    calls: list[tuple[str, list[int], list[int], int, list[int]]] = [
        ("worked example", [0, 2, 4, 7, 7], [9, 6, 3, 0], 4, [5, 5, 3, 0]),
        ("around the window", [0, 2, 4, 6, 8], [2, 4, 5, 6], 4, [2, 4, 5, 5]),
        ("window of one", [0, 2, 4], [9, 2], 1, [2, 2]),
        ("window of 128", [0, 5, 10, 15], [131, 132, 133], 128, [131, 132, 132]),
        ("empty requests", [0, 0, 0, 2, 2], [10, 2, 9, 0], 4, [3, 2, 5, 0]),
        ("shorter than its query", [0, 3, 6, 9], [2, 0, 3], 4, [2, 0, 3]),
        ("negative", [0, 2, 2, 7], [-5, INT32_MIN, INT32_MIN], 4, [0, 0, 0]),
        ("greatest length", [0, 2], [INT32_MAX], 4, [5]),
        ("greatest query", [0, INT32_MAX], [INT32_MAX], 128, [INT32_MAX]),
        ("greatest window", [0, 2], [9], INT32_MAX, [9]),
        ("a start that decreases", [0, 2, 1], [5, 5], 4, [5, 3]),
        ("no request", [0], [], 4, []),
    ]
    return [
        Case(name, (i32(starts), i32(lens)), {"window_size": window}, (expected,))
        for name, starts, lens, window, expected in calls
    ]


prefill_gather_lens = OpTesting(
    cases=_gather_cases,
    settings=({"window_size": 128}, {"window_size": 4}, {"window_size": 1}),
    make=calls_of("query_start_loc", "seq_lens"),
)


def _topk_cases() -> list[Case]:
    two, none = [[10, 11]], [-1, -1, -1, -1]
    far = [[-1, 5], [33_554_431, 33_554_432], [50_000_000, INT32_MIN], [INT32_MAX, 0]]
    edges = [[-1, -1, 320, 383], [INT32_MAX - 63, INT32_MAX, -1, -1], none, [-1, -1, 0, 63]]
    # name, selected rows, requests, table, block_size, slots, lengths
    calls: list[tuple[Any, ...]] = [
        ("worked example", [[0, 64, -1, -1]], [0], two, 64, [[640, 704, -1, -1]], [2]),
        (
            "order and holes stay, and lengths end at the last entry",  # vLLM 0.22 counts entries
            *([[-1, 64, -1, 0], [0, -1, 64, -1], [65, 1, 2, 66], none], [0] * 4, two, 64),
            [[-1, 704, -1, 640], [640, -1, 704, -1], [705, 641, 642, 706], none],
            [4, 3, 4, 0],
        ),
        (
            "around pages and the table",
            *([[63, 64, 127, 128], [0, 128, 127, 10**6]], [0, 0], [[10, 12]], 64),
            [[703, 768, 831, -1], [640, -1, 831, -1]],
            [3, 3],
        ),
        (
            "adversarial rows",
            *([[INT32_MAX, INT32_MIN, -64, -2], [INT32_MAX, 1, INT32_MIN, -65]], [0, 0], two, 64),
            [none, [-1, 641, -1, -1]],
            [0, 2],
        ),
        (
            "no such request",
            *([[0, 1]] * 7, [0, 1, *BAD_REQUESTS], two, 64),
            [[640, 641], *[[-1, -1]] * 6],
            [2, *[0] * 6],
        ),
        # 2^31 / 64 = 33554432 blocks fit into int32
        ("far pages", [[0, 63, 64, 127]] * 4, [*range(4)], far, 64, edges, [4, 2, 0, 4]),
        (
            "pages of three",
            *([[0, 2, 3, 5], [6, 4, -1, -1]], [0, 1], [[4, 1], [715_827_882, 715_827_881]], 3),
            [[12, 14, 3, 5], [-1, INT32_MAX - 3, -1, -1]],
            [4, 2],
        ),
        (
            "a column past the row is not the next row",
            *([[0, 1], [0, 1]], [0, 1], [[1], [2]], 1, [[1, -1], [2, -1]], [1, 1]),
        ),
        ("page 0 is a page", [[1, 0, -1, -1]], [0], [[0, 5]], 64, [[1, 0, -1, -1]], [2]),
        ("no request", [[0, 1]], [0], [], 64, [[-1, -1]], [0]),
        ("no selection", [[], []], [0, -1], two, 64, [[], []], [0, 0]),
        ("no column", [[0, 1]], [0], [[]], 64, [[-1, -1]], [0]),
        ("no token", [], [], two, 64, [], []),
    ]
    return [
        Case(name, (_table(rows), i32(reqs), _table(table)), {"block_size": size}, expected)
        for name, rows, reqs, table, size, *results in calls
        for expected in [tuple(results)]
    ]


def _topk_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size)
    topk = max(min_size, draw.one_of(0, 1, 2, 5, 16))
    selected = _selected(draw, batch.num_tokens, topk, 700)
    return Case("sampled", (selected, batch.req_indices, batch.block_table), settings)


global_topk_indices_and_lens = OpTesting(
    cases=_topk_cases,
    settings=({"block_size": 64}, {"block_size": 2}, {"block_size": 1}, {"block_size": 3}),
    make=_topk_call,
)


def _dense_case(
    name: str,
    table: list[list[int]],
    *tokens: tuple[Any, ...],
    block_size: int = 2,
    compress_ratio: int = 128,
    max_compressed: int = 4,
) -> Case:
    settings = {"block_size": block_size, "compress_ratio": compress_ratio}
    settings["max_compressed"] = max_compressed
    return _of_tokens(name, settings, max_compressed, table, *tokens)


def _dense_cases() -> list[Case]:
    case, two = _dense_case, [[3, 8], [0, 9]]
    four, none, most = [6, 7, 16, 17], (*BAD_POSITIONS, 2**39 - 1), 2**30
    return [
        case(
            "around every row",
            two,
            *((0, 0, []), (126, 0, []), (127, 0, [6]), (254, 0, [6]), (255, 0, [6, 7])),
            *((383, 0, [6, 7, 16]), (511, 0, four), (639, 0, four), (255, 1, [0, 1])),
        ),
        case(
            "past the table",
            two,
            *((639, 0, four, 5), (1000, 0, four, 6), (LAST_POSITION, 0, four, 6)),
            *[(position, 0, []) for position in none],
            *[(127, request, []) for request in (2, *BAD_REQUESTS)],
            max_compressed=6,
        ),
        case("cut to one row", two, (511, 0, [6]), (511, 1, [0]), max_compressed=1),
        case(
            "ratio 4, pages of three",
            [[4, 1]],
            *((18, 0, [12, 13, 14, 3]), (19, 0, [12, 13, 14, 3, 4])),
            block_size=3,
            compress_ratio=4,
            max_compressed=6,
        ),
        case(
            "a hole",
            [[-1, 5, INT32_MIN]],
            *((1, 0, [-1, 5]), (2, 0, [-1, 5], 3)),
            block_size=1,
            compress_ratio=1,
        ),
        case(
            "pages at the edge of int32",  # 2^31 / 2 blocks fit into int32
            [[1_073_741_823, 1_073_741_824], [INT32_MAX, 0]],
            *((511, 0, [INT32_MAX - 1, INT32_MAX], 4), (255, 1, [], 2)),
        ),
        case(
            "the second row lacks the last position, 2^31 - 1",
            [[3, 8]],
            *((LAST_POSITION, 0, [3]), (INT32_MAX, 0, [])),
            block_size=1,
            compress_ratio=most,
            max_compressed=3,
        ),
        case("no token", two),
        case("no request", [], (127, 0, [])),
        case("no column", [[]], (255, 0, [], 2)),
    ]


dense_compressed_indices = OpTesting(
    cases=_dense_cases,
    settings=(
        {"block_size": 2, "compress_ratio": 4, "max_compressed": 128},
        {"block_size": 2, "compress_ratio": 128, "max_compressed": 4},
        {"block_size": 1, "compress_ratio": 1, "max_compressed": 9},
        {"block_size": 3, "compress_ratio": 7, "max_compressed": 33},
    ),
    make=calls_of("positions", "req_indices", "block_table"),
)


_COMBINE = {
    "window_size": 4,
    "compress_ratio": 4,
    "topk": 2,
    "workspace_rows": 20,
    "swa_offset": 8,
}


def _combine_case(
    name: str, requests: list[tuple[int, int]], *tokens: tuple[Any, ...], **changed: int
) -> Case:
    """Make a call for requests of (length, gathered length), and tokens of (selected rows,
    position, request, expected columns). The expected columns end at the token's length."""
    settings = {**_COMBINE, **changed}
    columns = [[token[index] for token in tokens] for index in range(4)]
    width = -(-(settings["topk"] + settings["window_size"]) // 128) * 128
    lens = [i32([request[index] for request in requests]) for index in range(2)]
    tensors = (_table(columns[0]), i64(columns[1]), i32(columns[2]), *lens)
    expected = (_padded(columns[3], width), [len(row) for row in columns[3]])
    return Case(name, tensors, settings, expected)


def _combine_cases() -> list[Case]:
    case = _combine_case
    pair = {"window_size": 2, "compress_ratio": 1}
    # row 647483647 is the last row of the second request that an int32 can name
    far = {**pair, "workspace_rows": 1_500_000_000, "swa_offset": 1_499_999_990}
    edge = 647_483_647
    full, few = [*range(512), *range(1500, 1628)], [*range(123), *range(1500, 1505)]
    wide = {"workspace_rows": 2000, "swa_offset": 1500}
    return [
        case(
            "worked example, and padding",
            [(9, 5), (6, 5)],
            *(([1, 0], 7, 0, [1, 0, 8, 9, 10, 11]), ([0, 1], 8, 0, [0, 1, 9, 10, 11, 12])),
            *(([0, -1], 4, 1, [20, 28, 29, 30, 31]), ([0, -1], 5, 1, [20, 29, 30, 31, 32])),
            ([0, 1], 9, -1, []),
        ),
        case(
            "early tokens in any order, which read no entry past the visible rows",
            [(8, 8), (3, 3)],
            *(([0, 1], 6, 0, [0, 11, 12, 13, 14]), ([0, 1], 0, 0, [8])),
            *(([5, 7], 3, 0, [5, 8, 9, 10, 11]), ([0, 1], 7, 0, [0, 1, 12, 13, 14, 15])),
            *(([0, 1], 2, 0, [8, 9, 10]), ([7, 7], 2, 1, [28, 29, 30])),
        ),
        case(
            "holes keep their column",
            [(10, 6), (10, 6)],
            *(([-1, 2], 9, 0, [-1, 2, 12, 13]), ([4, -1], 8, 1, [24, -1, 31, 32])),
            ([-1, -1], 7, 0, [-1, -1, 10, 11]),
            **pair,
        ),
        case(
            "adversarial entries",
            [(6, 6), (6, 6)],
            ([INT32_MIN, 7, INT32_MAX], 5, 0, [-1, 7, -1, 12, 13]),
            ([8, 0, 9], 5, 1, [-1, 20, -1, 32, 33]),
            ([-20, 19, 20], 5, 1, [-1, -1, -1, 32, 33]),
            ([2**31 - 20, 20 - 2**31, -8], 5, 1, [-1, -1, -1, 32, 33]),
            topk=3,
            **pair,
        ),
        case(
            "more columns than topk",
            [(16, 2), (16, 2)],
            *(([3, 2, 1, 0], 15, 0, [3, 2, 8, 9]), ([1, -1, 5, 6], 14, 1, [21, -1, -1, 28])),
            **pair,
        ),
        case("no topk", [(6, 2), (2, 2)], ([3], 5, 0, [8, 9]), ([1], 0, 1, [28]), topk=0, **pair),
        case(
            "no capacity for topk", [(6, 6)], ([0, 1], 5, 0, [-1, -1, 4, 5]), swa_offset=0, **pair
        ),
        case(
            "windows that begin before the gathered rows, or end past them",
            [(10, 2), (6, 3)],
            *(([], 8, 0, [-1, 8]), ([], 9, 0, [8, 9]), ([], 7, 0, [-1, -1])),
            *(([], 6, 1, [30, -1]), ([], 7, 1, [-1, -1]), ([], 20, 1, [-1, -1])),
            topk=0,
            **pair,
        ),
        case(
            "the workspace is too small",
            [(5, 5), (5, 5)],
            *(([0, 7], 2, 0, [0, 7, 9, -1]), ([0, 7], 1, 0, [0, 7, 8, 9])),
            *(([0, 7], 1, 1, [10, 17, 18, 19]), ([0, 7], 2, 1, [10, 17, 19, -1])),
            workspace_rows=10,
            **pair,
        ),
        *[
            case(
                f"a workspace of {rows} rows has none for windows",
                [(5, 5)] * 2,
                *(([7, 8], 4, 0, [7, -1, -1, -1]), ([7, 8], 4, 1, [rows + 7, -1, -1, -1])),
                workspace_rows=rows,
                **pair,
            )
            for rows in (8, 5)
        ],
        case(
            "rows at the edge of int32",  # 3 * 1.5 * 10^9 is 205032704 in int32
            [(13, 13)] * 4,
            ([edge, edge + 1], 9, 0, [edge, edge + 1, 1_499_999_998, 1_499_999_999]),
            ([edge, edge + 1], 9, 1, [INT32_MAX, -1, -1, -1]),
            *[([0, 1], 9, request, [-1, -1, -1, -1]) for request in (2, 3)],
            **far,
        ),
        case(
            "window rows at the edge of int32",
            [(10, 10)] * 2,
            *(([], 9, 0, [8, 9]), ([], 8, 1, [INT32_MAX, -1]), ([], 9, 1, [-1, -1])),
            topk=0,
            workspace_rows=2_147_483_640,
            swa_offset=0,
            **pair,
        ),
        case(
            "a workspace of 2^30 rows",  # 4 * 2^30 is 0 in int32
            [(2, 2)] * 5,
            ([3, 2], 1, 0, [3, 2, 8, 9]),
            *[([3, 2], 1, request, [-1] * 4) for request in (2, 4)],
            workspace_rows=2**30,
            **pair,
        ),
        case(
            "lengths whose difference is beyond int32",
            [(INT32_MIN, INT32_MAX), (INT32_MAX, INT32_MIN), (INT32_MIN, INT32_MIN)],
            *[([0, 1], 5, r, [20 * r, 20 * r + 1, -1, -1]) for r in range(3)],
            ([0, 1], LAST_POSITION, 0, [0, 1, -1, -1]),
            **pair,
        ),
        case(
            "lengths below zero, and nothing gathered",
            [(-5, -5), (2, -1), (-3, 1), (2, 0), (0, 0)],
            *[([0, 1], 1, r, [20 * r, 20 * r + 1, -1, -1]) for r in range(4)],
            ([0, 1], 0, 4, [80, -1]),
            **pair,
        ),
        case(
            "more gathered than there is",
            [(3, 5), (0, 3)],
            *(([0, 1], 1, 0, [0, 1, 10, 11]), ([0, 1], 2, 0, [0, 1, 11, 12])),
            ([0, 1], 0, 1, [20, -1]),
            **pair,
        ),
        case(
            "the last position there is",
            [(INT32_MAX, 3), (INT32_MAX, INT32_MAX)],
            ([0, -1], LAST_POSITION, 0, [0, -1, 9, 10]),
            ([0, -1], LAST_POSITION, 1, [20, -1, -1, -1]),
            ([0, -1], INT32_MAX, 0, []),
            **pair,
        ),
        case(
            "the last position there is, all gathered",
            [(INT32_MAX, INT32_MAX)],
            ([], LAST_POSITION, 0, [INT32_MAX - 2, INT32_MAX - 1]),
            topk=0,
            workspace_rows=INT32_MAX,
            swa_offset=0,
            **pair,
        ),
        case(
            "rows of 128 positions",
            [(256, 129)],
            *(([0, 1], 126, 0, [-1, -1]), ([0, 1], 127, 0, [0, -1, 8])),
            *(([0, 1], 255, 0, [0, 1, 135, 136]), ([0, 1], 100_000, 0, [0, 1, -1, -1])),
            window_size=2,
            compress_ratio=128,
            workspace_rows=137,
        ),
        case(
            "no such token",
            [(6, 6)] * 2,
            ([0, 1], 5, 1, [20, 21, 32, 33]),
            *[([0, 1], 5, request, []) for request in (2, *BAD_REQUESTS)],
            *[([0, 1], position, 0, []) for position in BAD_POSITIONS],
            **pair,
        ),
        case(
            "512 + 128 columns are 640",
            [(5001, 128)],
            ([*range(512)], 5000, 0, full),
            topk=512,
            window_size=128,
            **wide,
        ),
        case(
            "123 + 5 columns are 128",
            [(5001, 5)],
            ([*range(123)], 5000, 0, few),
            topk=123,
            window_size=5,
            **wide,
        ),
        case(
            "124 + 5 columns are 256",
            [(5001, 5)],
            ([*range(124)], 5000, 0, [*few[:123], 123, *few[123:]]),
            topk=124,
            window_size=5,
            **wide,
        ),
        case("no token", [(6, 6)]),
        case("no request", [], ([0, 1], 5, 0, []), ([0, 1], 0, -1, [])),
    ]


def _selected(draw: Draw, num_tokens: int, columns: int, high: int) -> Tensor:
    shape, seed = (num_tokens, columns), draw.generator()
    selected = torch.randint(-2, high, shape, generator=seed, dtype=torch.int32)
    draw.spoil(selected, (-1, -(2**31), 2**31 - 1, 63, 64), 4)
    return selected


def _combine_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size)
    extra = draw.one_of(0, 0, 1, 3)
    columns = max(settings["topk"] + extra, min_size)
    selected = _selected(draw, batch.num_tokens, columns, 300)
    gather_lens = batch.seq_lens.clone()
    for request in range(gather_lens.shape[0]):
        gather_lens[request] = min(int(gather_lens[request]), draw.one_of(0, 3, 17, 140, 2**31 - 1))
    if gather_lens.shape[0] and draw.flag():
        gather_lens[0] = draw.one_of(-1, -(2**31), 2**31 - 1)
    tensors = (selected, batch.positions, batch.req_indices, batch.seq_lens, gather_lens)
    return Case("sampled", tensors, settings)


combine_topk_swa_indices = OpTesting(
    cases=_combine_cases,
    settings=(
        {**_COMBINE, "window_size": 128, "topk": 16, "workspace_rows": 400, "swa_offset": 200},
        _COMBINE,
        {**_COMBINE, "topk": 0, "swa_offset": 0},
        {**_COMBINE, "compress_ratio": 128, "workspace_rows": 2**30, "window_size": 200},
        {**_COMBINE, "compress_ratio": 1, "topk": 125, "workspace_rows": 1},
    ),
    make=_combine_call,
)

_MIXED: dict[str, Any] = {
    "swa_block_size": 64,
    "compressed_block_size": 64,
    "window_size": 4,
    "compress_ratio": 4,
    "topk": 2,
    "decode_compressed_indices_are_local": False,
    "swa_block_span": None,
    "compressed_block_span": None,
}


_Token = tuple[Any, int, int, tuple[list[int], list[int]] | None]
"""A token: arguments that only decodes or only prefills have, position, request, and the expected
slots of the window and of compressed rows."""
_SLOTS, _AWAY = [30, 31, 12, -1], [-1, -1, -1]


def _decode(
    entries: list[int] | None,
    slots: list[int] | None,
    length: int | None = None,
    *,
    at: tuple[int, int] = (5, 0),
    swa: list[int] = _SLOTS,
    window: list[int] = _SLOTS,
) -> _Token:
    """Make a decode token. ``slots`` are the expected slots of compressed rows, one for each column
    in the expected length; None if the token does not exist."""
    return (swa, entries, length), *at, None if slots is None else (window, slots)


def _prefill(
    selected: list[int],
    position: int,
    request: int,
    window: list[int] | None = None,
    slots: list[int] | None = None,
) -> _Token:
    return selected, position, request, None if window is None else (window, slots or [])


def _mixed_case(
    name: str,
    *tokens: _Token,
    tables: tuple[list[list[int]], list[list[int]] | None] = (
        [[7, 3], [2, 5]],
        [[10, 11], [12, 13]],
    ),
    local: bool = False,
    **changed: int,
) -> Case:
    settings = {**_MIXED, "swa_block_size": 4, "compressed_block_size": 2, "window_size": 3}
    settings |= {"decode_compressed_indices_are_local": local, **changed}
    decodes = [token[0] for token in tokens if isinstance(token[0], tuple)]
    selected = [token[0] for token in tokens[len(decodes) :]]
    swa, compressed, lens = ([given[index] for given in decodes] for index in range(3))
    tensors = (
        i32(swa) if swa else i32([]).reshape(0, 4),
        None if None in compressed else _table(compressed),
        None if None in lens else i32(lens),
        i32(selected) if selected else i32([]).reshape(0, settings["topk"]),
        i64([token[1] for token in tokens]),
        i32([token[2] for token in tokens]),
        _table(tables[0]),
        None if tables[1] is None else _table(tables[1]),
    )
    width, columns = tensors[0].shape[1], settings["topk"]
    if tensors[1] is not None:
        columns = max(columns, tensors[1].shape[1])
    columns = -(-columns // 4) * 4
    rows, counts = [], []
    for *_, slots in tokens:
        window, more = slots or ([], [])
        rows += [_padded([window], width)[0] + _padded([more], columns)[0]]
        counts.append(width + len(more) if slots else 0)
    return Case(name, tensors, settings, (rows, counts))


def _mixed_cases() -> list[Case]:
    case, decode, prefill = _mixed_case, _decode, _prefill
    last = prefill([1, 0], 7, 1, [21, 22, 23], [25, 24])
    eight, far = [1, 2, 3, 4, 5, 6, 7, 8], 2**30
    nothing: tuple[list[int] | None, ...] = (None, [])
    return [
        case(
            "decodes and a prefill",
            decode([20, -1, 21], [20, -1], 2),
            decode(
                [24, 25, -1], [24, 25, -1], 3, at=(6, 1), swa=[8, -1, 9, 1], window=[8, -1, 9, 1]
            ),
            last,
        ),
        case(
            "slots without lens",
            *(decode([20, -1, 21], [20, -1, 21]), decode(_AWAY, _AWAY, at=(0, 1))),
            prefill([1, 0], 3, 0, [29, 30, 31], [21]),
        ),
        case(
            "rows of the request",
            decode([1, -1, 3], [21, -1, 23]),
            decode([2, 4, -1], [26], at=(0, 1)),
            *(decode(_AWAY, []), decode([4, 5, INT32_MAX], [])),
            decode([INT32_MIN, 3, -2], [-1, 23]),
            decode([INT32_MAX, 4, 0], [-1, -1, 20]),
            prefill([1, 3], 7, 1, [21, 22, 23], [25, 27]),
            prefill([-1, 3], 7, 0, [13, 14, 15], [-1, 23]),
            prefill([4, 0], 7, 0, [13, 14, 15], [-1, 20]),
            prefill([INT32_MAX, INT32_MIN], 7, 0, [13, 14, 15], [-1, -1]),
            local=True,
        ),
        case(
            "rows of the request with lens",
            *(decode([1, -1, 3], [21], 1), decode([1, -1, 3], [21, -1], 2)),
            decode([2, 4, -1], [26, -1, -1], 3, at=(0, 1)),
            *(decode([2, 1, 0], [], 0), decode([2, 1, 0], [], -1)),
            decode([2, 1, 0], [22, 21, 20], INT32_MAX),
            local=True,
        ),
        case(
            "adversarial lens",
            *[decode([20, 21, -1], [20, 21, -1], length) for length in (4, INT32_MAX)],
            *[decode([20, 21, -1], [], length) for length in (-1, INT32_MIN)],
        ),
        case(
            "adversarial slots",
            decode([-2], [-1], swa=[INT32_MIN, INT32_MAX, 0, -7], window=[-1, INT32_MAX, 0, -1]),
            *(decode([INT32_MIN], [-1]), decode([INT32_MAX], [INT32_MAX])),
        ),
        case(
            "one table for both",
            decode([1, 3, -1], [15, 7]),
            prefill([1, 0], 7, 1, [21, 22, 23], [5, 4]),
            tables=([[7, 3], [2, 5]], None),
            local=True,
        ),
        case(
            "prefills around window, page and table",
            prefill([1, 0], 0, 0, [28]),
            prefill([1, 0], 2, 0, [28, 29, 30]),
            prefill([1, 0], 3, 0, [29, 30, 31], [21]),
            prefill([1, 0], 4, 0, [30, 31, 12], [21]),
            prefill([1, 0], 7, 0, [13, 14, 15], [21, 20]),
            prefill([1, 0], 8, 0, [14, 15, -1], [21, 20]),
            prefill([1, 0], 100, 0, _AWAY, [21, 20]),
        ),
        case(
            "more prefill columns than topk",
            *(prefill([1, 0, 3, 2], 11, 1, _AWAY, [25, 24]), prefill([0] * 4, 1, 1, [8, 9])),
        ),
        case(
            "topk wider than the decode columns",
            decode([20, 21, 22], [20, 21, 22]),
            prefill([0, 1, 2, 3, 4], 50, 0, _AWAY, [20, 21, 22, 23, -1]),
            topk=5,
        ),
        case(
            "decode columns wider than topk",
            *(decode([9, 8, 7, 6, 5], [9, 8, 7, 6, 5]), prefill([3], 50, 0, _AWAY, [23])),
            topk=1,
        ),
        case("no compressed decodes", decode(None, []), last),
        case("compressed decodes of no column", decode([], [], 3), last),
        *[
            case(
                f"windows only, {local=}, {entries=}",
                *(decode(entries, []), prefill([], 7, 1, [21, 22, 23])),
                topk=0,
                local=local,
            )
            for local in (False, True)
            for entries in nothing
        ],
        case("no topk", decode([6], [6]), prefill([1], 7, 1, [21, 22, 23]), topk=0),
        case("more window columns than window", decode([9], [9], swa=eight, window=eight), last),
        case(
            "as many window columns as window",
            *(decode([9], [9]), prefill([1, 0], 7, 1, [20, 21, 22, 23], [25, 24])),
            window_size=4,
        ),
        case(
            "tables without columns",
            *(decode([0, 1], []), prefill([0, 1], 7, 1, _AWAY, [-1, -1])),
            tables=([[], []], [[], []]),
            local=True,
        ),
        case(
            "a column past the row is not the next row",
            decode([1, 2, 0], [21, -1, 20]),
            prefill([2, 0], 5, 0, [31, -1, -1], [-1]),
            prefill([2, 0], 7, 1, _AWAY, [-1, 24]),
            tables=([[7], [2]], [[10], [12]]),
            local=True,
        ),
        case(
            "pages absent or beyond int32",  # 2^31 / 4 and 2^31 / 2 blocks fit into int32
            decode([0, 3, 1], [-1, 1], at=(5, 1)),
            prefill([0, 2], 7, 0, _AWAY, [-1, INT32_MAX - 1]),
            prefill([0, 3], 7, 1, [INT32_MAX - 2, INT32_MAX - 1, INT32_MAX], [-1, 1]),
            prefill([0, 3], 3, 1, _AWAY, [-1]),
            tables=(
                [[-1, INT32_MIN], [536_870_912, 536_870_911]],
                [[-1, 1_073_741_823], [1_073_741_824, 0]],
            ),
            local=True,
        ),
        case(
            "spans",
            decode([21, -1, 20], [51, -1, 50], swa=[130, 63, 64, -1], window=[148, 63, 73, -1]),
            prefill([1, 3], 65, 0, [574, 219, 220], [51, 56]),
            prefill([1, 3], 65, 1, [209, 365, 366], [61, 66]),
            swa_block_size=64,
            swa_block_span=73,
            compressed_block_span=5,
        ),
        case(
            "a span of local rows only",
            *(decode([1, -1, 3], [51, -1, 56]), prefill([1, 0], 7, 1, [21, 22, 23], [61, 60])),
            compressed_block_span=5,
            local=True,
        ),
        case(
            "the span of a page that fits only in part",
            decode([2], [INT32_MAX], swa=[4, 5, 3, -1], window=[INT32_MAX, -1, 3, -1]),
            swa_block_span=INT32_MAX,
            compressed_block_span=INT32_MAX,
        ),
        case(
            "spans beyond int32",
            decode([1, 2, 4], [1, far, -1], 3, swa=[3, 4, 8, 16], window=[3, far, -1, -1]),
            decode(
                *([8, 3, 3], [-1, far + 1], 2),
                swa=[7, INT32_MAX, 0, -1],
                window=[far + 3, -1, 0, -1],
            ),
            prefill([1, 2], 8, 0, [far + 2, far + 3, -1], [far + 1, -1]),
            tables=([[0, 1, 2]], [[1, 2]]),
            swa_block_span=far,
            compressed_block_span=far,
        ),
        case(
            "the span of the last local row beyond int32 changes no length",
            decode([1, 2, -1], [far + 1, -1]),
            tables=([[0]], [[1, 2]]),
            compressed_block_span=far,
            local=True,
        ),
        case(
            "the last position there is",
            decode([9], [9], at=(LAST_POSITION, 0)),
            prefill([1, 0], LAST_POSITION, 0, _AWAY, [21, 20]),
        ),
        case(
            "no such token",
            *[decode([1], None, 1, at=(5, request)) for request in (2, *BAD_REQUESTS)],
            *[decode([1], None, 1, at=(position, 0)) for position in BAD_POSITIONS],
            *[prefill([1, 0], 5, request) for request in (2, *BAD_REQUESTS)],
            *[prefill([1, 0], position, 0) for position in BAD_POSITIONS],
            swa_block_span=9,
            local=True,
        ),
        case("no prefill", decode([6], [6]), decode([7], [7], at=(0, 1))),
        case("no token"),
        case("no request", decode([6], None), prefill([1], 7, 0), tables=([], []), topk=1),
    ]


def _mixed_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=max(2 * min_size, 0))
    decode = draw.integer(min_size, batch.num_tokens - min_size)
    swa_width = -(-settings["window_size"] // 4) * 4 + (0 if min_size else draw.one_of(0, 4))
    swa = _selected(draw, decode, swa_width, 5000)
    # one width per compiled function: the number of columns is part of the layout
    columns = 5 if min_size else draw.one_of(0, 1, 5)
    compressed = _selected(draw, decode, columns, 700)
    lens = i32([draw.integer(-1, columns + 1) for _ in range(decode)])
    topk = _selected(draw, batch.num_tokens - decode, max(settings["topk"], min_size), 700)
    table = tables(draw, num_reqs=batch.seq_lens.shape[0], min_size=min_size)
    optional: list[Any] = [compressed, lens, table]
    if not min_size:
        keep = draw.integer(0, 2)
        optional[:2] = [*optional[:keep], *[None] * (2 - keep)]
        optional[2] = table if draw.flag() else None
    tensors = (swa, *optional[:2], topk, batch.positions, batch.req_indices, batch.block_table)
    return Case("sampled", (*tensors, optional[2]), settings)


mixed_sparse_indices = OpTesting(
    cases=_mixed_cases,
    settings=(
        {**_MIXED, "window_size": 128, "topk": 16, "swa_block_span": 73},
        {**_MIXED, "decode_compressed_indices_are_local": True},
        {**_MIXED, "compressed_block_span": 66, "window_size": 7, "swa_block_size": 3},
        {**_MIXED, "compress_ratio": 128, "topk": 0, "compressed_block_size": 2},
        {**_MIXED, "compress_ratio": 1, "topk": 20},
    ),
    make=_mixed_call,
)

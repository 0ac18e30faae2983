"""Cases and strategies of the batch stages."""

from __future__ import annotations

from typing import Any

from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.testing.case import Case, OpTesting, i32
from dsv4_ops.testing.strategies.batches import BAD_REQUESTS, INT32_MIN, calls_of, ragged_batch
from dsv4_ops.testing.strategies.draw import Draw


def _split_cases() -> list[Case]:
    calls: list[tuple[str, list[int], int, bool, list[int]]] = [
        ("ragged", [0, 2, 4, 5, 12], 2, False, [3, 1, 5, 7]),
        ("ragged, uniform", [0, 2, 4, 5, 12], 2, True, [2, 2, 4, 8]),
        ("padding requests are decodes", [0, 2, 4, 4, 4], 2, True, [4, 0, 4, 0]),
        ("empty request first", [0, 0, 2, 3, 5], 2, True, [2, 2, 2, 3]),
        ("empty request between", [0, 2, 2, 4, 7], 2, True, [3, 1, 4, 3]),
        ("prefill first", [0, 5, 6], 2, False, [0, 2, 0, 6]),
        ("uniform but too long", [0, 3, 6], 2, True, [0, 2, 0, 6]),
        ("too long after an empty one", [0, 0, 3, 6], 2, True, [1, 2, 0, 6]),
        ("longer, uniform", [0, 1, 2, 4], 2, True, [2, 1, 2, 2]),
        ("longer, within the threshold", [0, 1, 2, 4], 2, False, [3, 0, 4, 0]),
        ("shorter", [0, 2, 3, 5], 2, True, [1, 2, 2, 3]),
        ("a decode after a prefill is a prefill", [0, 1, 6, 7], 1, False, [1, 2, 1, 6]),
        ("at the threshold", [0, 4], 4, False, [1, 0, 4, 0]),
        ("above the threshold", [0, 5], 4, False, [0, 1, 0, 5]),
        ("nothing but padding", [0, 0, 0, 0], 1, False, [3, 0, 0, 0]),
        ("nothing but padding, uniform", [0, 0, 0, 0], 1, True, [3, 0, 0, 0]),
        ("no request", [0], 2, False, [0, 0, 0, 0]),
        ("no request, uniform", [0], 1, True, [0, 0, 0, 0]),
        ("a start that decreases counts as empty", [0, 2, 1, 2], 2, False, [3, 0, 2, 0]),
    ]
    return [
        Case(
            name,
            (i32(starts),),
            {"decode_threshold": threshold, "require_uniform": uniform},
            (expected,),
        )
        for name, starts, threshold, uniform, expected in calls
    ]


split_decodes_and_prefills = OpTesting(
    cases=_split_cases,
    settings=tuple(
        {"decode_threshold": threshold, "require_uniform": uniform}
        for threshold in (2, 1, 4)
        for uniform in (True, False)
    ),
    make=calls_of("query_start_loc"),
)

_WORKED = ([0, 3, 4, 8, 8], [10, 7, 12, 0])
_REQUESTS = [0, 0, 0, 1, 2, 2, 2, 2, -1, -1]


def _token_map_cases() -> list[Case]:
    positions, last = [7, 8, 9, 6, 8, 9, 10, 11, -1, -1], [2_147_483_645, 2_147_483_646]
    # name, query_start_loc, seq_lens, requests, positions
    calls: list[tuple[str, list[int], list[int], list[int], list[int]]] = [
        ("worked example", *_WORKED, _REQUESTS, positions),
        ("batch cut off", *_WORKED, _REQUESTS[:5], positions[:5]),
        ("no padding", *_WORKED, _REQUESTS[:8], positions[:8]),
        ("empty requests", [0, 0, 2, 2, 2, 3], [5, 2, 0, 9, 4], [1, 1, 4], [0, 1, 3]),
        ("more queries than tokens", [0, 2, 6], [2, 9], [0, 0, 1, 1], [0, 1, 5, 6]),
        ("starts late", [2, 4], [7], [-1, -1, 0, 0, -1], [-1, -1, 5, 6, -1]),
        ("shorter than its query", [0, 3], [2], [-1, 0, 0], [-1, 0, 1]),
        ("padding request with tokens", [0, 2, 3], [0, 5], [-1, -1, 1], [-1, -1, 4]),
        ("negative length", [0, 2, 3], [-3, 1], [-1, -1, 1], [-1, -1, 0]),
        ("least length", [0, 2], [INT32_MIN], [-1, -1], [-1, -1]),
        ("greatest length", [0, 2], [INT32_MAX], [0, 0], last),
        ("greatest query", [0, INT32_MAX], [INT32_MAX], [0, 0, 0], [0, 1, 2]),
        ("one token", [0, 1], [1], [0], [0]),
        ("only padding", [0, 0, 0], [0, 0], [-1, -1], [-1, -1]),
        ("no token", [0, 2], [4], [], []),
        ("no request", [0], [], [-1, -1], [-1, -1]),
    ]
    return [
        Case(name, (i32(starts), i32(lens)), {"num_tokens": len(requests)}, (requests, positions))
        for name, starts, lens, requests, positions in calls
    ]


def _token_map_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size)
    settings = {**settings, "num_tokens": batch.num_tokens}
    return Case("sampled", (batch.query_start_loc, batch.seq_lens), settings)


token_map = OpTesting(cases=_token_map_cases, settings=({},), make=_token_map_call)


def _flatten_cases() -> list[Case]:
    # name, query_start_loc, seq_lens, compress_ratio, lengths, requests
    calls: list[tuple[str, list[int], list[int], int, list[int], list[int]]] = [
        ("variable", *_WORKED, 1, [8, 9, 10, 7, 9, 10, 11, 12, 0, 0], _REQUESTS),
        ("compressed", *_WORKED, 4, [2, 2, 2, 1, 2, 2, 2, 3, 0, 0], _REQUESTS),
        ("uniform, padded", [0, 2, 4, 4], [10, 7, 0], 1, [9, 10, 6, 7, 0], [0, 0, 1, 1, -1]),
        ("around one row", [0, 5], [5], 4, [0, 0, 0, 1, 1], [0] * 5),
        ("around 128", [0, 2, 3], [128, 127], 128, [0, 1, 0], [0, 0, 1]),
        ("shorter than its query", [0, 2, 4], [1, 0], 1, [0, 1, 0, 0], [-1, 0, -1, -1]),
        ("greatest length", [0, 1], [INT32_MAX], 1, [INT32_MAX], [0]),
        ("least length", [0, 1], [INT32_MIN], 4, [0], [-1]),
        ("no token", [0, 2], [4], 4, [], []),
        ("no request", [0], [], 4, [0, 0], [-1, -1]),
    ]
    return [
        Case(
            name,
            (i32(starts), i32(seq_lens)),
            {"num_tokens": len(requests), "compress_ratio": ratio},
            (lens, requests),
        )
        for name, starts, seq_lens, ratio, lens, requests in calls
    ]


flatten_decode = OpTesting(
    cases=_flatten_cases,
    settings=({"compress_ratio": 4}, {"compress_ratio": 1}, {"compress_ratio": 128}),
    make=_token_map_call,
)


def _expand_cases() -> list[Case]:
    table, two = [[7, -1], [INT32_MAX, -7], [0, 5]], i32([]).reshape(0, 2)
    requests = i32([1, 0, 2, 1, 3, *BAD_REQUESTS])
    rows = [table[1], table[0], table[2], table[1], *[[0, 0]] * 6]
    return [
        Case(
            "padding rows are 0, entries are not interpreted", (i32(table), requests), {}, (rows,)
        ),
        Case("no token", (i32(table), i32([])), {}, ([],)),
        Case("no request", (two, i32([0, -1])), {}, ([[0, 0], [0, 0]],)),
        Case("no column", (i32([[], []]), i32([0, 1, 5])), {}, ([[], [], []],)),
    ]


expand_block_table = OpTesting(
    cases=_expand_cases, settings=({},), make=calls_of("block_table", "req_indices")
)


def _mtp_cases() -> list[Case]:
    ragged, compressed = [[8, 9, 10, 0], [7, 0, 0, 0], [9, 10, 11, 12], [0] * 4], [2, 2, 2, 3]
    # name, query_start_loc, seq_lens, next_n, compress_ratio, lengths
    calls: list[tuple[str, list[int], list[int], int, int, list[list[int]]]] = [
        ("shorter than next_n", [0, 2, 3, 3], [10, 7, 0], 2, 1, [[9, 10], [7, 0], [0, 0]]),
        ("compressed", [0, 2, 3, 3], [10, 7, 0], 2, 4, [[2, 2], [1, 0], [0, 0]]),
        ("uniform", [0, 2, 4, 6], [10, 7, 0], 2, 1, [[9, 10], [6, 7], [0, 0]]),
        ("ragged", *_WORKED, 4, 1, ragged),
        ("ragged, compressed", *_WORKED, 4, 4, [[2, 2, 2, 0], [1, 0, 0, 0], compressed, [0] * 4]),
        ("longer than next_n", [0, 3, 4, 8], [10, 7, 12], 2, 1, [[8, 9], [7, 0], [9, 10]]),
        ("shorter than its query", [0, 3], [2], 3, 1, [[0, 1, 2]]),
        ("empty request", [0, 0, 1], [9, 3], 2, 1, [[0, 0], [3, 0]]),
        ("least length", [0, 1], [INT32_MIN], 2, 1, [[0, 0]]),
        ("greatest length", [0, 2], [INT32_MAX], 3, 1, [[INT32_MAX - 1, INT32_MAX, 0]]),
        ("a start that decreases", [0, 2, 1, 2], [4, 4, 4], 2, 1, [[3, 4], [0, 0], [4, 0]]),
        ("no request", [0], [], 2, 1, []),
    ]
    return [
        Case(
            name,
            (i32(starts), i32(lens)),
            {"next_n": next_n, "compress_ratio": ratio},
            (expected,),
        )
        for name, starts, lens, next_n, ratio, expected in calls
    ]


mtp_seq_lens = OpTesting(
    cases=_mtp_cases,
    settings=tuple(
        {"next_n": n, "compress_ratio": ratio} for n in (4, 1, 2) for ratio in (4, 1, 128)
    ),
    make=calls_of("query_start_loc", "seq_lens"),
)

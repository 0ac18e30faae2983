"""Cases and strategies of the batch stages."""

from __future__ import annotations

from typing import Any

from dsv4_ops.testing.case import Case, OpTesting, i32
from dsv4_ops.testing.strategies.batches import calls_of, ragged_batch
from dsv4_ops.testing.strategies.draw import Draw


def _split_cases() -> list[Case]:
    ragged, padded = i32([0, 2, 4, 5, 12]), i32([0, 2, 4, 4, 4])
    one_by_one = {"decode_threshold": 2, "require_uniform": False}
    uniform = {"decode_threshold": 2, "require_uniform": True}
    return [
        Case("ragged", (ragged,), one_by_one, ([3, 1, 5, 7],)),
        Case("ragged, uniform", (ragged,), uniform, ([2, 2, 4, 8],)),
        Case("padding requests are decodes", (padded,), uniform, ([4, 0, 4, 0],)),
        Case("prefill first", (i32([0, 5, 6]),), one_by_one, ([0, 2, 0, 6],)),
        Case("no request", (i32([0]),), one_by_one, ([0, 0, 0, 0],)),
        Case("empty request first", (i32([0, 0, 2, 3, 5]),), uniform, ([2, 2, 2, 3],)),
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

_QUERY_START_LOC, _SEQ_LENS = [0, 3, 4, 8, 8], [10, 7, 12, 0]


def _token_map_cases() -> list[Case]:
    worked = (i32(_QUERY_START_LOC), i32(_SEQ_LENS))
    requests = [0, 0, 0, 1, 2, 2, 2, 2, -1, -1]
    positions = [7, 8, 9, 6, 8, 9, 10, 11, -1, -1]
    padded, three = (i32([0, 2, 3]), i32([0, 5])), {"num_tokens": 3}
    return [
        Case("worked example", worked, {"num_tokens": 10}, (requests, positions)),
        Case("batch cut off", worked, {"num_tokens": 5}, (requests[:5], positions[:5])),
        Case("shorter than its query", (i32([0, 3]), i32([2])), three, ([-1, 0, 0], [-1, 0, 1])),
        Case("padding request with tokens", padded, three, ([-1, -1, 1], [-1, -1, 4])),
        Case("no request", (i32([0]), i32([])), {"num_tokens": 2}, ([-1, -1], [-1, -1])),
    ]


def _token_map_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size)
    settings = {**settings, "num_tokens": batch.num_tokens}
    return Case("sampled", (batch.query_start_loc, batch.seq_lens), settings)


token_map = OpTesting(cases=_token_map_cases, settings=({},), make=_token_map_call)


def _flatten_cases() -> list[Case]:
    worked = (i32(_QUERY_START_LOC), i32(_SEQ_LENS))
    requests = [0, 0, 0, 1, 2, 2, 2, 2, -1, -1]
    lens, compressed = [8, 9, 10, 7, 9, 10, 11, 12, 0, 0], [2, 2, 2, 1, 2, 2, 2, 3, 0, 0]
    uniform, padded = (i32([0, 2, 4, 4]), i32([10, 7, 0])), {"num_tokens": 6, "compress_ratio": 1}
    rows = ([9, 10, 6, 7, 0, 0], [0, 0, 1, 1, -1, -1])
    return [
        Case("variable", worked, {"num_tokens": 10, "compress_ratio": 1}, (lens, requests)),
        Case("compressed", worked, {"num_tokens": 10, "compress_ratio": 4}, (compressed, requests)),
        Case("uniform, padded", uniform, padded, rows),
    ]


flatten_decode = OpTesting(
    cases=_flatten_cases,
    settings=({"compress_ratio": 4}, {"compress_ratio": 1}, {"compress_ratio": 128}),
    make=_token_map_call,
)


def _expand_cases() -> list[Case]:
    padded = (i32([[7, 3], [2, 5]]), i32([1, 0, -1, 2, 1]))
    rows, pages = [[2, 5], [7, 3], [0, 0], [0, 0], [2, 5]], [[-1, 2**31 - 1]]
    return [
        Case("padding rows are 0", padded, {}, (rows,)),
        Case("entries are not interpreted", (i32(pages), i32([0])), {}, (pages,)),
    ]


expand_block_table = OpTesting(
    cases=_expand_cases, settings=({},), make=calls_of("block_table", "req_indices")
)


def _mtp_cases() -> list[Case]:
    tensors = (i32([0, 2, 3, 3]), i32([10, 7, 0]))
    two, rows, compressed = {"next_n": 2}, [[9, 10], [7, 0], [0, 0]], [[2, 2], [1, 0], [0, 0]]
    return [
        Case("shorter than next_n", tensors, {**two, "compress_ratio": 1}, (rows,)),
        Case("compressed", tensors, {**two, "compress_ratio": 4}, (compressed,)),
    ]


mtp_seq_lens = OpTesting(
    cases=_mtp_cases,
    settings=tuple(
        {"next_n": n, "compress_ratio": ratio} for n in (4, 1, 2) for ratio in (4, 1, 128)
    ),
    make=calls_of("query_start_loc", "seq_lens"),
)

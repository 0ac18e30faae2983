"""Cases and strategies of window, top-k and sparse index building."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.strategies.batches import calls_of, ragged_batch, tables
from dsv4_ops.testing.strategies.draw import Draw


def _case_of_rows(
    settings: dict[str, Any],
    name: str,
    places: Tensor,
    requests: list[int],
    table: list[list[int]],
    rows: list[list[int]],
    lens: list[int],
) -> Case:
    """Make a call with positions or selected rows, requests and a block table."""
    return Case(name, (places, i32(requests), i32(table)), settings, (rows, lens))


def _window_cases() -> list[Case]:
    case, table = partial(_case_of_rows, {"block_size": 4, "window_size": 4}), [[7, 3], [2, 5]]
    holes = [[7, 3], [-1, 5], [2, 2**31 - 1]]
    rows = [[30, 31, 12, 13], [8, 9, -1, -1], [8, 9, 10, -1]]
    slots = [[14, 15, -1, -1], [-1, -1, 20, 21], [10, 11, -1, -1]]
    name = "holes: past the table, no page, no int32 slot"
    return [
        case("worked example", i64([5, 1, 2]), [0, 1, 1], table, rows, [4, 2, 3]),
        case("padding rows are cleared", i64([-1, 5]), [0, -1], table, [[-1] * 4] * 2, [0, 0]),
        case(name, i64([9, 5, 5]), [0, 1, 2], holes, slots, [4, 4, 4]),
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
    tensors = (i32([0, 2, 4, 7, 7]), i32([9, 6, 3, 0]))
    return [Case("worked example", tensors, {"window_size": 4}, ([5, 5, 3, 0],))]


prefill_gather_lens = OpTesting(
    cases=_gather_cases,
    settings=({"window_size": 128}, {"window_size": 4}, {"window_size": 1}),
    make=calls_of("query_start_loc", "seq_lens"),
)


def _topk_cases() -> list[Case]:
    case = partial(_case_of_rows, {"block_size": 64})
    first, name = i32([[0, 64, -1, -1]]), "page 0 is a page, holes stay where they are"
    selected, table = i32([[-1, 0, 128, -1], [63, 64, 65, 0]]), [[0, 4], [3, -1]]
    slots = [[-1, 0, -1, -1], [255, -1, -1, 192]]
    return [
        case("worked example", first, [0], [[10, 11]], [[640, 704, -1, -1]], [2]),
        case(name, selected, [0, 1], table, slots, [2, 4]),
        case("requests that do not exist", i32([[1], [2]]), [-1, 7], [[10]], [[-1]] * 2, [0, 0]),
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


def _dense_cases() -> list[Case]:
    case = partial(_case_of_rows, {"block_size": 2, "compress_ratio": 128, "max_compressed": 4})
    positions, absent = i64([383, 126, -1, 10**6]), [-1] * 4
    rows = [[8, 9, 18, -1], absent, absent, [8, 9, 18, 19]]
    past = ([0, 1], [[4], [-1]], [[8, 9, -1, -1], absent], [4, 4])
    return [
        case("three rows, two pages", positions, [0] * 4, [[4, 9]], rows, [3, 0, 0, 4]),
        case("past the table and on no page", i64([511, 511]), *past),
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


def _padded(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows]


def _combine_cases() -> list[Case]:
    topk = i32([[1, 0], [0, 1], [0, -1], [0, -1], [0, 1]])
    positions, requests = i64([7, 8, 4, 5, 9]), i32([0, 0, 1, 1, -1])
    rows = [
        [1, 0, 8, 9, 10, 11],
        [0, 1, 9, 10, 11, 12],
        [20, 28, 29, 30, 31],
        [20, 29, 30, 31, 32],
        [],
    ]
    lens = (i32([9, 6]), i32([5, 5]))
    return [
        Case(
            "worked example, and padding",
            (topk, positions, requests, *lens),
            _COMBINE,
            (_padded(rows, 128), [6, 6, 5, 5, 0]),
        ),
        Case(
            "holes: no such row, not gathered, past the workspace",
            (i32([[8, -1], [0, 1]]), i64([7, 7]), i32([0, 1]), i32([9, 9]), i32([3, 9])),
            {**_COMBINE, "workspace_rows": 14},
            (_padded([[-1, -1, -1, -1, 8, 9], [14, 15, 26, 27, -1, -1]], 128), [6, 6]),
        ),
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

_MIXED = {
    "swa_block_size": 64,
    "compressed_block_size": 64,
    "window_size": 4,
    "compress_ratio": 4,
    "topk": 2,
    "decode_compressed_indices_are_local": False,
    "swa_block_span": None,
    "compressed_block_span": None,
}


def _mixed_cases() -> list[Case]:
    swa, topk = i32([[130, 131, -1, -1]]), i32([[1, 0]])
    batch = (i64([5, 7]), i32([0, 1]), i32([[7, 3], [2, 5]]))
    compressed = i32([[65, 640, -1]])
    spans = {**_MIXED, "swa_block_span": 73}
    local = {**_MIXED, "decode_compressed_indices_are_local": True}
    window = [132, 133, 134, 135]
    return [
        Case(
            "no compressed rows, packed pages",
            (swa, None, None, topk, *batch, None),
            spans,
            ([[148, 149, -1, -1, -1, -1, -1, -1], [150, 151, 152, 153, 129, 128, -1, -1]], [4, 6]),
        ),
        Case(
            "slots",
            (swa, compressed, i32([2]), topk, *batch, i32([[9], [8]])),
            {**_MIXED, "compressed_block_span": 100},
            ([[130, 131, -1, -1, 101, 1000, -1, -1], [*window, 801, 800, -1, -1]], [6, 6]),
        ),
        Case(
            "rows of the request",
            (swa, compressed, None, topk, *batch, i32([[9, 4], [8, 4]])),
            local,
            ([[130, 131, -1, -1, 257, -1, -1, -1], [*window, 513, 512, -1, -1]], [5, 6]),
        ),
        Case(
            "padding",
            (swa, compressed, None, topk, i64([-1, 7]), i32([0, 2]), batch[2], None),
            _MIXED,
            ([[-1] * 8, [-1] * 8], [0, 0]),
        ),
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
    ),
    make=_mixed_call,
)

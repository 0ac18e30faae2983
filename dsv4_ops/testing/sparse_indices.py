"""Cases and strategies of the index matrices that mix compressed rows and window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, OpTesting, i32, i64

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
            (
                _padded([[-1, -1, -1, -1, 8, 9], [14, 15, 26, 27, -1, -1]], 128),
                [6, 6],
            ),
        ),
    ]


def _selected(draw: Any, num_tokens: int, columns: int, high: int) -> Tensor:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator

    selected = torch.randint(
        -2, high, (num_tokens, columns), generator=generator(draw), dtype=torch.int32
    )
    if selected.numel():
        for entry in draw(st.lists(st.integers(0, selected.numel() - 1), max_size=4)):
            selected.view(-1)[entry] = draw(st.sampled_from((-1, -(2**31), 2**31 - 1, 63, 64)))
    return selected


def _combine_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.batches import batches

    batch = draw(batches(min_size=min_size))
    extra = draw(st.sampled_from((0, 0, 1, 3)))
    columns = max(settings["topk"] + extra, min_size)
    selected = _selected(draw, batch.num_tokens, columns, 300)
    gather_lens = batch.seq_lens.clone()
    for request in range(gather_lens.shape[0]):
        gather_lens[request] = min(
            int(gather_lens[request]), draw(st.sampled_from((0, 3, 17, 140, 2**31 - 1)))
        )
    if gather_lens.shape[0] and draw(st.booleans()):
        gather_lens[0] = draw(st.sampled_from((-1, -(2**31), 2**31 - 1)))
    tensors = (selected, batch.positions, batch.req_indices, batch.seq_lens, gather_lens)
    return Case("drawn", tensors, settings)


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
            (
                [[148, 149, -1, -1, -1, -1, -1, -1], [150, 151, 152, 153, 129, 128, -1, -1]],
                [4, 6],
            ),
        ),
        Case(
            "slots",
            (swa, compressed, i32([2]), topk, *batch, i32([[9], [8]])),
            {**_MIXED, "compressed_block_span": 100},
            (
                [[130, 131, -1, -1, 101, 1000, -1, -1], [*window, 801, 800, -1, -1]],
                [6, 6],
            ),
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


def _mixed_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.batches import batches, tables

    batch = draw(batches(min_size=max(2 * min_size, 0)))
    decode = draw(st.integers(min_size, batch.num_tokens - min_size))
    swa_width = -(-settings["window_size"] // 4) * 4 + (
        0 if min_size else draw(st.sampled_from((0, 4)))
    )
    swa = _selected(draw, decode, swa_width, 5000)
    # one width per compiled function: the number of columns is part of the layout
    columns = 5 if min_size else draw(st.sampled_from((0, 1, 5)))
    compressed = _selected(draw, decode, columns, 700)
    lens = i32([draw(st.integers(-1, columns + 1)) for _ in range(decode)]).reshape(decode)
    topk = _selected(draw, batch.num_tokens - decode, max(settings["topk"], min_size), 700)
    table = draw(tables(num_reqs=batch.seq_lens.shape[0], min_size=min_size))
    optional: list[Any] = [compressed, lens, table]
    if not min_size:
        keep = draw(st.integers(0, 2))
        optional[:2] = [*optional[:keep], *[None] * (2 - keep)]
        optional[2] = table if draw(st.booleans()) else None
    tensors = (swa, *optional[:2], topk, batch.positions, batch.req_indices, batch.block_table)
    return Case("drawn", (*tensors, optional[2]), settings)


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

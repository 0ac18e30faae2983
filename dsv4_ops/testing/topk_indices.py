"""Cases and strategies of the compressed-index stages."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_ops.testing.case import Case, OpTesting, i32, i64


def _topk_cases() -> list[Case]:
    rows = {"block_size": 64}
    return [
        Case(
            "worked example",
            (i32([[0, 64, -1, -1]]), i32([0]), i32([[10, 11]])),
            rows,
            ([[640, 704, -1, -1]], [2]),
        ),
        Case(
            "page 0 is a page, holes stay where they are",
            (i32([[-1, 0, 128, -1], [63, 64, 65, 0]]), i32([0, 1]), i32([[0, 4], [3, -1]])),
            rows,
            ([[-1, 0, -1, -1], [255, -1, -1, 192]], [2, 4]),
        ),
        Case(
            "requests that do not exist",
            (i32([[1], [2]]), i32([-1, 7]), i32([[10]])),
            rows,
            ([[-1], [-1]], [0, 0]),
        ),
    ]


def _topk_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.batches import batches

    batch = draw(batches(min_size=min_size))
    topk = max(min_size, draw(st.sampled_from((0, 1, 2, 5, 16))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    selected = torch.randint(
        -2, 700, (batch.num_tokens, topk), generator=generator, dtype=torch.int32
    )
    if selected.numel():
        for entry in draw(st.lists(st.integers(0, selected.numel() - 1), max_size=4)):
            selected.view(-1)[entry] = draw(st.sampled_from((-1, -(2**31), 2**31 - 1, 63, 64)))
    return Case("drawn", (selected, batch.req_indices, batch.block_table), settings)


global_topk_indices_and_lens = OpTesting(
    cases=_topk_cases,
    settings=({"block_size": 64}, {"block_size": 2}, {"block_size": 1}, {"block_size": 3}),
    make=_topk_call,
)


def _dense_cases() -> list[Case]:
    settings = {"block_size": 2, "compress_ratio": 128, "max_compressed": 4}
    return [
        Case(
            "three rows, two pages",
            (i64([383, 126, -1, 10**6]), i32([0, 0, 0, 0]), i32([[4, 9]])),
            settings,
            ([[8, 9, 18, -1], [-1] * 4, [-1] * 4, [8, 9, 18, 19]], [3, 0, 0, 4]),
        ),
        Case(
            "past the table and on no page",
            (i64([511, 511]), i32([0, 1]), i32([[4], [-1]])),
            settings,
            ([[8, 9, -1, -1], [-1] * 4], [4, 4]),
        ),
    ]


def _dense_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from dsv4_ops.testing.batches import batches

    batch = draw(batches(min_size=min_size))
    return Case("drawn", (batch.positions, batch.req_indices, batch.block_table), settings)


dense_compressed_indices = OpTesting(
    cases=_dense_cases,
    settings=(
        {"block_size": 2, "compress_ratio": 4, "max_compressed": 128},
        {"block_size": 2, "compress_ratio": 128, "max_compressed": 4},
        {"block_size": 1, "compress_ratio": 1, "max_compressed": 9},
        {"block_size": 3, "compress_ratio": 7, "max_compressed": 33},
    ),
    make=_dense_call,
)

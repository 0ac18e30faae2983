"""Cases and strategies of the sliding-window stages."""

from __future__ import annotations

from typing import Any

from dsv4_ops.testing.case import Case, OpTesting, i32, i64


def _window_cases() -> list[Case]:
    table = i32([[7, 3], [2, 5]])
    small = {"block_size": 4, "window_size": 4}
    return [
        Case(
            "worked example",
            (i64([5, 1, 2]), i32([0, 1, 1]), table),
            small,
            ([[30, 31, 12, 13], [8, 9, -1, -1], [8, 9, 10, -1]], [4, 2, 3]),
        ),
        Case(
            "padding rows are cleared",
            (i64([-1, 5]), i32([0, -1]), table),
            small,
            ([[-1] * 4, [-1] * 4], [0, 0]),
        ),
        Case(
            "holes: past the table, no page, no int32 slot",
            (i64([9, 5, 5]), i32([0, 1, 2]), i32([[7, 3], [-1, 5], [2, 2**31 - 1]])),
            small,
            ([[14, 15, -1, -1], [-1, -1, 20, 21], [10, 11, -1, -1]], [4, 4, 4]),
        ),
    ]


def _window_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from dsv4_ops.testing.batches import batches

    batch = draw(batches(min_size=min_size))
    return Case("drawn", (batch.positions, batch.req_indices, batch.block_table), settings)


swa_indices_and_lens = OpTesting(
    cases=_window_cases,
    settings=(
        {"block_size": 64, "window_size": 128},
        {"block_size": 4, "window_size": 4},
        {"block_size": 3, "window_size": 7},
        {"block_size": 1, "window_size": 1},
    ),
    make=_window_call,
)


def _gather_cases() -> list[Case]:
    tensors = (i32([0, 2, 4, 7, 7]), i32([9, 6, 3, 0]))
    return [Case("worked example", tensors, {"window_size": 4}, ([5, 5, 3, 0],))]


def _gather_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from dsv4_ops.testing.batches import batches

    batch = draw(batches(min_size=min_size))
    return Case("drawn", (batch.query_start_loc, batch.seq_lens), settings)


prefill_gather_lens = OpTesting(
    cases=_gather_cases,
    settings=({"window_size": 128}, {"window_size": 4}, {"window_size": 1}),
    make=_gather_call,
)

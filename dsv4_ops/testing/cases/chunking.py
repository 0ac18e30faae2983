"""Cases and strategies of the prefill chunking stages."""

from __future__ import annotations

from functools import partial
from typing import Any

from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.strategies.batches import calls_of, lengths, ragged_batch
from dsv4_ops.testing.strategies.draw import Draw, strategy_of


def _split_cases() -> list[Case]:
    worked = (i32([100, 50, 400]), i32([10, 5, 40]))
    settings = {
        "workspace_size": 160,
        "max_logits_bytes": 16000,
        "max_chunks": 6,
        "request_offset": 2,
    }
    case, none = partial(Case, settings=settings), [0] * 4
    plan = [[2, 4, 0, 15], [4, 5, 0, 10], [4, 5, 10, 20], [4, 5, 20, 30], [4, 5, 30, 40], none]
    no_keys = (i32([0, 0]), i32([3, 2]))
    return [
        case("worked example", worked, expected=(plan, [5])),
        Case("overflow is reported", worked, {**settings, "max_chunks": 2}, (plan[:2], [5])),
        case("no request", (i32([]), i32([])), expected=([none] * 6, [0])),
        case("nothing to do", (i32([0, 0]), i32([0, 0])), expected=([none] * 6, [0])),
        case("no keys yet", no_keys, expected=([[2, 4, 0, 5], *[none] * 5], [1])),
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

_TOKENS = (i64([6, 7, 8, 8, 9, 10, 11, 12]), i32([0, 0, 0, 1, 1, 1, 1, 1]), i32([9, 13]))
_case = partial(Case, settings={"compress_ratio": 4})


def _bounds_cases() -> list[Case]:
    start, stop = [0, 0, 0, 2, 2, 2, 2, 2], [1, 2, 2, 4, 4, 4, 5, 5]
    adversarial = (i64([12, -1, 3, 2**31 - 1]), i32([0, 0, 5, 0]), i32([9, -4]))
    bounds = ([0, 2, 2], [0] * 4, [2, 0, 0, 0])
    return [
        _case("worked example", _TOKENS, expected=([0, 2, 5], start, stop)),
        _case("never past the request", adversarial, expected=bounds),
    ]


prefill_row_bounds = OpTesting(
    cases=_bounds_cases,
    settings=({"compress_ratio": 4}, {"compress_ratio": 1}, {"compress_ratio": 128}),
    make=calls_of("positions", "req_indices", "seq_lens"),
)


def _chunk_cases() -> list[Case]:
    nothing, rows = [0] * 8, [0, 0, 0, 2, 2, 0, 0, 0]
    calls = (
        ("query slice", [0, 2, 2, 5], ([0, 2, 5], rows, [0, 0, 2, 4, 4, 0, 0, 0])),
        ("second request", [1, 2, 0, 2], ([0, 0, 3], nothing, rows)),
        ("unused chunk", [0, 0, 0, 0], ([0, 0, 0], nothing, nothing)),
    )
    starts = i32([0, 3, 8])
    return [
        _case(name, (*_TOKENS, starts, i32(chunk)), expected=expected)
        for name, chunk, expected in calls
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

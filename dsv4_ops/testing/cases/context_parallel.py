"""Cases and strategies of sequences on several ranks."""

from __future__ import annotations

from typing import Any

from dsv4_ops.testing.case import Case, OpTesting, i32

_LENS = (0, 1, 2, 3, 4, 5, 8, 9, 127, 4096, 2**31 - 1, -1, -(2**31))
_RANKS = (0, 1, 2, 3, -1, 7, 2**31 - 1, -(2**31))


def _cases() -> list[Case]:
    def turns(ranks: int, positions: int) -> dict[str, Any]:
        return {"cp_world_size": ranks, "cp_interleave": positions}

    return [
        Case("one by one", (i32([5, 0, -3]), None), turns(2, 1), ([[3, 2], [0, 0], [0, 0]],)),
        Case(
            "turns of four",
            (i32([5, 10, 13]), None),
            turns(2, 4),
            ([[4, 1], [6, 4], [8, 5]],),
        ),
        Case("four ranks", (i32([9]), None), turns(4, 2), ([[3, 2, 2, 2]],)),
        Case("of a rank", (i32([7, 8, 9]), i32([1])), turns(2, 1), ([3, 4, 4],)),
        Case("of no rank", (i32([7, 8, 9]), i32([2])), turns(2, 1), ([0, 0, 0],)),
        Case("longest", (i32([2**31 - 1]), None), turns(2, 1), ([[2**30, 2**30 - 1]],)),
        Case("no sequence", (i32([]), None), turns(2, 1)),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    size = max(draw(st.sampled_from((3, 0, 1, 2, 33))), min_size)
    lens = i32([draw(st.sampled_from(_LENS)) for _ in range(size)])
    rank = None if not min_size and draw(st.booleans()) else i32([draw(st.sampled_from(_RANKS))])
    return Case("sampled", (lens, rank), settings)


cp_seq_lens = OpTesting(
    cases=_cases,
    settings=tuple(
        {"cp_world_size": ranks, "cp_interleave": positions}
        for ranks, positions in ((2, 1), (4, 3), (1, 1), (2, 64))
    ),
    make=_call,
)

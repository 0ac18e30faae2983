"""Cases and strategies of DeepGEMM's schedule."""

from __future__ import annotations

from typing import Any

from dsv4_ops.testing.case import Case, OpTesting, i32

_LENS = (0, 1, 255, 256, 257, 1000, 4096, 262144, 2**31 - 1, -1, -(2**31))


def _cases() -> list[Case]:
    four, one = ({"block_size": 64, "num_sms": count} for count in (4, 1))
    return [
        # 4, 2, 0 and 3 splits: runs of 3, 2, 2, 2
        Case(
            "worked example",
            (i32([1000, 300, 0, 600]),),
            four,
            ([[0, 0], [0, 3], [1, 1], [3, 1], [4, 0]],),
        ),
        # 0, 0, 1, 0, 1, 0 splits: no run begins in a row without keys
        Case(
            "fewer splits than SMs",
            (i32([0, -9, 1, 0, 256, 0]),),
            four,
            ([[2, 0], [4, 0], [6, 0], [6, 0], [6, 0]],),
        ),
        Case("no keys", (i32([0, 0, -1]),), four, ([[3, 0]] * 5,)),
        Case("no request", (i32([]),), four, ([[0, 0]] * 5,)),
        Case("one SM", (i32([257, 1]),), one, ([[0, 0], [2, 0]],)),
        # 3 * 2^23 splits: 6291456 each, and 2^23 = 8388608 in a row
        Case(
            "longest",
            (i32([2**31 - 1] * 3),),
            four,
            ([[0, 0], [0, 6291456], [1, 4194304], [2, 2097152], [3, 0]],),
        ),
        Case("beyond 32 bits", (i32([2**31 - 1] * 600),), {"block_size": 64, "num_sms": 132}),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    size = max(draw(st.sampled_from((3, 0, 1, 2, 7, 33, 150))), min_size)
    lens = [draw(st.sampled_from(_LENS)) for _ in range(size)]
    return Case("drawn", (i32(lens),), settings)


paged_mqa_logits_metadata = OpTesting(
    cases=_cases,
    settings=(
        {"block_size": 64, "num_sms": 132},
        {"block_size": 64, "num_sms": 5},
        {"block_size": 32, "num_sms": 1},
    ),
    make=_call,
)

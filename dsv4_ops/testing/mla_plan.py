"""Cases and strategies of the plan of sparse MLA."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_ops.testing.case import Case, OpTesting, i32

_LENS = (0, 1, 63, 64, 65, 128, 640, 8192, 2**31 - 1, -1, -(2**31))


def _cases() -> list[Case]:
    two = {"num_heads": 64, "num_programs": 2}
    absent = [-1] * 4
    return [
        Case(
            # 11 tiles on 4 programs, one of which is left: pieces of up to 5 or more
            "one long token",
            (i32([64, 0, 640]), None),
            {"num_heads": 64, "num_programs": 4},
            ([[2, 0, 2, 0], [2, 1, 2, 0], [0, 0, 1, 0], [1, 0, 1, 0], *[absent] * 3],),
        ),
        Case(
            # 1 + 1, 10 + 0, 9 + 1 tiles on 6 programs: pieces of up to 5 leave one
            "two long tokens",
            (i32([1, 640, 576]), i32([64, -5, 1])),
            {"num_heads": 8, "num_programs": 6},
            (
                [
                    [1, 0, 2, 0],
                    [2, 0, 2, 2],
                    [1, 1, 2, 0],
                    [2, 1, 2, 2],
                    [0, 0, 1, 0],
                    *[absent] * 4,
                ],
            ),
        ),
        Case(
            "programs shared by two tiles of heads",
            (i32([640]), None),
            {"num_heads": 65, "num_programs": 5},
            ([[0, 0, 2, 0], [0, 1, 2, 0], absent],),
        ),
        Case("more heads than programs", (i32([640]), None), {"num_heads": 129, "num_programs": 2}),
        Case(
            "no keys",
            (i32([0, -1]), i32([0, 0])),
            two,
            ([[0, 0, 1, 0], [1, 0, 1, 0], *[absent] * 2],),
        ),
        Case("no token", (i32([]), None), two, ([absent] * 2,)),
        Case("longest", (i32([2**31 - 1] * 3), i32([2**31 - 1] * 3)), two),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    num_tokens = max(draw(st.sampled_from((3, 0, 1, 2, 7, 130))), min_size)
    lens = [
        torch.tensor([draw(st.sampled_from(_LENS)) for _ in range(num_tokens)], dtype=torch.int32)
        for _ in range(2)
    ]
    if not min_size and draw(st.booleans()):
        return Case("drawn", (lens[0], None), settings)
    return Case("drawn", tuple(lens), settings)


sparse_mla_plan = OpTesting(
    cases=_cases,
    settings=(
        {"num_heads": 64, "num_programs": 132},
        {"num_heads": 128, "num_programs": 132},
        {"num_heads": 8, "num_programs": 3},
        {"num_heads": 8, "num_programs": 1},
    ),
    make=_call,
)

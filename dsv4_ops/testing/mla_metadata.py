"""Cases and strategies of FlashMLA's tile scheduler metadata."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_ops.testing.case import Case, OpTesting, i32

_LENS = (0, 1, 63, 64, 65, 127, 128, 512, 8192, 2**31 - 1, -1, -(2**31))
_UNUSED = [[0] * 8] * 2


def _cases() -> list[Case]:
    window = {"swa_width": 128, "extra_width": 0}
    both = {"swa_width": 128, "extra_width": 512}
    return [
        Case(
            # 2 + 8 and 1 + 0 blocks, 5 more for each: 21 on 3 parts are 7 each, and 5
            "a split token",
            (i32([128, 64]), i32([512, 0])),
            {**both, "num_sm_parts": 3},
            (
                [
                    [0, 0, 0, 7, 0, 1, 1, 0],
                    [0, 0, 7, 10, 1, 1, 1, 0],
                    [1, 1, 0, 1, 0, 0, 0, 0],
                    [0, 2, 3, 0, 0, 0, 0, 0],
                    *_UNUSED,
                ],
            ),
        ),
        Case(
            # a token has a block without any key too: 6 and 7 are 13, 13 on 4 parts are 4, and 5
            "parts without work",
            (i32([-7, 200]), None),
            {**window, "num_sm_parts": 4},
            (
                [
                    [0, 0, 0, 1, 0, 0, 0, 0],
                    [1, 1, 0, 2, 0, 0, 0, 0],
                    [2, 1, 0, 2, 0, 0, 0, 0],
                    [2, 1, 0, 2, 0, 0, 0, 0],
                    [0, 1, 2, 0, 0, 0, 0, 0],
                    *_UNUSED,
                ],
            ),
        ),
        Case(
            # 10 places each: 5 + 10 are behind all of the first and before the 6th of the second
            "less than an overhead is left",
            (i32([320, 320]), None),
            {"swa_width": 320, "extra_width": 0, "num_sm_parts": 2},
            (
                [
                    [0, 0, 0, 5, 0, 0, 0, 0],
                    [1, 1, 0, 5, 0, 0, 0, 0],
                    [0, 1, 2, 0, 0, 0, 0, 0],
                    *_UNUSED,
                ],
            ),
        ),
        Case(
            "no token",
            (i32([]), i32([])),
            {**both, "num_sm_parts": 2},
            ([[0, -1, 0, 0, 0, 0, 0, 0], [0, -1, 0, 0, 0, 0, 0, 0], [0] * 8],),
        ),
        Case("seven tokens", (i32([128] * 7), i32([512] * 7)), {**both, "num_sm_parts": 132}),
        Case("eight tokens", (i32([1] * 8), i32([9000] * 8)), {**both, "num_sm_parts": 66}),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    num_tokens = max(draw(st.sampled_from((3, 0, 1, 2, 7, 8, 130))), min_size)
    lens = [
        torch.tensor([draw(st.sampled_from(_LENS)) for _ in range(num_tokens)], dtype=torch.int32)
        for _ in range(2)
    ]
    return Case("drawn", (lens[0], lens[1] if settings["extra_width"] else None), settings)


flash_mla_metadata = OpTesting(
    cases=_cases,
    settings=(
        {"swa_width": 128, "extra_width": 512, "num_sm_parts": 132},
        {"swa_width": 128, "extra_width": 0, "num_sm_parts": 66},
        {"swa_width": 1, "extra_width": 8192, "num_sm_parts": 5},
        {"swa_width": 100, "extra_width": 37, "num_sm_parts": 1},
    ),
    make=_call,
)

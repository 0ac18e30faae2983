"""Cases and strategies of the indexer's key cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.testing.case import Case, OpTesting, i32, i64

_TAG = IndexerLayout.tag
_PAGES_OF_1 = {"block_size": 1, "layout": _TAG}


def worked_page() -> list[int]:
    """A page of one row: 3, -0.3, 0.01 and zeros, scale 2^-7."""
    return [0x7C, 0xE2, 0x3A] + [0] * 125 + [0, 0, 0x00, 0x3C] + [0] * 444


def _insert_cases() -> list[Case]:
    k = torch.zeros(1, 128, dtype=torch.bfloat16)
    k[0, :3] = torch.tensor([3.0, -0.3, 0.01])
    empty = torch.zeros(2, 576, dtype=torch.uint8)
    return [
        Case("worked row", (k, empty, i64([1])), _PAGES_OF_1, ([[0] * 576, worked_page()],)),
        Case("no slot", (k, empty + 7, i64([-3])), _PAGES_OF_1, ([[7] * 576] * 2,)),
        Case("no token", (k[:0], empty + 7, i64([])), _PAGES_OF_1, ([[7] * 576] * 2,)),
    ]


def _insert_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator, keys, random_bytes, slots

    num_tokens = max(draw(st.sampled_from((0, 1, 2, 3, 5, 9, 17))), min_size)
    num_blocks = max(draw(st.sampled_from((0, 1, 2, 3, 8))), min_size)
    num_rows = num_tokens + draw(st.sampled_from((0, 0, 1, 4)))
    k = draw(keys(num_rows=num_rows, width=128, special=128))
    page_bytes = IndexerLayout(settings["block_size"]).page_bytes
    cache = random_bytes(generator(draw), num_blocks, page_bytes)
    num_slots = num_blocks * settings["block_size"]
    return Case(
        "drawn", (k, cache, draw(slots(num_tokens=num_tokens, num_slots=num_slots))), settings
    )


quantize_and_insert_indexer_k = OpTesting(
    cases=_insert_cases,
    settings=tuple({"block_size": size, "layout": _TAG} for size in (64, 1, 3)),
    make=_insert_call,
)
quantize_and_insert_indexer_k_functional = quantize_and_insert_indexer_k


def _gather_cases() -> list[Case]:
    cache = torch.tensor([[0xFF] * 576, worked_page()], dtype=torch.uint8)
    codes, nothing = worked_page()[:128], [0] * 128
    return [
        Case(
            "two requests, room to spare",
            (cache, i32([0, 1, 4]), i32([[1, 0, 0], [-1, 1, 2]])),
            {**_PAGES_OF_1, "num_rows": 6},
            (
                [codes, nothing, codes, nothing, nothing, nothing],
                [0.0078125, 0.0, 0.0078125, 0.0, 0.0, 0.0],
            ),
        ),
        Case(
            "no request",
            (cache, i32([0]), i32([]).reshape(0, 3)),
            {**_PAGES_OF_1, "num_rows": 1},
            ([nothing], [0.0]),
        ),
        *(
            _many_requests(f"{count} requests of a key", cache, [1] * count)
            for count in (31, 32, 33)
        ),
        _many_requests("a key for two requests of three", cache, [0, 1, 1] * 30),
        _many_requests("few keys of many requests", cache, ([0] * 99 + [1, 0]) * 20),
    ]


def _many_requests(name: str, cache: Tensor, lens: list[int]) -> Case:
    """Pages of one row: those of odd requests exist."""
    starts = [sum(lens[:place]) for place in range(len(lens) + 1)]
    table = [[place % 2 or -1] for place in range(len(lens))]
    found = [place % 2 for place, length in enumerate(lens) if length] + [0, 0]
    codes = [worked_page()[:128] if there else [0] * 128 for there in found]
    return Case(
        name,
        (cache, i32(starts), i32(table)),
        {**_PAGES_OF_1, "num_rows": len(found)},
        (codes, [0.0078125 * there for there in found]),
    )


def _gather_call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator, random_bytes, requests

    num_blocks = max(draw(st.sampled_from((0, 1, 2, 3, 8))), min_size)
    page_bytes = IndexerLayout(settings["block_size"]).page_bytes
    cache = random_bytes(generator(draw), num_blocks, page_bytes)
    _, lens, table = draw(requests(num_blocks=num_blocks, min_size=min_size))
    start = torch.tensor([draw(st.sampled_from((0, 0, 2)))])
    cu_seq_lens = torch.cat([start, lens.clamp(0, 90)]).cumsum(0).to(torch.int32)
    num_rows = max(draw(st.sampled_from((0, 1, 7, 40, 150))), min_size)
    return Case("drawn", (cache, cu_seq_lens, table), {**settings, "num_rows": num_rows})


gather_indexer_k = OpTesting(
    cases=_gather_cases,
    settings=tuple({"block_size": size, "layout": _TAG} for size in (64, 1, 3)),
    make=_gather_call,
)

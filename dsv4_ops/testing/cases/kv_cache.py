"""Cases and strategies of paged caches of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.strategies.caches import (
    insertions,
    keys,
    plain_cache,
    random_bytes,
    requests,
    slots,
)
from dsv4_ops.testing.strategies.draw import Draw

_TAG = MainLayout.tag
_PAGES_OF_1 = {"block_size": 1, "layout": _TAG}


def worked_row() -> Tensor:
    """Return a bf16 row [1, 512]. The first block of 64 values begins with 3, -0.3 and 0.01; the
    next four blocks begin with 448, -450, infinity and NaN; the last 64 values are for RoPE."""
    k = torch.zeros(1, 512, dtype=torch.bfloat16)
    k[0, :3] = torch.tensor([3.0, -0.3, 0.01])
    k[0, 64], k[0, 128] = 448.0, -450.0
    k[0, 192], k[0, 193] = float("inf"), 1.0
    k[0, 256], k[0, 257] = float("nan"), 2.0
    k[0, 448], k[0, 511] = 1.0, -2.0
    return k


def worked_bytes() -> list[int]:
    """Return the block with the quantised ``worked_row``, with zero padding."""
    page = [0] * 1152
    page[:3] = [0x7C, 0xE2, 0x3A]
    page[64], page[128] = 0x7E, 0xF6  # 448 / 1; -450 / 2 = -225, rounded to -224
    page[192] = 0x7E
    page[256], page[257] = 0x7F, 0x78  # NaN does not change the scale: 2 / 2^-7 = 256
    page[448:450], page[574:576] = [0x80, 0x3F], [0x00, 0xC0]
    page[576:584] = [120, 127, 128, 247, 120, 105, 105, 0]
    return page


def _insert_cases() -> list[Case]:
    empty = torch.zeros(2, 1152, dtype=torch.uint8)
    k = worked_row()
    return [
        Case("worked row", (k, empty, i64([1])), _PAGES_OF_1, ([[0] * 1152, worked_bytes()],)),
        Case("no slot", (k, empty + 7, i64([-1])), _PAGES_OF_1, ([[7] * 1152] * 2,)),
        Case("past the end", (k, empty + 7, i64([2])), _PAGES_OF_1, ([[7] * 1152] * 2,)),
        Case("no token", (k[:0], empty, i64([])), _PAGES_OF_1, ([[0] * 1152] * 2,)),
        Case("no page", (k, empty[:0], i64([0])), _PAGES_OF_1, ([],)),
        Case("more rows", (k.repeat(3, 1), empty, i64([-1, 0])), _PAGES_OF_1),
    ]


quantize_and_insert_k_cache = OpTesting(
    cases=_insert_cases,
    settings=tuple({"block_size": size, "layout": _TAG} for size in (64, 2, 1, 3)),
    make=insertions(MainLayout, MainLayout.code_dim),
)


def _worked_values() -> list[float]:
    """Return ``worked_row`` after quantisation and dequantisation, with 0 in place of NaN."""
    row = [0.0] * 512
    row[:3] = [3.0, -0.3125, 0.009765625]
    row[64], row[128], row[192], row[257] = 448.0, -448.0, float("inf"), 2.0
    row[448], row[511] = 1.0, -2.0
    return row


def _worked_gather() -> tuple[Tensor, tuple[Tensor, ...], list[float], list[float]]:
    """Make a cache, lengths and a table, with existing and absent rows."""
    page = torch.tensor(worked_bytes(), dtype=torch.uint8)
    page[256] = 0  # the NaN
    lens = (i32([3, 2]), i32([2, 3]), i32([[7, 1, -1], [1, 1, 0]]))
    return torch.stack([torch.full_like(page, 0xFF), page]), lens, _worked_values(), [0.0] * 512


def _gather_cases() -> list[Case]:
    cache, lens, row, zeros = _worked_gather()
    out = torch.full((2, 4, 512), 5.0, dtype=torch.bfloat16)
    fives = [5.0] * 512
    settings, full = {**_PAGES_OF_1, "offset": 1}, {**_PAGES_OF_1, "offset": 4}
    rows = [[fives, row, zeros, fives], [fives, zeros, row, row]]
    none = (out[:0], cache, i32([]), i32([]), i32([]).reshape(0, 3))
    return [
        Case("page, no page, before the start", (out, cache, *lens), settings, (rows,)),
        Case("all rows", (out, cache, lens[0], None, lens[2]), settings),
        Case("no capacity", (out, cache, *lens), full, (out.tolist(),)),
        Case("no request", none, settings, ([],)),
    ]


_MOST, _LEAST = 2**31 - 1, -(2**31)
_GATHERS: tuple[tuple[str, list[int], list[int] | None, list[list[int]], int], ...] = (
    ("more rows than the sequence has", [1], [3], [[2, 0]], 0),
    ("past the end of the table", [5], [4], [[2, 0]], 0),
    ("more than fit, later", [4], [3], [[2, 0]], 2),
    ("no sequence, and negative lengths", [0, -1, 3], [2, 3, -1], [[2]] * 3, 0),
    ("the longest", [_MOST] * 4, [_MOST, _MOST - 1, 2, _LEAST], [[2, 0]] * 4, 0),
    # in int32, the first request would have positions 1 and 2
    ("far below zero", [_LEAST, _LEAST, 0], [_MOST, 1, _MOST], [[2, 0]] * 3, 0),
    ("pages that do not exist", [8], [7], [[-1, 3, 4, _MOST, _LEAST, 0]], 0),
    ("no column", [2], None, [[]], 0),
)
"""Sequence and gather lengths, tables and offsets, over four blocks of two rows."""


def _gather_all_cases() -> list[Case]:
    cache, lens, row, zeros = _worked_gather()
    settings = {**_PAGES_OF_1, "offset": 1, "num_rows": 4}
    gathered = [[zeros, row, zeros, zeros], [zeros, zeros, row, row]]
    rows = torch.arange(8, dtype=torch.float32).reshape(2, 2, 2)
    four = torch.arange(1.0, 17.0).reshape(4, 2, 2)
    plain = {"block_size": 2, "layout": "plain", "offset": 0, "num_rows": 3}
    moved = [[[4.0, 5.0], [6.0, 7.0], [0.0, 1.0]]]
    return [
        Case("page, no page, before the start", (cache, *lens), settings, (gathered,)),
        Case("no row", (cache, *lens), {**settings, "num_rows": 1}, ([[zeros]] * 2,)),
        Case("plain rows", (rows, i32([3]), None, i32([[1, 0]])), plain, (moved,)),
        *(
            Case(
                name,
                (four, i32(lens), None if some is None else i32(some), i32(table)),
                {**plain, "offset": offset, "num_rows": 4},
            )
            for name, lens, some, table, offset in _GATHERS
        ),
    ]


def _gather_tensors(draw: Draw, settings: dict[str, Any], min_size: int) -> tuple[Any, ...]:
    num_blocks = max(draw.one_of(0, 1, 2, 3, 8), min_size)
    block_size, seed = settings["block_size"], draw.generator()
    if settings["layout"] == _TAG:
        cache = random_bytes(seed, num_blocks, MainLayout(block_size).page_bytes)
    else:
        cache = plain_cache(seed, num_blocks, block_size, 24)
    seq_lens, gather_lens, table = requests(draw, num_blocks=num_blocks, min_size=min_size)
    lens = gather_lens if min_size or draw.flag() else None
    return cache, seq_lens, lens, table


def _gather_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    tensors = _gather_tensors(draw, settings, min_size)
    num_reqs = tensors[1].shape[0]
    num_rows = settings["offset"] + max(draw.one_of(2, 0, 1, 7, 20), min_size)
    out = plain_cache(draw.generator(), num_reqs, num_rows, 512)
    return Case("sampled", (out, *tensors), settings)


def _gather_all_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    tensors = _gather_tensors(draw, settings, min_size)
    num_rows = settings["offset"] + max(draw.one_of(2, 0, 1, 7, 20), min_size)
    return Case("sampled", tensors, {**settings, "num_rows": num_rows})


dequantize_and_gather_k_cache = OpTesting(
    cases=_gather_cases,
    settings=tuple(
        {"block_size": size, "layout": _TAG, "offset": offset}
        for size, offset in ((64, 3), (64, 0), (2, 1), (3, 5))
    ),
    make=_gather_call,
)
gather_k_cache = OpTesting(
    cases=_gather_all_cases,
    settings=tuple(
        {"block_size": size, "layout": layout, "offset": offset}
        for size, layout, offset in ((64, _TAG, 3), (2, _TAG, 0), (4, "plain", 1), (64, "plain", 0))
    ),
    make=_gather_all_call,
)


def _cases() -> list[Case]:
    k = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    cache = torch.full((2, 2, 2), 9.0)
    written = [[[9.0, 9.0], [9.0, 9.0]], [[9.0, 9.0], [1.0, 2.0]]]
    return [
        Case("fp32", (k, cache, i64([3, -1])), {}, (written,)),
        Case("bf16", (k.bfloat16(), cache.bfloat16(), i64([3, 4])), {}, (written,)),
        Case("no slot", (k, cache, i64([-1, 4])), {}, (cache.tolist(),)),
        Case("no token", (k, cache, i64([])), {}, (cache.tolist(),)),
        Case("no page", (k, cache[:0], i64([0])), {}, ([],)),
    ]


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(0, 1, 2, 3, 5, 9, 17), min_size)
    num_blocks = max(draw.one_of(0, 1, 2, 3, 8), min_size)
    num_rows = num_tokens + draw.one_of(0, 0, 1, 4)
    width = 512 if min_size else draw.one_of(512, 1, 24)
    block_size = 4 if min_size else draw.one_of(1, 4, 64)
    k = keys(draw, num_rows=num_rows, width=width, special=0)
    cache = plain_cache(draw.generator(), num_blocks, block_size, width)
    if not min_size and draw.flag():
        k, cache = k.float(), cache.float()
    order = slots(draw, num_tokens=num_tokens, num_slots=num_blocks * block_size)
    return Case("sampled", (k, cache, order), settings)


insert_k_cache = OpTesting(cases=_cases, settings=({},), make=_call)

"""Cases and strategies of packing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, OpTesting, i32
from dsv4_ops.testing.strategies.batches import ragged_batch
from dsv4_ops.testing.strategies.draw import Draw

_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, _FP8, torch.int32, torch.float32)


def _pack_cases() -> list[Case]:
    x, starts = torch.arange(1.0, 7.0), i32([0, 2, 2, 6])
    pair = torch.stack([x, -x], -1).to(torch.bfloat16)[:, None]
    pairs = [[[[1.0, -1.0]], [[2.0, -2.0]]], [[[0.0, 0.0]]] * 2, [[[3.0, -3.0]], [[4.0, -4.0]]]]
    outside, inf = i32([-5, -2, 1, 2**31 - 1]), torch.inf
    padded = [[1.0, 2.0, 0.5], [0.5] * 3, [3.0, 4.0, 5.0]]
    return [
        Case("shorter, empty, longer", (x, starts), {"next_n": 3, "pad": 0.5}, (padded,)),
        Case("rows of rows", (pair, starts), {"next_n": 2, "pad": 0.0}, (pairs,)),
        Case("infinite pad", (x, i32([4, 5])), {"next_n": 2, "pad": -inf}, ([[5.0, -inf]],)),
        Case("fewer tokens", (x[:5], starts), {"next_n": 4, "pad": 0.0}, None),
        Case("bytes", (x.to(torch.uint8), i32([0, 1])), {"next_n": 2, "pad": 255.0}, ([[1, 255]],)),
        Case("flags", (x > 3, i32([3, 4])), {"next_n": 2, "pad": 1.0}, ([[True, True]],)),
        Case("outside", (x, outside), {"next_n": 2, "pad": 9.0}, ([*[[9.0] * 2] * 2, [2.0, 3.0]],)),
        Case("no request", (x, i32([0])), {"next_n": 2, "pad": 0.0}, ([],)),
        Case("no token", (x[:0], starts), {"next_n": 1, "pad": 2.0}, ([[2.0]] * 3,)),
        Case("no value", (pair[:, :0], starts), {"next_n": 1, "pad": 2.0}, ([[[]]] * 3,)),
    ]


def _unpack_cases() -> list[Case]:
    packed, starts = torch.arange(1.0, 7.0).view(3, 2), i32([0, 1, 1, 4])
    rows = packed.to(torch.bfloat16)[:, :, None, None]

    def tokens(count: int) -> dict[str, Any]:
        return {"num_tokens": count}

    return [
        Case("and padding", (packed, starts), tokens(6), ([1.0, 5.0, 6.0, 0.0, 0.0, 0.0],)),
        Case("rows of rows", (rows, starts), tokens(2), ([[[1.0]], [[5.0]]],)),
        Case("a later start", (packed, i32([2, 3, 4, 4])), tokens(4), ([0.0, 0.0, 1.0, 3.0],)),
        Case("no request", (packed[:0], starts[:1]), tokens(2), ([0.0, 0.0],)),
        Case("no row", (packed[:, :0], starts), tokens(1), ([0.0],)),
        Case("no token", (packed, starts), tokens(0), ([],)),
    ]


def _filled(draw: Draw, leading: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
    """Sample values of any size, but no NaN, in ``rank`` trailing dimensions of distinct sizes."""
    seed, shape = draw.generator(), (*leading, *range(3, 3 + rank))
    if dtype == _FP8:
        codes = torch.randint(0, 0x7F, shape, generator=seed, dtype=torch.uint8)
        return codes.view(_FP8)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=seed).to(dtype)
    return torch.randn(shape, generator=seed).to(dtype)


_ROWS = {0.0: (torch.bfloat16, 2), 0.5: (torch.float32, 1), 7.0: (torch.uint8, 0)}
"""Dtype and number of trailing dimensions of the sampled rows, by pad value."""


def _pack_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size, adversarial=False)
    dtype, rank = _ROWS.get(settings["pad"], (torch.float32, 1))
    if not min_size:
        rank = draw.integer(0, 3)
        dtype = draw.one_of(*_DTYPES) if settings["pad"] == 0.0 else dtype
    x = _filled(draw, (batch.num_tokens,), rank, dtype)
    return Case("sampled", (x, batch.query_start_loc), settings)


def _unpack_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    batch = ragged_batch(draw, min_size=min_size, adversarial=False)
    dtype, rank = torch.bfloat16, 2
    if not min_size:
        rank = draw.integer(0, 3)
        dtype = draw.one_of(*_DTYPES)
    next_n = max(draw.one_of(2, 0, 1, 3, 5, 9), min_size)
    packed = _filled(draw, (batch.seq_lens.shape[0], next_n), rank, dtype)
    settings = {**settings, "num_tokens": batch.num_tokens}
    return Case("sampled", (packed, batch.query_start_loc), settings)


pack_seq = OpTesting(
    cases=_pack_cases,
    settings=(
        {"next_n": 2, "pad": 0.0},
        {"next_n": 1, "pad": float("-inf")},
        {"next_n": 5, "pad": 0.5},
        {"next_n": 3, "pad": 7.0},
    ),
    make=_pack_call,
)
unpack_seq = OpTesting(cases=_unpack_cases, settings=({},), make=_unpack_call)

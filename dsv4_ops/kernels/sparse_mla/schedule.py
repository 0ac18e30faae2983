"""Kernel and launcher of the plan of sparse MLA: one program, as all pieces depend on all lens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.tiles import (
    CLASSES,
    FURTHER_SHARE,
    KEY_TILE,
    PLAN_COLUMNS,
    PLAN_FURTHER_TILES,
    PLAN_SIZES,
    PLAN_STEPS,
    START_TILES,
    programs_per_tile,
)
from dsv4_ops.kernels.launcher import Launch

TOKENS = 128
"""Tokens that the program looks at together."""

WARPS = 8


@triton.jit
def _tiles(lens, KEYS: tl.constexpr):
    lens = tl.maximum(lens, 0)
    return lens // KEYS + (lens % KEYS > 0).to(tl.int32)  # a sum could pass the largest int32


@triton.jit
def _pieces(tiles, size):
    return tl.maximum((tiles + size - 1) // size, 1)


@triton.jit
def _candidates(
    total, longest, programs, SIZES: tl.constexpr, CANDIDATES: tl.constexpr, STEPS: tl.constexpr
):
    """Sizes of pieces, of which the first SIZES are looked at."""
    mean = tl.maximum((total + programs - 1) // programs, 1)
    index = tl.arange(0, CANDIDATES)
    sizes = mean + index.to(tl.int64) * ((mean + STEPS - 1) // STEPS)
    sizes = tl.minimum(sizes, longest.to(tl.int64)).to(tl.int32)
    return tl.where(index >= SIZES - 1, longest, sizes)


@triton.jit
def _best_size(
    counts,
    sizes,
    total,
    num_tokens,
    programs,
    SIZES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    START: tl.constexpr,
    FURTHER: tl.constexpr,
    SHARE: tl.constexpr,
):
    """That of which so many pieces take the least time; the smallest of several."""
    index = tl.arange(0, CANDIDATES)
    counts = counts.to(tl.int64)  # programs may be so many that START times as many are too many
    shared, further = total + START * (counts - programs), counts - num_tokens
    time = tl.maximum(sizes.to(tl.int64) * programs, shared) + FURTHER * further
    looked_at = (index < SIZES) & (further <= tl.maximum(programs - num_tokens, programs // SHARE))
    least = tl.min(tl.where(looked_at, time * CANDIDATES + index, 2**62), axis=0) % CANDIDATES
    return tl.sum(tl.where(index == least.to(tl.int32), sizes, 0), axis=0)


@triton.jit
def _of_class(tiles, there, size, CLASSES: tl.constexpr):
    """1 where a token is of a class, the longest first, [tokens, CLASSES]."""
    shares = tl.minimum(tiles * (CLASSES - 2) // size, CLASSES - 2)
    number = tl.where(tiles > size, 0, CLASSES - 1 - shares)
    same = number[:, None] == tl.arange(0, CLASSES)[None, :]
    return (there[:, None] & same).to(tl.int32)


@triton.jit
def _store_rows(plan, row, there, token, piece, pieces, before, COLUMNS: tl.constexpr):
    start = plan + row.to(tl.int64) * COLUMNS
    tl.store(start, token, mask=there)
    tl.store(start + 1, piece, mask=there)
    tl.store(start + 2, pieces, mask=there)
    tl.store(start + 3, before, mask=there)


@triton.jit
def sparse_mla_plan_kernel(
    swa_lens,
    swa_stride,
    extra_lens,
    extra_stride,
    plan,
    num_tokens,
    programs,
    KEYS: tl.constexpr,
    SIZES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STEPS: tl.constexpr,
    START: tl.constexpr,
    FURTHER: tl.constexpr,
    SHARE: tl.constexpr,
    CLASSES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
):
    """Rows in the order of the reference: only tokens of the first class have several pieces, so
    that theirs are in the order of tokens. Lens are read here and in no function: they decide where
    rows go, and torch would take them for written to."""
    lane = tl.arange(0, TOKENS)
    total = tl.zeros((), tl.int64)
    longest = tl.full((), 1, tl.int32)
    first = 0
    while first < num_tokens:
        token = first + lane
        there = token < num_tokens
        lens = tl.load(swa_lens + token.to(tl.int64) * swa_stride, mask=there, other=0)
        tiles = _tiles(lens, KEYS)
        if HAS_EXTRA:
            lens = tl.load(extra_lens + token.to(tl.int64) * extra_stride, mask=there, other=0)
            tiles += _tiles(lens, KEYS)
        total += tl.sum(tiles.to(tl.int64), axis=0)
        longest = tl.maximum(longest, tl.max(tiles, axis=0))
        first += TOKENS
    sizes = _candidates(total, longest, programs, SIZES, CANDIDATES, STEPS)
    counts = tl.zeros((CANDIDATES,), tl.int32)
    first = 0
    while first < num_tokens:
        token = first + lane
        there = token < num_tokens
        lens = tl.load(swa_lens + token.to(tl.int64) * swa_stride, mask=there, other=0)
        tiles = _tiles(lens, KEYS)
        if HAS_EXTRA:
            lens = tl.load(extra_lens + token.to(tl.int64) * extra_stride, mask=there, other=0)
            tiles += _tiles(lens, KEYS)
        pieces = _pieces(tiles[None, :], sizes[:, None])
        counts += tl.sum(tl.where(there[None, :], pieces, 0), axis=1)
        first += TOKENS
    size = _best_size(
        counts, sizes, total, num_tokens, programs, SIZES, CANDIDATES, START, FURTHER, SHARE
    )
    members = tl.zeros((CLASSES,), tl.int32)
    more = 0  # pieces but the first ones
    first = 0
    while first < num_tokens:
        token = first + lane
        there = token < num_tokens
        lens = tl.load(swa_lens + token.to(tl.int64) * swa_stride, mask=there, other=0)
        tiles = _tiles(lens, KEYS)
        if HAS_EXTRA:
            lens = tl.load(extra_lens + token.to(tl.int64) * extra_stride, mask=there, other=0)
            tiles += _tiles(lens, KEYS)
        members += tl.sum(_of_class(tiles, there, size, CLASSES), axis=0)
        more += tl.sum(tl.where(there, _pieces(tiles, size) - 1, 0), axis=0)
        first += TOKENS
    longer = tl.arange(0, CLASSES) == 0  # of several pieces, which come first, then their others
    next_place = tl.cumsum(members, axis=0) - members + tl.where(longer, 0, more)
    row = tl.sum(tl.where(longer, members, 0), axis=0)  # of the next further piece
    stop = num_tokens + programs
    shared = 0  # partial results of the tokens before
    first = 0
    while first < num_tokens:
        token = first + lane
        there = token < num_tokens
        lens = tl.load(swa_lens + token.to(tl.int64) * swa_stride, mask=there, other=0)
        tiles = _tiles(lens, KEYS)
        if HAS_EXTRA:
            lens = tl.load(extra_lens + token.to(tl.int64) * extra_stride, mask=there, other=0)
            tiles += _tiles(lens, KEYS)
        pieces = tl.where(there, _pieces(tiles, size), 1)
        parts = tl.where(pieces > 1, pieces, 0)
        before = tl.where(pieces > 1, shared + tl.cumsum(parts, axis=0) - parts, 0)
        same = _of_class(tiles, there, size, CLASSES)
        place = tl.sum(same * (next_place[None, :] + tl.cumsum(same, axis=0) - 1), axis=1)
        next_place += tl.sum(same, axis=0)
        further = row + tl.cumsum(pieces - 1, axis=0) - (pieces - 1)
        _store_rows(plan, place, there, token, tl.zeros_like(token), pieces, before, COLUMNS)
        piece = 1
        most = tl.max(pieces, axis=0)
        while piece < most:
            offset = further + piece - 1
            wanted = (piece < pieces) & (offset < stop)
            _store_rows(
                plan, offset, wanted, token, tl.zeros_like(token) + piece, pieces, before, COLUMNS
            )
            piece += 1
        shared += tl.sum(parts, axis=0)
        row += tl.sum(pieces - 1, axis=0)
        first += TOKENS
    row = num_tokens + more
    while row < stop:
        offset = row + lane
        none = tl.zeros_like(offset) - 1
        _store_rows(plan, offset, offset < stop, none, none, none, none, COLUMNS)
        row += TOKENS


def sparse_mla_plan(
    launch: Launch,
    swa_lens: Tensor,
    extra_lens: Tensor | None,
    *,
    num_heads: int,
    num_programs: int,
) -> Tensor:
    num_tokens, programs = swa_lens.shape[0], programs_per_tile(num_heads, num_programs)
    plan = swa_lens.new_empty((num_tokens + programs, PLAN_COLUMNS), dtype=torch.int32)
    extra = swa_lens if extra_lens is None else extra_lens
    launch(sparse_mla_plan_kernel)[(1,)](
        swa_lens,
        swa_lens.stride(0),
        extra,
        extra.stride(0),
        plan,
        num_tokens,
        programs,
        KEYS=KEY_TILE,
        SIZES=PLAN_SIZES,
        CANDIDATES=triton.next_power_of_2(PLAN_SIZES),
        STEPS=PLAN_STEPS,
        START=START_TILES,
        FURTHER=PLAN_FURTHER_TILES,
        SHARE=FURTHER_SHARE,
        CLASSES=CLASSES,
        TOKENS=TOKENS,
        COLUMNS=PLAN_COLUMNS,
        HAS_EXTRA=extra_lens is not None,
        num_warps=WARPS,
    )
    return plan

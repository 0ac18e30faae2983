"""The plan of sparse MLA, made by one program: every split depends on all lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.tiles import (
    CLASSES,
    EXTRA_SPLIT_SHARE,
    KEY_TILE,
    PLAN_COLUMNS,
    PLAN_EXTRA_SPLIT_TILES,
    PLAN_SIZES,
    PLAN_STEPS,
    START_TILES,
    programs_per_tile,
)
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.launcher import Launcher

TOKENS = tl.constexpr(128)
"""Tokens that the program looks at together."""

WARPS = 8

_KEYS, _CLASSES, _COLUMNS = (tl.constexpr(each) for each in (KEY_TILE, CLASSES, PLAN_COLUMNS))
_SIZES, _STEPS, _START = (tl.constexpr(each) for each in (PLAN_SIZES, PLAN_STEPS, START_TILES))
_EXTRA, _SHARE = tl.constexpr(PLAN_EXTRA_SPLIT_TILES), tl.constexpr(EXTRA_SPLIT_SHARE)
_CANDIDATES = tl.constexpr(triton.next_power_of_2(PLAN_SIZES))


@triton.jit
def _tiles(lengths):
    lengths = tl.maximum(lengths, 0)
    # the usual sum, lengths + _KEYS - 1, could pass the largest int32
    return lengths // _KEYS + (lengths % _KEYS > 0).to(tl.int32)


@triton.jit
def _splits_of(tiles, size):
    """Splits of ``size`` tiles or less."""
    return tl.maximum((tiles + size - 1) // size, 1)


@triton.jit
def _candidates(total, longest, programs):
    """Sizes of a split, of which the first _SIZES are considered."""
    mean = tl.maximum((total + programs - 1) // programs, 1)
    index = tl.arange(0, _CANDIDATES)
    sizes = mean + index.to(tl.int64) * ((mean + _STEPS - 1) // _STEPS)
    sizes = tl.minimum(sizes, longest.to(tl.int64)).to(tl.int32)
    return tl.where(index >= _SIZES - 1, longest, sizes)


@triton.jit
def _best_size(counts, sizes, total, num_tokens, programs):
    """The cheapest size; the smallest of several such."""
    index = tl.arange(0, _CANDIDATES)
    counts = counts.to(tl.int64)  # programs may be so many that _START times as many are too many
    shared, extra = total + _START * (counts - programs), counts - num_tokens
    cost = tl.maximum(sizes.to(tl.int64) * programs, shared) + _EXTRA * extra
    allowed = (index < _SIZES) & (extra <= tl.maximum(programs - num_tokens, programs // _SHARE))
    least = tl.min(tl.where(allowed, cost * _CANDIDATES + index, 2**62), axis=0) % _CANDIDATES
    return tl.sum(tl.where(index == least.to(tl.int32), sizes, 0), axis=0)


@triton.jit
def _of_class(tiles, there, size):
    """1 where a token is of a class, the longest first, [tokens, _CLASSES]."""
    shares = tl.minimum(tiles * (_CLASSES - 2) // size, _CLASSES - 2)
    number = tl.where(tiles > size, 0, _CLASSES - 1 - shares)
    same = number[:, None] == tl.arange(0, _CLASSES)[None, :]
    return (there[:, None] & same).to(tl.int32)


@triton.jit
def _store_rows(plan, row, there, token, split, splits, before):
    start = plan + row.to(tl.int64) * _COLUMNS
    tl.store(start, token, mask=there)
    tl.store(start + 1, split, mask=there)
    tl.store(start + 2, splits, mask=there)
    tl.store(start + 3, before, mask=there)


@triton.jit
def sparse_mla_plan_kernel(
    swa_lens, swa_stride,
    extra_lens, extra_stride,
    plan, num_tokens, programs,
    HAS_EXTRA: tl.constexpr,
):  # fmt: skip
    """Rows in the order of the reference: only tokens of the first class have several splits, whose
    splits then are in the order of tokens. Every pass reads the lengths here and in no function:
    they decide where rows go, and torch would take them for written to."""
    lane = tl.arange(0, TOKENS)
    total = tl.zeros((), tl.int64)
    longest = tl.full((), 1, tl.int32)
    for PASS in tl.static_range(4):
        if PASS == 1:
            sizes = _candidates(total, longest, programs)
            counts = tl.zeros((_CANDIDATES,), tl.int32)
        elif PASS == 2:
            size = _best_size(counts, sizes, total, num_tokens, programs)
            members = tl.zeros((_CLASSES,), tl.int32)
            extra = 0  # splits but the first ones
        elif PASS == 3:
            # tokens of several splits come first, then their other splits
            longer = tl.arange(0, _CLASSES) == 0
            next_row = tl.cumsum(members, axis=0) - members + tl.where(longer, 0, extra)
            extra_row = tl.sum(tl.where(longer, members, 0), axis=0)  # of the next extra split
            stop = num_tokens + programs
            shared = 0  # partial results of the tokens before
        first = 0
        while first < num_tokens:
            token = first + lane
            there = token < num_tokens
            lengths = tl.load(swa_lens + token.to(tl.int64) * swa_stride, mask=there, other=0)
            tiles = _tiles(lengths)
            if HAS_EXTRA:
                place = extra_lens + token.to(tl.int64) * extra_stride
                tiles += _tiles(tl.load(place, mask=there, other=0))
            if PASS == 0:
                total += tl.sum(tiles.to(tl.int64), axis=0)
                longest = tl.maximum(longest, tl.max(tiles, axis=0))
            elif PASS == 1:
                splits = _splits_of(tiles[None, :], sizes[:, None])
                counts += tl.sum(tl.where(there[None, :], splits, 0), axis=1)
            elif PASS == 2:
                members += tl.sum(_of_class(tiles, there, size), axis=0)
                extra += tl.sum(tl.where(there, _splits_of(tiles, size) - 1, 0), axis=0)
            else:
                splits = tl.where(there, _splits_of(tiles, size), 1)
                parts = tl.where(splits > 1, splits, 0)
                before = tl.where(splits > 1, shared + tl.cumsum(parts, axis=0) - parts, 0)
                same = _of_class(tiles, there, size)
                row = tl.sum(same * (next_row[None, :] + tl.cumsum(same, axis=0) - 1), axis=1)
                next_row += tl.sum(same, axis=0)
                others = extra_row + tl.cumsum(splits - 1, axis=0) - (splits - 1)
                _store_rows(plan, row, there, token, tl.zeros_like(token), splits, before)
                split = 1
                most = tl.max(splits, axis=0)
                while split < most:
                    offset = others + split - 1
                    wanted = (split < splits) & (offset < stop)
                    number = tl.zeros_like(token) + split
                    _store_rows(plan, offset, wanted, token, number, splits, before)
                    split += 1
                shared += tl.sum(parts, axis=0)
                extra_row += tl.sum(splits - 1, axis=0)
            first += TOKENS
    row = num_tokens + extra
    while row < stop:
        offset = row + lane
        none = tl.zeros_like(offset) - 1
        _store_rows(plan, offset, offset < stop, none, none, none, none)
        row += TOKENS


def sparse_mla_plan(
    launch: Launcher,
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
        *strided(swa_lens, extra), plan, num_tokens, programs,
        HAS_EXTRA=extra_lens is not None, num_warps=WARPS,
    )  # fmt: skip
    return plan

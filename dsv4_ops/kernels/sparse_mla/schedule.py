"""The kernel that plans the splits of sparse MLA. The kernel runs as one program, because every
split depends on all lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.tiles import (
    CLASSES,
    COMBINE_TILES,
    EXTRA_SPLIT_SHARE,
    EXTRA_SPLIT_TILES,
    KEY_TILE,
    PLAN_COLUMNS,
    SPLIT_SIZES,
    SPLIT_STEPS,
    START_TILES,
    programs_per_tile,
)
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

TOKENS = tl.constexpr(128)
"""Tokens that the program loads at a time."""

WARPS = 8

_KEYS, _CLASSES, _COLUMNS = (tl.constexpr(each) for each in (KEY_TILE, CLASSES, PLAN_COLUMNS))
_SIZES, _STEPS, _START = (tl.constexpr(each) for each in (SPLIT_SIZES, SPLIT_STEPS, START_TILES))
_COMBINE, _EXTRA = tl.constexpr(COMBINE_TILES), tl.constexpr(EXTRA_SPLIT_TILES)
_SHARE = tl.constexpr(EXTRA_SPLIT_SHARE)


@triton.jit
def _tiles(lengths):
    lengths = tl.maximum(lengths, 0)
    # lengths + _KEYS - 1 could overflow int32
    return lengths // _KEYS + (lengths % _KEYS > 0).to(tl.int32)


@triton.jit
def _splits_of(tiles, size):
    """Return the number of splits if a split has up to ``size`` tiles."""
    return tl.maximum((tiles + size - 1) // size, 1)


@triton.jit
def _candidates(total, longest, programs):
    """Return the candidate sizes of a split, as Hopper's in-kernel tile scheduler computes them."""
    mean = tl.maximum((total + programs - 1) // programs, 1)
    index = tl.arange(0, _SIZES)
    sizes = ((mean * (_STEPS + index % _STEPS) << (index // _STEPS)) + _STEPS - 1) // _STEPS
    sizes = tl.minimum(sizes, longest.to(tl.int64)).to(tl.int32)
    return tl.where(index == _SIZES - 1, longest, sizes)


@triton.jit
def _best_size(counts, sizes, total, longest, num_tokens, programs):
    """Return the cheapest size of a split; on a tie, the smallest size. If the longest token
    exceeds the mean load of a program by less than the cost of a combine plus one tile, return a
    size that splits no token."""
    index = tl.arange(0, _SIZES)
    counts = counts.to(tl.int64)  # the product with _START could overflow int32
    shared, extra = total + _START * (counts - programs), counts - num_tokens
    cost = tl.maximum(sizes.to(tl.int64) * programs, shared) + _EXTRA * extra
    cost += tl.where(extra > 0, _COMBINE, 0) * programs
    allowed = extra <= tl.maximum(programs - num_tokens, programs // _SHARE)
    best = tl.min(tl.where(allowed, cost * _SIZES + index, 2**62), axis=0) % _SIZES
    size = tl.sum(tl.where(index == best.to(tl.int32), sizes, 0), axis=0)
    rows = tl.maximum(programs, num_tokens).to(tl.int64)
    return tl.where((longest - _COMBINE - 1) * rows >= total, size, longest)


@triton.jit
def _class_members(tiles, mask, size):
    """Return [tokens, _CLASSES] with 1 where a token belongs to a class. The first class has the
    longest tokens."""
    shares = tl.minimum(tiles * (_CLASSES - 2) // size, _CLASSES - 2)
    token_class = tl.where(tiles > size, 0, _CLASSES - 1 - shares)
    is_member = token_class[:, None] == tl.arange(0, _CLASSES)[None, :]
    return (mask[:, None] & is_member).to(tl.int32)


@triton.jit
def _store_rows(plan, row, mask, token, split, splits, first_partial):
    start = plan + row.to(tl.int64) * _COLUMNS
    tl.store(start, token, mask=mask)
    tl.store(start + 1, split, mask=mask)
    tl.store(start + 2, splits, mask=mask)
    tl.store(start + 3, first_partial, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def sparse_mla_plan_kernel(
    swa_lens, swa_stride,
    extra_lens, extra_stride,
    plan, num_tokens, programs,
    HAS_EXTRA: tl.constexpr,
):  # fmt: skip
    """Write the rows of a plan in the order of the reference. Only tokens of the first class have
    several splits, and their extra splits follow the order of tokens. Each pass loads the lengths
    here, not in a function. The lengths decide where rows are stored. So if a function loaded them,
    torch would treat the tensors of lengths as written."""
    wait_for_previous_kernel()
    lane = tl.arange(0, TOKENS)
    total = tl.zeros((), tl.int64)
    longest = tl.full((), 1, tl.int32)
    for PASS in tl.static_range(4):
        if PASS == 1:
            sizes = _candidates(total, longest, programs)
            counts = tl.zeros((_SIZES,), tl.int32)
        elif PASS == 2:
            size = _best_size(counts, sizes, total, longest, num_tokens, programs)
            members = tl.zeros((_CLASSES,), tl.int32)
            num_extra = 0  # splits beyond the first of each token
        elif PASS == 3:
            # tokens with several splits come first, then their extra splits
            is_split_class = tl.arange(0, _CLASSES) == 0
            next_row = tl.cumsum(members, axis=0) - members + tl.where(is_split_class, 0, num_extra)
            # row of the next extra split
            extra_row = tl.sum(tl.where(is_split_class, members, 0), axis=0)
            stop = num_tokens + programs
            num_partials = 0  # partial results of earlier tokens
        first = 0
        while first < num_tokens:
            token = first + lane
            mask = token < num_tokens
            lengths = tl.load(swa_lens + token.to(tl.int64) * swa_stride, mask=mask, other=0)
            tiles = _tiles(lengths)
            if HAS_EXTRA:
                address = extra_lens + token.to(tl.int64) * extra_stride
                tiles += _tiles(tl.load(address, mask=mask, other=0))
            if PASS == 0:
                total += tl.sum(tiles.to(tl.int64), axis=0)
                longest = tl.maximum(longest, tl.max(tiles, axis=0))
            elif PASS == 1:
                splits = _splits_of(tiles[None, :], sizes[:, None])
                counts += tl.sum(tl.where(mask[None, :], splits, 0), axis=1)
            elif PASS == 2:
                members += tl.sum(_class_members(tiles, mask, size), axis=0)
                num_extra += tl.sum(tl.where(mask, _splits_of(tiles, size) - 1, 0), axis=0)
            else:
                splits = tl.where(mask, _splits_of(tiles, size), 1)
                partials = tl.where(splits > 1, splits, 0)
                first_partial = tl.where(
                    splits > 1, num_partials + tl.cumsum(partials, axis=0) - partials, 0
                )
                is_member = _class_members(tiles, mask, size)
                row = tl.sum(
                    is_member * (next_row[None, :] + tl.cumsum(is_member, axis=0) - 1), axis=1
                )
                next_row += tl.sum(is_member, axis=0)
                extra_rows = extra_row + tl.cumsum(splits - 1, axis=0) - (splits - 1)
                _store_rows(plan, row, mask, token, tl.zeros_like(token), splits, first_partial)
                split = 1
                max_splits = tl.max(splits, axis=0)
                while split < max_splits:
                    offset = extra_rows + split - 1
                    in_plan = (split < splits) & (offset < stop)
                    split_index = tl.zeros_like(token) + split
                    _store_rows(plan, offset, in_plan, token, split_index, splits, first_partial)
                    split += 1
                num_partials += tl.sum(partials, axis=0)
                extra_row += tl.sum(splits - 1, axis=0)
            first += TOKENS
    row = num_tokens + num_extra
    while row < stop:
        offset = row + lane
        absent = tl.zeros_like(offset) - 1
        _store_rows(plan, offset, offset < stop, absent, absent, absent, absent)
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

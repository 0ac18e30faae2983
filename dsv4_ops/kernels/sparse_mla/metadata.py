"""FlashMLA's tile scheduler metadata, made by one warp: a part begins where the one before ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.tiles import KEY_TILE, METADATA_COLUMNS, PART_OVERHEAD
from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.launcher import Launcher

TOKENS = tl.constexpr(128)
"""Tokens that the warp looks at together."""

_KEYS, _OVERHEAD = tl.constexpr(KEY_TILE), tl.constexpr(PART_OVERHEAD)
_COLUMNS, _LARGEST = tl.constexpr(METADATA_COLUMNS), tl.constexpr(INT32_MAX)


@triton.jit
def _blocks(lengths, width):
    lengths = tl.minimum(tl.maximum(lengths, 0), width)
    # the usual sum, lengths + _KEYS - 1, could pass the largest int32
    return lengths // _KEYS + (lengths % _KEYS > 0).to(tl.int32)


@triton.jit
def _row(first, last, first_block, stop_block, shared, splits_first, splits_last):
    column = tl.arange(0, _COLUMNS)
    row = tl.where(column == 0, first, 0) + tl.where(column == 1, last, 0)
    row += tl.where(column == 2, first_block, 0) + tl.where(column == 3, stop_block, 0)
    row += tl.where(column == 4, shared, 0) + tl.where(column == 5, splits_first, 0)
    return row + tl.where(column == 6, splits_last, 0)


@triton.jit
def flash_mla_metadata_kernel(
    swa_lens, swa_stride,
    extra_lens, extra_stride,
    out, num_tokens, swa_width, extra_width, num_parts,
    HAS_EXTRA: tl.constexpr,
):  # fmt: skip
    """Tokens lie one behind the other, each as long as its blocks and its overhead. A part takes a
    share of all and one overhead more, and ends at the start of the token in whose overhead that
    would end, or else an overhead earlier, inside of a token. The end of all counts as a token.
    Starts are relative to the tile of tokens, so that int32 holds them."""
    lane, column = tl.arange(0, TOKENS), tl.arange(0, _COLUMNS)
    counts = out + num_parts * _COLUMNS
    total = tl.zeros((), tl.int64)
    for PASS in tl.static_range(2):
        if PASS == 1:
            share = (total + num_parts - 1) // num_parts + _OVERHEAD
            part = tl.zeros((), tl.int32)
            token, block, shared, cuts = part, part, part, part
            tile_start, end = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
            before = tl.full((), -_OVERHEAD, tl.int32)  # start of the token before the tile
        first = 0
        while first <= num_tokens:
            index = first + lane
            there = index < num_tokens
            lengths = tl.load(swa_lens + index.to(tl.int64) * swa_stride, mask=there, other=0)
            size = tl.maximum(_blocks(lengths, swa_width), 1)
            if HAS_EXTRA:
                place = extra_lens + index.to(tl.int64) * extra_stride
                size += _blocks(tl.load(place, mask=there, other=0), extra_width)
            size = tl.where(there, size + _OVERHEAD, 0)
            tile_size = tl.sum(size, axis=0)
            if PASS == 0:
                total += tile_size
            else:
                starts = tl.cumsum(size, axis=0) - size
                exists = index <= num_tokens
                stop = tl.where(first + TOKENS > num_tokens, total + 1, tile_start + tile_size)
                cuts_before = tl.zeros((TOKENS,), tl.int32) + cuts
                reached = tl.minimum(end + share, total)
                while (part < num_parts) & (reached < stop):
                    offset = tl.minimum(reached - tile_start, _LARGEST).to(tl.int32)
                    passed = exists & (starts <= offset)
                    start = tl.max(tl.where(passed, starts, 0), axis=0)
                    end = tl.maximum(reached - _OVERHEAD, tile_start + start)
                    next_token = first + tl.sum(passed.to(tl.int32), axis=0) - 1
                    next_block = (end - tile_start).to(tl.int32) - start
                    inside = next_block > 0
                    ahead = tl.max(tl.where(starts < start, starts, before), axis=0)
                    last = tl.where(inside, next_token, next_token - 1)
                    stop_block = tl.where(inside, next_block, start - ahead - _OVERHEAD)
                    begun, alone = block > 0, token == last
                    splits_first = (begun | (alone & inside)).to(tl.int32)
                    splits_last = (inside | (alone & begun)).to(tl.int32)
                    row = _row(token, last, block, stop_block, shared, splits_first, splits_last)
                    tl.store(out + part.to(tl.int64) * _COLUMNS + column, row)
                    again = tl.where(begun & (next_token == token), shared + 1, 1)
                    shared = tl.where(inside, again, 0)
                    cuts += inside.to(tl.int32)
                    cuts_before += (inside & (starts > start)).to(tl.int32)
                    token, block = next_token, next_block
                    reached = tl.minimum(end + share, total)
                    part += 1
                tl.store(counts + index, index + cuts_before, mask=exists)
                before = tl.max(starts, axis=0) - tile_size
                tile_start += tile_size
            first += TOKENS
    rest = num_tokens + 1
    while rest < (num_tokens + 1) * _COLUMNS:
        offset = rest + lane
        none = tl.zeros_like(offset)
        tl.store(counts + offset, none, mask=offset < (num_tokens + 1) * _COLUMNS)
        rest += TOKENS


def flash_mla_metadata(
    launch: Launcher,
    swa_lens: Tensor,
    extra_lens: Tensor | None,
    *,
    swa_width: int,
    extra_width: int,
    num_sm_parts: int,
) -> Tensor:
    num_tokens = swa_lens.shape[0]
    num_rows = num_sm_parts + num_tokens + 1
    metadata = swa_lens.new_empty((num_rows, METADATA_COLUMNS), dtype=torch.int32)
    extra = swa_lens if extra_lens is None else extra_lens
    launch(flash_mla_metadata_kernel)[(1,)](
        *strided(swa_lens, extra), metadata, num_tokens, swa_width, extra_width, num_sm_parts,
        HAS_EXTRA=extra_lens is not None, num_warps=1,
    )  # fmt: skip
    return metadata

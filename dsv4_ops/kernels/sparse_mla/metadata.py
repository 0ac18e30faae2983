"""The kernel that computes FlashMLA's tile scheduler metadata. The kernel runs as one warp, because
a part begins where the previous part ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.tiles import KEY_TILE, METADATA_COLUMNS, PART_OVERHEAD
from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher

TOKENS = tl.constexpr(128)
"""Tokens that the warp loads at a time."""

_KEYS, _OVERHEAD = tl.constexpr(KEY_TILE), tl.constexpr(PART_OVERHEAD)
_COLUMNS, _LARGEST = tl.constexpr(METADATA_COLUMNS), tl.constexpr(INT32_MAX)


@triton.jit
def _blocks(lengths, width):
    lengths = tl.minimum(tl.maximum(lengths, 0), width)
    # lengths + _KEYS - 1 could overflow int32
    return lengths // _KEYS + (lengths % _KEYS > 0).to(tl.int32)


@triton.jit
def _row(first, last, first_block, stop_block, first_split, splits_first, splits_last):
    """Return the row of a part in the order of FlashMLA's columns."""
    column = tl.arange(0, _COLUMNS)
    row = tl.where(column == 0, first, 0) + tl.where(column == 1, last, 0)
    row += tl.where(column == 2, first_block, 0) + tl.where(column == 3, stop_block, 0)
    row += tl.where(column == 4, first_split, 0) + tl.where(column == 5, splits_first, 0)
    return row + tl.where(column == 6, splits_last, 0)


@triton.jit(do_not_specialize=SIZES)
def flash_mla_metadata_kernel(
    swa_lens, swa_stride,
    extra_lens, extra_stride,
    out, num_tokens, swa_width, extra_width, num_parts,
    HAS_EXTRA: tl.constexpr,
):  # fmt: skip
    """Write the metadata of every part, then the number of splits before each token.

    Imagine the tokens in a line, each as long as an overhead plus its blocks. A part takes its
    share of the line plus one overhead. If the part's end then lies in the overhead at the start of
    a token, the part ends at that start; otherwise the part ends one overhead earlier, inside the
    token. The end of the line is treated as the start of one more token. Starts of tokens are
    relative to the current tile of tokens, so that int32 holds them.
    """
    wait_for_previous_kernel()
    lane, column = tl.arange(0, TOKENS), tl.arange(0, _COLUMNS)
    counts = out + num_parts * _COLUMNS
    total = tl.zeros((), tl.int64)
    for PASS in tl.static_range(2):
        if PASS == 1:
            part_size = (total + num_parts - 1) // num_parts + _OVERHEAD
            part = tl.zeros((), tl.int32)
            token, block, first_split, extra_splits = part, part, part, part
            tile_start, end = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
            previous_start = tl.full((), -_OVERHEAD, tl.int32)  # start of the token before the tile
        first = 0
        while first <= num_tokens:
            index = first + lane
            mask = index < num_tokens
            lengths = tl.load(swa_lens + index.to(tl.int64) * swa_stride, mask=mask, other=0)
            size = tl.maximum(_blocks(lengths, swa_width), 1)
            if HAS_EXTRA:
                address = extra_lens + index.to(tl.int64) * extra_stride
                size += _blocks(tl.load(address, mask=mask, other=0), extra_width)
            size = tl.where(mask, size + _OVERHEAD, 0)
            tile_size = tl.sum(size, axis=0)
            if PASS == 0:
                total += tile_size
            else:
                starts = tl.cumsum(size, axis=0) - size
                valid = index <= num_tokens
                stop = tl.where(first + TOKENS > num_tokens, total + 1, tile_start + tile_size)
                splits_before = tl.zeros((TOKENS,), tl.int32) + extra_splits
                target_end = tl.minimum(end + part_size, total)
                while (part < num_parts) & (target_end < stop):
                    offset = tl.minimum(target_end - tile_start, _LARGEST).to(tl.int32)
                    is_before = valid & (starts <= offset)
                    start = tl.max(tl.where(is_before, starts, 0), axis=0)
                    end = tl.maximum(target_end - _OVERHEAD, tile_start + start)
                    next_token = first + tl.sum(is_before.to(tl.int32), axis=0) - 1
                    next_block = (end - tile_start).to(tl.int32) - start
                    ends_inside = next_block > 0
                    last_start = tl.max(tl.where(starts < start, starts, previous_start), axis=0)
                    last = tl.where(ends_inside, next_token, next_token - 1)
                    stop_block = tl.where(ends_inside, next_block, start - last_start - _OVERHEAD)
                    starts_inside, is_single = block > 0, token == last
                    splits_first = (starts_inside | (is_single & ends_inside)).to(tl.int32)
                    splits_last = (ends_inside | (is_single & starts_inside)).to(tl.int32)
                    row = _row(
                        token, last, block, stop_block, first_split, splits_first, splits_last
                    )
                    tl.store(out + part.to(tl.int64) * _COLUMNS + column, row)
                    next_split = tl.where(starts_inside & (next_token == token), first_split + 1, 1)
                    first_split = tl.where(ends_inside, next_split, 0)
                    extra_splits += ends_inside.to(tl.int32)
                    splits_before += (ends_inside & (starts > start)).to(tl.int32)
                    token, block = next_token, next_block
                    target_end = tl.minimum(end + part_size, total)
                    part += 1
                tl.store(counts + index, index + splits_before, mask=valid)
                previous_start = tl.max(starts, axis=0) - tile_size
                tile_start += tile_size
            first += TOKENS
    padding = num_tokens + 1
    while padding < (num_tokens + 1) * _COLUMNS:
        offset = padding + lane
        zeros = tl.zeros_like(offset)
        tl.store(counts + offset, zeros, mask=offset < (num_tokens + 1) * _COLUMNS)
        padding += TOKENS


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

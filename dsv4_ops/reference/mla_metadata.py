"""FlashMLA's tile scheduler metadata of a sparse decode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.tiles import KEY_TILE, METADATA_COLUMNS, PART_OVERHEAD


def flash_mla_metadata(
    swa_lens: Tensor,
    extra_lens: Tensor | None,
    *,
    swa_width: int,
    extra_width: int,
    num_sm_parts: int,
) -> Tensor:
    """A token takes a place for each of its blocks and for its overhead, one token behind the
    other, so that a place says both token and block. From where a part begins follows where it
    ends, and with that where the next one begins."""
    num_tokens = swa_lens.shape[0]
    blocks = _blocks(swa_lens, swa_width).clamp(min=1)
    most = _blocks_of(swa_width)
    if extra_lens is not None:
        blocks = blocks + _blocks(extra_lens, extra_width)
        most = most + _blocks_of(extra_width)
    first = pad((blocks + PART_OVERHEAD).cumsum(0), (1, 0))
    last = first[-1]
    payload = (last + num_sm_parts - 1) // num_sm_parts + PART_OVERHEAD
    place = torch.arange(num_tokens * (most + PART_OVERHEAD) + 1, device=first.device)
    # the largest first place of a token up to each place
    floor = torch.zeros_like(place).index_copy(0, first, first).cummax(0).values
    reached = (place + payload).clamp(max=last)
    after = torch.maximum(reached - PART_OVERHEAD, floor.index_select(0, reached))
    after = torch.where(place + payload >= last, last, after)
    begins = _iterate(after, num_sm_parts)
    begin = begins[:-1]
    passed = (first[1:] <= begins[:, None]).sum(1)
    block = begins - first.index_select(0, passed)
    begin_token, begin_block = passed[:-1], block[:-1]
    end_token = torch.where(block[1:] > 0, passed[1:], passed[1:] - 1)
    stop = end_token.clamp(min=0)
    whole = first.index_select(0, (stop + 1).clamp(max=num_tokens)) - first.index_select(0, stop)
    whole = (whole - PART_OVERHEAD).clamp(min=0)
    end_block = torch.where(block[1:] > 0, block[1:], whole)
    # parts that begin inside of the token, up to this one
    inside = (begin > first.index_select(0, begin_token)[:, None]) & (begin <= begin[:, None])
    splits = torch.where(begin_block > 0, inside.sum(1), 0)
    cut_before, cut_behind = begin_block > 0, end_block != whole
    alone = begin_token == end_token
    columns = (
        begin_token,
        end_token,
        begin_block,
        end_block,
        splits,
        cut_before | (alone & cut_behind),
        cut_behind | (alone & cut_before),
        torch.zeros_like(splits),
    )
    rows = torch.stack([column.to(torch.int32) for column in columns], 1)
    cuts = torch.where(begin_block > 0, begin, last)
    token = torch.arange(num_tokens + 1, device=first.device)
    num_splits = (token + (cuts < first[:, None]).sum(1)).to(torch.int32)
    behind = pad(num_splits, (0, (num_tokens + 1) * (METADATA_COLUMNS - 1)))
    return torch.cat([rows, behind.view(-1, METADATA_COLUMNS)])


def _blocks(lens: Tensor, width: int) -> Tensor:
    return (lens.long().clamp(0, width) + KEY_TILE - 1) // KEY_TILE


def _blocks_of(width: int) -> int:
    """Most blocks of a list of ``width`` columns, at least one."""
    most: int = torch.sym_max((width + KEY_TILE - 1) // KEY_TILE, 1)
    return most


def _iterate(after: Tensor, count: int) -> Tensor:
    """0, after[0], after[after[0]] and so on, ``count`` times: by powers of two of the function, as
    places for all at once."""
    index = torch.arange(count + 1, device=after.device)
    place = torch.zeros_like(index)
    for bit in range(count.bit_length()):
        place = torch.where((index >> bit) & 1 > 0, after.index_select(0, place), place)
        after = after.index_select(0, after)
    return place

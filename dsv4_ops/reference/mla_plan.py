"""How the keys of a batch are cut into pieces of about the same size."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import (
    CLASSES,
    FURTHER_SHARE,
    KEY_TILE,
    PLAN_FURTHER_TILES,
    PLAN_SIZES,
    PLAN_STEPS,
    START_TILES,
    programs_per_tile,
)
from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.common import take

_PACKED = 2 * PLAN_SIZES


def sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    programs = programs_per_tile(num_heads, num_programs)
    order, counts, first_further = pieces(swa_lens, extra_lens, programs)
    return rows(order, counts, *token_map(first_further, counts - 1, num_tokens=programs))


def pieces(
    swa_lens: Tensor, extra_lens: Tensor | None, programs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, longer ones first and before all those of several pieces; their pieces; and how
    many of those but the first ones there are before each and in all, int32."""
    tiles = _tiles(swa_lens)
    if extra_lens is not None:
        tiles = tiles + _tiles(extra_lens)
    size = _piece_size(tiles, programs)
    shares = tiles * (CLASSES - 2) // size
    order = shares.where(tiles <= size, CLASSES - 1).argsort(stable=True, descending=True)
    counts = ((tiles[order] + size - 1) // size).clamp(min=1)
    first_further = torch.nn.functional.pad((counts - 1).cumsum(0), (1, 0))
    return order.to(torch.int32), counts.to(torch.int32), first_further.to(torch.int32)


def _tiles(lens: Tensor) -> Tensor:
    return (lens.long().clamp(min=0) + KEY_TILE - 1) // KEY_TILE


def _piece_size(tiles: Tensor, programs: int) -> Tensor:
    """Of some sizes from the mean on that make no more further pieces than programs are left, or a
    share of all, the one that takes the least time: of one piece, or of a program's share of all of
    them with their starts; and of the joins. The smallest of several."""
    total, num_tokens = tiles.sum(), tiles.shape[0]
    mean = ((total + programs - 1) // programs).clamp(min=1)
    longest = torch.nn.functional.pad(tiles, (0, 1)).amax().clamp(min=1)
    index = torch.arange(PLAN_SIZES, device=tiles.device)
    step = (mean + PLAN_STEPS - 1) // PLAN_STEPS
    sizes = torch.minimum(mean + index * step, longest)
    sizes = torch.where(index == PLAN_SIZES - 1, longest, sizes)
    counts = ((tiles + sizes[:, None] - 1) // sizes[:, None]).clamp(min=1).sum(1)
    shared, further = total + START_TILES * (counts - programs), counts - num_tokens
    time = torch.maximum(sizes * programs, shared) + PLAN_FURTHER_TILES * further
    most = torch.sym_max(programs - num_tokens, programs // FURTHER_SHARE)
    least = torch.where(further <= most, time * _PACKED + index, 2**62).amin() % _PACKED
    return torch.where(index == least, sizes, 0).sum()


def rows(order: Tensor, counts: Tensor, places: Tensor, index: Tensor) -> Tensor:
    """The plan: the first pieces of those tokens in ``order`` that have several; their further
    ones, of which ``places`` and ``index`` are the tokens' places in the order and how many of
    theirs are before; tokens of one piece; -1 for none."""
    num_tokens = counts.shape[0]
    place = torch.arange(num_tokens, dtype=torch.int32, device=counts.device)
    places = torch.cat([place, places])
    piece = torch.cat([torch.zeros_like(place), index.to(torch.int32) + 1])
    if num_tokens == 0:
        return places[:, None].expand(-1, 4).contiguous()
    shared = torch.where(counts > 1, counts, 0)
    before = torch.where(counts > 1, shared.cumsum(0).to(torch.int32) - shared, 0)
    exists, place = places >= 0, places.clamp(min=0)
    columns = (take(order, place), piece, take(counts, place), take(before, place))
    found = torch.stack([torch.where(exists, column, -1) for column in columns], 1)
    several, further = (counts > 1).sum(), (counts - 1).sum()
    row = torch.arange(found.shape[0], device=counts.device)
    whole = (row >= several + further) & (row < num_tokens + further)
    behind = (row >= several) & (row < several + further)
    row = torch.where(behind, row + num_tokens - several, torch.where(whole, row - further, row))
    return found.index_select(0, row)

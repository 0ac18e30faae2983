"""How the keys of a batch are cut into pieces of about the same size."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import KEY_TILE, PLAN_SIZES, PLAN_STEPS, START_TILES, programs_per_tile
from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.common import take

_PACKED = 2 * PLAN_SIZES


def sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    programs = programs_per_tile(num_heads, num_programs)
    counts, first_further = pieces(swa_lens, extra_lens, programs)
    return rows(counts, *token_map(first_further, counts - 1, num_tokens=programs))


def pieces(swa_lens: Tensor, extra_lens: Tensor | None, programs: int) -> tuple[Tensor, Tensor]:
    """Pieces of every token, and how many but the first ones there are before it and in all,
    int32."""
    tiles = _tiles(swa_lens)
    if extra_lens is not None:
        tiles = tiles + _tiles(extra_lens)
    size = _piece_size(tiles, programs)
    counts = ((tiles + size - 1) // size).clamp(min=1)
    first_further = torch.nn.functional.pad((counts - 1).cumsum(0), (1, 0))
    return counts.to(torch.int32), first_further.to(torch.int32)


def _tiles(lens: Tensor) -> Tensor:
    return (lens.long().clamp(min=0) + KEY_TILE - 1) // KEY_TILE


def _piece_size(tiles: Tensor, programs: int) -> Tensor:
    """Of some sizes from the mean on, the one whose rounds of programs take the least time, in
    which a program's start takes as long as START_TILES tiles; the smallest of several such."""
    mean = ((tiles.sum() + programs - 1) // programs).clamp(min=1)
    longest = torch.nn.functional.pad(tiles, (0, 1)).amax().clamp(min=1)
    index = torch.arange(PLAN_SIZES, device=tiles.device)
    step = (mean + PLAN_STEPS - 1) // PLAN_STEPS
    sizes = torch.minimum(mean + index * step, longest)
    sizes = torch.where(index == PLAN_SIZES - 1, longest, sizes)
    counts = ((tiles + sizes[:, None] - 1) // sizes[:, None]).clamp(min=1)
    rounds = (counts.sum(1) + programs - 1) // programs
    least = (rounds * (START_TILES + sizes) * _PACKED + index).amin() % _PACKED
    return torch.where(index == least, sizes, 0).sum()


def rows(counts: Tensor, tokens: Tensor, index: Tensor) -> Tensor:
    """The plan: the first piece of every token, then the further ones, of which ``tokens`` and
    ``index`` are the tokens and how many of theirs are before; -1 for those that are none."""
    token = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device)
    tokens = torch.cat([token, tokens])
    piece = torch.cat([torch.zeros_like(token), index.to(torch.int32) + 1])
    if counts.shape[0] == 0:
        return tokens[:, None].expand(-1, 4).contiguous()
    shared = torch.where(counts > 1, counts, 0)
    before = shared.cumsum(0).to(torch.int32) - shared
    exists, token = tokens >= 0, tokens.clamp(min=0)
    columns = (tokens, piece, take(counts, token), take(before, token))
    return torch.stack([torch.where(exists, column, -1) for column in columns], 1)

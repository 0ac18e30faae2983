"""How the keys of a batch are cut into pieces of about the same size."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import KEY_TILE, programs_per_tile
from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.common import take


def sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    counts, first_piece = pieces(swa_lens, extra_lens, num_heads, num_programs)
    num_pieces = swa_lens.shape[0] + programs_per_tile(num_heads, num_programs)
    found = token_map(first_piece, counts, num_tokens=num_pieces)
    return rows(counts, *found)


def pieces(
    swa_lens: Tensor, extra_lens: Tensor | None, num_heads: int, num_programs: int
) -> tuple[Tensor, Tensor]:
    """Pieces of every token, and how many there are before it and in all, int32."""
    tiles = _tiles(swa_lens)
    if extra_lens is not None:
        tiles = tiles + _tiles(extra_lens)
    programs = programs_per_tile(num_heads, num_programs)
    size = ((tiles.sum() + programs - 1) // programs).clamp(min=1)
    counts = ((tiles + size - 1) // size).clamp(min=1)
    first_piece = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return counts.to(torch.int32), first_piece.to(torch.int32)


def _tiles(lens: Tensor) -> Tensor:
    return (lens.long().clamp(min=0) + KEY_TILE - 1) // KEY_TILE


def rows(counts: Tensor, tokens: Tensor, index: Tensor) -> Tensor:
    """The plan, of the token of every piece and the piece's index in it."""
    if counts.shape[0] == 0:
        return tokens[:, None].expand(-1, 4).contiguous()
    shared = torch.where(counts > 1, counts, 0)
    before = shared.cumsum(0).to(torch.int32) - shared
    exists, token = tokens >= 0, tokens.clamp(min=0)
    columns = (tokens, index.to(torch.int32), take(counts, token), take(before, token))
    return torch.stack([torch.where(exists, column, -1) for column in columns], 1)

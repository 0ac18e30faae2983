"""Context parallelism: which rows of a sequence a rank owns, and what the rank contributes to the
attention."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.ints import single
from dsv4_ops.core.types import ABSENT, INT32_MAX
from dsv4_ops.reference.common import (
    dense,
    gather_rows,
    quotient,
    remainder,
    table_entries,
    valid_tokens,
)
from dsv4_ops.reference.indexer import ABSENT_KEY, best, sortable
from dsv4_ops.reference.mla_context import existing, functions, weighted


def cp_seq_lens(
    seq_lens: Tensor, cp_rank: Tensor | None, *, cp_world_size: int, cp_interleave: int
) -> Tensor:
    lens = seq_lens.long().clamp(min=0)
    if cp_rank is None:
        lens = lens[:, None]
        rank = torch.arange(cp_world_size, device=seq_lens.device)
    else:
        rank = single(cp_rank)
    round_size = cp_interleave * cp_world_size
    rounds, rest = quotient(lens, round_size), remainder(lens, round_size)
    turn = (rest - rank.long() * cp_interleave).clamp(0, cp_interleave)
    local_lens = rounds * cp_interleave + turn
    return torch.where((rank >= 0) & (rank < cp_world_size), local_lens, 0).to(torch.int32)


def cp_slot_mapping(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    cp_rank: Tensor,
    *,
    block_size: int,
    cp_world_size: int,
    cp_interleave: int,
) -> Tensor:
    exists = valid_tokens(positions, req_indices, block_table.shape[0])
    position = torch.where(exists, positions, 0)
    row = position
    if cp_world_size > 1:
        owner, row = _placed(position, cp_world_size, cp_interleave)
        exists = exists & (owner == single(cp_rank))
    column = quotient(row, block_size)
    pages = table_entries(block_table, req_indices, column, exists).long()
    return torch.where(pages >= 0, pages * block_size + remainder(row, block_size), ABSENT)


def cp_row_indices(
    req_indices: Tensor,
    positions: Tensor,
    local_starts: Tensor,
    local_cu_seq_lens: Tensor,
    *,
    num_local_rows: int,
    cp_world_size: int,
    cp_interleave: int,
) -> Tensor:
    exists = valid_tokens(positions, req_indices, local_starts.shape[0])
    owner, row = _placed(torch.where(exists, positions, 0), cp_world_size, cp_interleave)
    start = gather_rows(local_starts, req_indices, exists).long()
    first, last = (
        gather_rows(local_cu_seq_lens, req_indices + end, exists).long() for end in (0, 1)
    )
    index = first + row - start
    inside = (row >= start) & (index < last) & (index >= 0) & (index < num_local_rows)
    return torch.where(exists & inside, owner * num_local_rows + index, ABSENT)


def cp_topk(scores: Tensor, rows: Tensor, *, topk: int, cp_interleave: int) -> Tensor:
    ranks, num_tokens, width = rows.shape
    rank = torch.arange(ranks, device=rows.device)[:, None, None]
    turns, place = (rows // cp_interleave).long(), rows % cp_interleave
    row = (turns * ranks + rank) * cp_interleave + place
    exists = (rows >= 0) & (row < INT32_MAX)
    keys = torch.where(exists, sortable(scores), ABSENT_KEY)
    keys, row = (
        each.transpose(0, 1).reshape(num_tokens, ranks * width)
        for each in (keys, torch.where(exists, row, 0))
    )
    return best(keys, topk, row)


def cp_local_rows(
    rows: Tensor, cp_rank: Tensor, *, cp_world_size: int, cp_interleave: int
) -> tuple[Tensor, Tensor]:
    num_tokens, topk = rows.shape
    owner, local = _placed(rows, cp_world_size, cp_interleave)
    own = (rows >= 0) & (owner == single(cp_rank))
    # rows of other ranks all go into a spare column after the result
    place = torch.where(own, own.cumsum(1) - 1, topk)
    packed = rows.new_full((num_tokens, topk + 1), ABSENT).scatter(1, place, local)
    return dense(packed[:, :topk]), own.sum(1, dtype=torch.int32)


def _placed(position: Tensor, cp_world_size: int, cp_interleave: int) -> tuple[Tensor, Tensor]:
    """Return the rank that owns a position, and the position's row on that rank."""
    turns = quotient(position, cp_interleave)
    row = quotient(turns, cp_world_size) * cp_interleave + remainder(position, cp_interleave)
    return remainder(turns, cp_world_size), row


def cp_correct_out(
    out: Tensor, lse: Tensor, lses: Tensor, *, lse_base: str
) -> tuple[Tensor, Tensor]:
    exp, log = functions(lse_base)
    parts = existing(lses)
    row_max = parts.amax(0)
    origin = torch.where(row_max == -torch.inf, 0.0, row_max)
    total = exp(parts - origin).sum(0)
    own = exp(existing(lse) - origin)
    share = torch.where(own > 0, own / total, 0.0)
    return weighted(out, share).to(out.dtype), origin + log(total)

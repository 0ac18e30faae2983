"""Fakes of context parallelism."""

from __future__ import annotations

import torch
from torch import Tensor


def cp_seq_lens(seq_lens: Tensor, cp_rank: Tensor | None, cp_world_size: int) -> Tensor:
    size = seq_lens.shape[0]
    return seq_lens.new_empty((size,) if cp_rank is not None else (size, cp_world_size))


def cp_slot_mapping(positions: Tensor) -> Tensor:
    return positions.new_empty((positions.shape[0],))


cp_row_indices = cp_slot_mapping


def cp_topk(rows: Tensor, topk: int) -> Tensor:
    return rows.new_empty((rows.shape[1], topk))


def cp_local_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape[:1])


def cp_correct_out(out: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape), out.new_empty(out.shape[:2], dtype=torch.float32)


def gathered(part: Tensor, world: int, dim: int) -> Tensor:
    return part.new_empty((*part.shape[:dim], world * part.shape[dim], *part.shape[dim + 1 :]))

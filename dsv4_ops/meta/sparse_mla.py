"""Fakes of sparse MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import METADATA_COLUMNS, PLAN_COLUMNS, programs_per_tile
from dsv4_ops.core.types import SparseMla


def sparse_mla_plan(swa_lens: Tensor, num_heads: int, num_programs: int) -> Tensor:
    num_tiles = swa_lens.shape[0] + programs_per_tile(num_heads, num_programs)
    return swa_lens.new_empty((num_tiles, PLAN_COLUMNS))


def flash_mla_metadata(swa_lens: Tensor, num_sm_parts: int) -> Tensor:
    return swa_lens.new_empty((num_sm_parts + swa_lens.shape[0] + 1, METADATA_COLUMNS))


def sparse_mla(q: Tensor) -> SparseMla:
    """Return fake results of a decode or a prefill."""
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return SparseMla(q.new_empty(q.shape), lse)


def sparse_mla_gathered(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    max_logits, lse = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), max_logits, lse

"""Fake of the plan of sparse MLA."""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.core.tiles import PLAN_COLUMNS, programs_per_tile


def sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    num_pieces = swa_lens.shape[0] + programs_per_tile(num_heads, num_programs)
    return swa_lens.new_empty((num_pieces, PLAN_COLUMNS))

"""Lowerings of sparse MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import programs_per_tile
from dsv4_ops.lowering.kinds import TritonKernel
from dsv4_ops.reference import sparse_mla as reference


def _sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    programs = programs_per_tile(num_heads, num_programs)
    order, counts, first_extra = reference.splits(swa_lens, extra_lens, programs)
    tokens = torch.ops.dsv4_ops.token_map.default(first_extra, counts - 1, num_tokens=programs)
    return reference.rows(order, counts, *tokens)


sparse_mla_plan = TritonKernel(_sparse_mla_plan)

"""Lowerings of sparse MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import programs_per_tile
from dsv4_ops.lowering.kinds import Choices, TritonKernel
from dsv4_ops.reference import sparse_mla as reference


def _sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    programs = programs_per_tile(num_heads, num_programs)
    order, counts, first_extra = reference.splits(swa_lens, extra_lens, programs)
    found = torch.ops.dsv4_ops.token_map.default(first_extra, counts - 1, num_tokens=programs)
    return reference.rows(order, counts, *found)


sparse_mla_plan = TritonKernel(_sparse_mla_plan)


flash_mla_metadata = TritonKernel(reference.flash_mla_metadata)


sparse_mla_decode = Choices(reference.sparse_mla_decode)
sparse_mla_decode_paged = Choices(reference.sparse_mla_decode_paged)
sparse_mla_gathered = Choices(reference.sparse_mla_gathered)


sparse_mla_prefill = Choices(reference.sparse_mla_prefill)

"""Lowerings of the lightning indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.lowering.kinds import TritonKernel
from dsv4_ops.reference import indexer as reference


def _gather_indexer_k(
    k_cache: Tensor,
    cu_seq_lens: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    # a separate op keeps the search out of the loop over the bytes of a row
    req_indices, positions = torch.ops.dsv4_ops.token_map.default(
        cu_seq_lens, cu_seq_lens[1:] - cu_seq_lens[:-1], num_tokens=num_rows
    )
    return reference.keys_at(k_cache, req_indices, positions, block_table, block_size=block_size)


gather_indexer_k = TritonKernel(_gather_indexer_k)

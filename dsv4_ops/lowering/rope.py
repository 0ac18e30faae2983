"""Lowerings of rotary embeddings and the fused query norm."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import InsertedQuery
from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import rope as reference

apply_rope = Decompose(reference.apply_rope)
inverse_rope_group = Decompose(reference.inverse_rope_group)
inverse_rope_group_quantize = Decompose(reference.inverse_rope_group_quantize)


qnorm_rope_kv_insert = TritonKernel(reference.qnorm_rope_kv_insert)


def _qnorm_rope_kv_insert_functional(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str,
) -> InsertedQuery:
    written = k_cache.clone(memory_format=torch.contiguous_format)
    q_out = torch.ops.dsv4_ops.qnorm_rope_kv_insert.default(
        q,
        kv,
        written,
        slot_mapping,
        positions,
        cos_sin_cache,
        eps=eps,
        block_size=block_size,
        layout=layout,
    )
    return InsertedQuery(q_out, written)


qnorm_rope_kv_insert_functional = Decompose(_qnorm_rope_kv_insert_functional)

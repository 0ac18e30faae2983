"""Lowerings of dense MLA."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsv4_ops.core.types import MlaAttention
from dsv4_ops.lowering.kinds import Choices
from dsv4_ops.reference import mla as reference


def _mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int,
    layout: str,
    **unused: Any,
) -> MlaAttention:
    """All keys at once: the number of loops over a table of symbolic width is not known."""
    call, running = reference.start_decode(
        q,
        kv_cache,
        seq_lens,
        req_indices,
        block_table,
        (q_scale, kv_scale),
        softmax_scale=softmax_scale,
        block_size=block_size,
        kv_lora_rank=kv_lora_rank,
        layout=layout,
    )
    running = reference.attend_to(call, running, 0, block_table.shape[1] * block_size)
    return reference.finish_decode(call, running, kv_scale)


mla_decode = Choices(_mla_decode)

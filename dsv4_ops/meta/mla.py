"""Fakes of dense MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import MlaAttention


def mla_decode(q: Tensor, kv_lora_rank: int) -> MlaAttention:
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_empty((*q.shape[:2], kv_lora_rank), dtype=dtype)
    return MlaAttention(out, q.new_empty(q.shape[:2], dtype=torch.float32))

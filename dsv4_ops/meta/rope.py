"""Fakes of the rotary embeddings and of the fused query norm."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import ACTIVATION_BLOCK, TOKEN_ALIGNMENT, round_up
from dsv4_ops.core.types import QuantizedGroups


def apply_rope(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def inverse_rope_group(o: Tensor, num_groups: int) -> Tensor:
    num_tokens, num_heads, dim = o.shape
    return o.new_empty((num_tokens, num_groups, num_heads // num_groups * dim))


def inverse_rope_group_quantize(o: Tensor, num_groups: int, scale_layout: str) -> QuantizedGroups:
    num_tokens, num_heads, dim = o.shape
    width = num_heads // num_groups * dim
    values = o.new_empty((num_groups, num_tokens, width), dtype=torch.float8_e4m3fn)
    scales, padded = width // ACTIVATION_BLOCK, round_up(num_tokens, TOKEN_ALIGNMENT)
    shapes = {
        "row": (num_groups, num_tokens, scales),
        "column_padded": (num_groups, scales, padded),
        "ue8m0_packed": (num_groups, scales // 4, padded),
    }
    dtype = torch.int32 if scale_layout == "ue8m0_packed" else torch.float32
    return QuantizedGroups(values, o.new_empty(shapes[scale_layout], dtype=dtype))


def qnorm_rope_kv_insert(q: Tensor) -> Tensor:
    return q.new_empty(q.shape)

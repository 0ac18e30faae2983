"""References of the rotary embeddings and of the fused query norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.layout import (
    ACTIVATION_BLOCK,
    ACTIVATION_FLOOR,
    TOKEN_ALIGNMENT,
    MainLayout,
    round_up,
)
from dsv4_ops.core.types import QuantizedGroups
from dsv4_ops.core.yarn import YarnScaling
from dsv4_ops.reference.common import dense
from dsv4_ops.reference.kv_cache import insert_bits, insert_k_cache
from dsv4_ops.reference.quantization import (
    as_e4m3,
    bf16_bits,
    from_bytes,
    quantize,
    scale_values,
)
from dsv4_ops.reference.rotation import rotate_values


def rope_cos_sin_cache(
    num_positions: int,
    *,
    theta: float,
    rope_dim: int,
    scaling: YarnScaling | None,
    device: torch.device | str | None,
) -> Tensor:
    pairs = torch.arange(rope_dim // 2, dtype=torch.float64, device="cpu")
    frequencies = theta ** (-2 * pairs / rope_dim)
    if scaling is not None:
        slowdowns = scaling.slowdowns(rope_dim, theta)
        frequencies = frequencies * torch.tensor(slowdowns, dtype=torch.float64, device="cpu")
    positions = torch.arange(num_positions, dtype=torch.float64, device="cpu")
    angles = positions[:, None] * frequencies
    return torch.cat([angles.cos().to(torch.float32), angles.sin().to(torch.float32)], 1).to(device)


def apply_rope(
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    inverse: bool,
    rope_first: bool = False,
    interleaved: bool = True,
) -> Tensor:
    rotated = rotate_values(
        x.to(torch.float32),
        positions,
        cos_sin_cache,
        inverse=inverse,
        rope_first=rope_first,
        interleaved=interleaved,
    )
    return dense(rotated.to(x.dtype))


def inverse_rope_group(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, num_groups: int
) -> Tensor:
    num_tokens, num_heads, dim = o.shape
    rotated = rotate_values(o.to(torch.float32), positions, cos_sin_cache, inverse=True).to(o.dtype)
    # not ``dense``, whose copy would be a separate kernel before the view
    return rotated.contiguous().view(num_tokens, num_groups, num_heads // num_groups * dim)


def inverse_rope_group_quantize(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, num_groups: int, scale_layout: str
) -> QuantizedGroups:
    rows = inverse_rope_group(o, positions, cos_sin_cache, num_groups=num_groups)
    bits = bf16_bits(rows.transpose(0, 1))
    codes, scale = quantize(bits, ACTIVATION_BLOCK, ACTIVATION_FLOOR)
    values = as_e4m3(dense(codes))
    if scale_layout == "row":
        return QuantizedGroups(values, dense(scale_values(scale)))
    packed = from_bytes(scale, 4) if scale_layout == "ue8m0_packed" else scale_values(scale)
    padding = round_up(o.shape[0], TOKEN_ALIGNMENT) - o.shape[0]
    return QuantizedGroups(values, dense(pad(packed.transpose(1, 2), (0, padding))))


NAN_BITS = 0x7FC0
"""The bits that the cache stores for every NaN from the rotation, so that all devices store the
same bits."""


def _normed(q: Tensor, eps: float) -> Tensor:
    values = q.to(torch.float32)
    return values * torch.rsqrt((values * values).mean(-1, keepdim=True) + eps)


def _rotated_bits(kv: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return the bf16 patterns, int32, of rotated keys; unrotated values keep their bits."""
    first = kv.shape[1] - cos_sin_cache.shape[1]
    rope = rotate_values(kv[:, first:].to(torch.float32), positions, cos_sin_cache)
    rope_bits = torch.where(rope.isnan(), NAN_BITS, bf16_bits(rope.to(torch.bfloat16)))
    return torch.cat([bf16_bits(kv[:, :first]), rope_bits], 1)


def qnorm_rope_kv_insert(
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
) -> Tensor:
    rotated = rotate_values(_normed(q, eps), positions, cos_sin_cache)
    num_slots = slot_mapping.shape[0]
    bits = _rotated_bits(kv[:num_slots], positions[:num_slots], cos_sin_cache)
    if layout == MainLayout.tag:
        insert_bits(bits, k_cache, slot_mapping, block_size)
    else:
        insert_k_cache(bits.to(torch.int16), k_cache, slot_mapping)
    return dense(rotated.to(torch.bfloat16))

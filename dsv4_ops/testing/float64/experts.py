"""Routed experts in float64, and the sampled routing and weights that their cases share."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.testing.case import Exact, i32
from dsv4_ops.testing.float64.linear import SUM_ROUNDINGS, block_values, scale_values
from dsv4_ops.testing.float64.rope import exact
from dsv4_ops.testing.strategies.draw import Draw

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BF16_UNIT = 2.0**-8 / 2
ADVERSARIAL_IDS = (-1, -(2**31), 2**31 - 1, 2**20)


def fp4_values(weight: Tensor, scale: Tensor) -> Tensor:
    """Decode packed e2m1 codes to float64 by table look-up."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    codes = weight.view(torch.uint8).to(torch.int64)
    low, high = table.to(weight.device)[codes % 16], table.to(weight.device)[codes // 16]
    values = torch.stack([low, high], -1).flatten(-2)
    return values * scale_values(scale).repeat_interleave(32, -1)


def expert_values(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Decode weights in FP4, FP8 or bf16 to float64. Weights in bf16 have no scales."""
    if scale is None:
        return weight.to(torch.float64)
    if weight.dtype == torch.float8_e4m3fn:
        return block_values(weight, scale, 128, 128)
    return fp4_values(weight, scale)


def exact_terms(act: Tensor, weight: Tensor, quantised: bool) -> Exact:
    """Compute ``act @ weight.T`` with the error of rounding ``act`` to bf16. With ``quantised``,
    the error also covers a code of ``act`` that differs by one step."""
    value, terms = act @ weight.t(), act.abs() @ weight.abs().t()
    roundings = 3 * ((act**2) @ (weight**2).t()).sqrt()
    if quantised:  # one code may differ by one e4m3 step
        amax = (act.abs()[:, None] * weight.abs()[None]).amax(-1)
        roundings = roundings + 2.0**-3 / BF16_UNIT * amax
    product = exact(value, terms, torch.bfloat16, SUM_ROUNDINGS)
    return Exact(value, product.magnitude + roundings)


def routing(draw: Draw, num_tokens: int, topk: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sample routing weights and ids. Some ids name no expert; such an id may have any weight."""
    seed = draw.generator()
    ids = torch.randint(0, num_experts, (num_tokens, topk), generator=seed, dtype=torch.int32)
    weights = torch.rand(num_tokens, topk, generator=seed) * 2
    for entry in draw.places(ids.numel(), 4):
        ids.view(-1)[entry] = draw.one_of(*ADVERSARIAL_IDS, num_experts)
        weights.view(-1)[entry] = draw.one_of(torch.nan, torch.inf, 0.0, 1.0)
    return weights, i32(ids.tolist()).view(num_tokens, topk)


def fp4_weight(seed: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Sample packed codes [..., n, k / 2] in the released format, and scales that differ by up to
    2^6."""
    bits = torch.randint(0, 256, shape, generator=seed, dtype=torch.uint8)
    blocks = (*shape[:-1], shape[-1] // 16)
    scale = torch.randint(118, 125, blocks, generator=seed, dtype=torch.uint8)
    bits[..., 0, :16], scale[..., 0, 0] = 0x80, 0  # a block of zeros of either sign
    return bits.view(torch.int8), scale

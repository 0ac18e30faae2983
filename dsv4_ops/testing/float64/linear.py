"""Block-scaled products in float64, and the sampled weights that their cases share."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.testing.case import Exact
from dsv4_ops.testing.float64.rope import exact
from dsv4_ops.testing.strategies.draw import Draw

SUM_ROUNDINGS = 16
"""Allowed number of float32 roundings of a sum of products. Each rounding is relative to the sum of
the absolute products."""


INFINITE_BITS = (0x7F80, 0xFF80)
SPECIAL_BITS = (0x7FC0, 0xFF81, 0x0001, 0x807F, 0x8000, 0x43E0, 0x43E1, 0x38D1)
"""Bits of bf16 values: quiet and signalling NaN, subnormals, -0, 448 and the next value, 1e-4."""


def scale_values(scale: Tensor) -> Tensor:
    """Decode float32 scales or UE8M0 bytes to float64; byte 255 is NaN."""
    if scale.dtype != torch.uint8:
        return scale.to(torch.float64)
    values = torch.exp2(scale.to(torch.float64) - 127)
    return torch.where(scale == 255, torch.nan, values)


def block_values(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Decode codes [..., n, k] with a scale per ``rows`` x ``columns`` block to float64."""
    spread = scale_values(scale).repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return codes.to(torch.float64) * spread


def exact_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Exact:
    """Compute ``x @ weight.T`` of float64 values."""
    product = x @ weight.transpose(-2, -1)
    terms = x.abs() @ weight.abs().transpose(-2, -1)
    return exact(product, terms, dtype, SUM_ROUNDINGS)


def fp8_weight(seed: torch.Generator, *shape: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Sample codes of either sign and scales that differ by up to 2^12; one block is 0."""
    bits = torch.randint(0, 256, shape, generator=seed, dtype=torch.uint8)
    bits = torch.where(bits & 0x7F == 0x7F, 0x38, bits)  # released weights have no NaN
    blocks = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    scale = torch.randint(116, 129, blocks, generator=seed, dtype=torch.uint8)
    bits[..., :128, :128] = 0
    scale[..., 0, 0] = 0
    codes = bits.view(torch.float8_e4m3fn)
    if ue8m0:
        return codes, scale
    spread = 1 + torch.rand(blocks, generator=seed)
    return codes, torch.exp2(scale.float() - 127) * spread


def activations(draw: Draw, *shape: int, infinite: bool) -> Tensor:
    """Sample bf16 activations with a different scale per row, and some special values."""
    seed = draw.generator()
    size = torch.exp2(torch.randint(-8, 5, (*shape[:-1], 1), generator=seed).float())
    x = (torch.randn(shape, generator=seed) * size).to(torch.bfloat16)
    bits = x.view(torch.int16).view(-1)
    for index in draw.places(x.numel(), 2):
        pattern = draw.one_of(*SPECIAL_BITS, *INFINITE_BITS * infinite)
        bits[index] = pattern - (pattern & 0x8000) * 2
    return x

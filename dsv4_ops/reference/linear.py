"""References of the block-scaled FP8 linear layers, and of the quantisation of their
activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.layout import ACTIVATION_BLOCK, TOKEN_ALIGNMENT, WEIGHT_BLOCK, round_up
from dsv4_ops.core.types import NormedPair, QuantizedRows
from dsv4_ops.reference.common import dense
from dsv4_ops.reference.quantization import (
    as_e4m3,
    bf16_bits,
    e4m3_values,
    float_values,
    quantize_blocks,
    ue8m0_values,
)

ACTIVATION_AMAX = 1e-4
"""Minimum amax of an activation block, as in DeepSeek's code."""


def quantize_rows(
    x: Tensor, *, block: int, scale: str, min_amax: float, scale_layout: str
) -> QuantizedRows:
    codes, scales = quantize_blocks(bf16_bits(x), block, scale == "pow2", min_amax)
    values = as_e4m3(dense(codes))
    if scale_layout == "row":
        return QuantizedRows(values, dense(scales))
    padding = round_up(x.shape[0], TOKEN_ALIGNMENT) - x.shape[0]
    return QuantizedRows(values, dense(pad(scales.t(), (0, padding))))


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None = None,
    *,
    activations: str,
    out_dtype: torch.dtype,
    impl: str = "auto",
) -> Tensor:
    rows = activation_values(x, x_scale, activations)
    return (rows @ weight_values(weight, scale).t()).to(out_dtype)


def fp8_linear_norms(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    first_norm: Tensor,
    second_norm: Tensor,
    *,
    eps: float,
    activations: str,
) -> NormedPair:
    product = fp8_linear(x, weight, scale, activations=activations, out_dtype=torch.bfloat16).to(
        torch.float32
    )
    norms = (first_norm, second_norm)
    parts = product.split([each.shape[0] for each in norms], 1)
    normed = (
        part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * norm
        for part, norm in zip(parts, norms, strict=True)
    )
    return NormedPair(*(dense(each.to(x.dtype)) for each in normed))


def fp8_linear_swiglu(
    x: Tensor, weight: Tensor, scale: Tensor, *, swiglu_limit: float, activations: str
) -> Tensor:
    product = fp8_linear(x, weight, scale, activations=activations, out_dtype=torch.bfloat16)
    gate, up = product.to(torch.float32).chunk(2, 1)
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return dense((gate * torch.sigmoid(gate) * up).to(x.dtype))


def fp8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None = None,
    *,
    activations: str,
    out_dtype: torch.dtype,
    impl: str = "auto",
) -> Tensor:
    rows = activation_values(x, x_scale, activations)
    # make tokens the last, dense dimension; otherwise Inductor on a CPU guards on num_tokens == 1
    groups = dense(rows.permute((1, 2, 0) if x_scale is None else (0, 2, 1)))
    num_groups, _, num_tokens = groups.shape
    values = weight_values(weight, scale).unflatten(0, (num_groups, -1))
    products = torch.bmm(values, groups).to(out_dtype)
    return dense(products.permute(2, 0, 1)).view(num_tokens, weight.shape[0])


def activation_values(x: Tensor, x_scale: Tensor | None, activations: str) -> Tensor:
    """Return activations as float32: either unchanged, or quantised in blocks of 128 and then
    dequantised."""
    if x_scale is not None:
        codes, scales = x.view(torch.uint8), x_scale
    elif activations == "fp8":
        codes, scales = _codes_of(x)
    else:
        return x.to(torch.float32)
    blocks = e4m3_values(codes).unflatten(-1, (scales.shape[-1], ACTIVATION_BLOCK))
    values: Tensor = blocks * scales.unsqueeze(-1)
    return values.flatten(-2)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to e4m3 codes and float32 power-of-two scales, like DeepSeek's code."""
    codes, scales = _codes_of(x)
    return as_e4m3(codes), scales


def _codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_blocks(bf16_bits(x), ACTIVATION_BLOCK, True, ACTIVATION_AMAX)


def weight_values(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantise e4m3 codes [..., n, k], with a scale per 128 x 128 block, to float32."""
    rows, columns = scale.shape[-2:]
    blocks = float_values(weight).unflatten(-1, (columns, WEIGHT_BLOCK))
    blocks = blocks.unflatten(-3, (rows, WEIGHT_BLOCK))
    values: Tensor = blocks * scale_values(scale)[..., :, None, :, None]
    return values.flatten(-2).flatten(-3, -2)


def scale_values(scale: Tensor) -> Tensor:
    """Return scales, float32 or UE8M0 bytes, as float32."""
    return ue8m0_values(scale) if scale.dtype == torch.uint8 else scale

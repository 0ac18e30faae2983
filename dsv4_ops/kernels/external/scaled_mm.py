"""``impl="scaled_mm"`` of FP8 linear layers: torch's ``_scaled_mm_v2`` with block scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.layout import round_up
from dsv4_ops.reference.linear import quantized, scale_values

# values of torch.nn.functional.ScalingType and SwizzleType, which Dynamo in torch 2.11 cannot trace
BLOCKS_1X128, BLOCKS_128X128, NO_SWIZZLE = 4, 5, 0

ROWS = 8
"""Rows are padded to a multiple of this number, because cublasLt refuses a single row."""


def fp8_linear(
    launch,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    *,
    out_dtype: torch.dtype,
    **_: Any,
) -> Tensor:
    """Call torch's op once. A compiler fuses the quantisation, which precedes the call."""
    if x.shape[0] == 0:
        return x.new_empty((0, weight.shape[0]), dtype=out_dtype)
    codes, scales = quantized(x) if x_scale is None else (x, x_scale)
    return _product(codes, scales, weight, scale_values(scale), out_dtype)


def fp8_grouped_linear(
    launch,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    *,
    out_dtype: torch.dtype,
    **_: Any,
) -> Tensor:
    """Call torch's op once per group, because torch's grouped matmul has no block scales."""
    num_groups, num_tokens = (x.shape[1], x.shape[0]) if x_scale is None else x.shape[:2]
    if num_tokens == 0:
        return x.new_empty((0, weight.shape[0]), dtype=out_dtype)
    codes, scales = quantized(x.transpose(0, 1)) if x_scale is None else (x, x_scale)
    weights = weight.unflatten(0, (num_groups, -1))
    blocks = scale_values(scale).unflatten(0, (num_groups, -1))
    products = [
        _product(codes[group], scales[group], weights[group], blocks[group], out_dtype)
        for group in range(num_groups)
    ]
    return torch.cat(products, 1)


def _product(
    codes: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    num_tokens = codes.shape[0]
    padding = round_up(num_tokens, ROWS) - num_tokens
    codes = pad(codes.contiguous().view(torch.uint8), (0, 0, 0, padding)).view(torch.float8_e4m3fn)
    token_scales = pad(scales.t(), (0, padding)).contiguous().t()
    block_scales = scale.contiguous().t()
    product = block_product(codes, weight.contiguous().t(), token_scales, block_scales, out_dtype)
    return product[:num_tokens].contiguous()


def block_product(
    x: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Return ``x @ weight``. ``x`` has a scale per 1 x 128 values, ``weight`` per 128 x 128."""
    first = [x_scale], [BLOCKS_1X128], [NO_SWIZZLE]
    second = [scale], [BLOCKS_128X128], [NO_SWIZZLE]
    return torch.ops.aten._scaled_mm_v2(x, weight, *first, *second, None, out_dtype)

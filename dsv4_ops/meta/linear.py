"""Fakes of the block-scaled FP8 linear layers, and of the quantisation of their activations."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import TOKEN_ALIGNMENT, round_up
from dsv4_ops.core.types import NormedPair, QuantizedRows


def quantize_rows(x: Tensor, block: int, scale_layout: str) -> QuantizedRows:
    num_tokens, width = x.shape
    values = x.new_empty((num_tokens, width), dtype=torch.float8_e4m3fn)
    shape = (num_tokens, width // block)
    if scale_layout != "row":
        shape = (width // block, round_up(num_tokens, TOKEN_ALIGNMENT))
    return QuantizedRows(values, x.new_empty(shape, dtype=torch.float32))


def fp8_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def fp8_linear_norms(x: Tensor, first_norm: Tensor, second_norm: Tensor) -> NormedPair:
    sizes = (x.shape[0], first_norm.shape[0]), (x.shape[0], second_norm.shape[0])
    return NormedPair(*(x.new_empty(size) for size in sizes))


def fp8_linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def fp8_grouped_linear(
    x: Tensor, weight: Tensor, x_scale: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    num_tokens = x.shape[0 if x_scale is None else 1]
    return x.new_empty((num_tokens, weight.shape[0]), dtype=out_dtype)

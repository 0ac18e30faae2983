"""Launchers of the block-scaled FP8 linear layers."""

from dsv4_ops.kernels.linear.gemm import (
    fp8_grouped_linear as fp8_grouped_linear,
    fp8_linear as fp8_linear,
)
from dsv4_ops.kernels.linear.norms import fp8_linear_norms as fp8_linear_norms
from dsv4_ops.kernels.linear.swiglu import fp8_linear_swiglu as fp8_linear_swiglu

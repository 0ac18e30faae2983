"""Lowerings of the block-scaled FP8 linear layers and of their activation quantisation."""

from dsv4_ops.lowering.kinds import Choices, Decompose
from dsv4_ops.reference import linear as reference

quantize_rows = Decompose(reference.quantize_rows)
fp8_linear = Choices(reference.fp8_linear)
fp8_grouped_linear = Choices(reference.fp8_grouped_linear)

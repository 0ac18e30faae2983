"""Lowering of FlashMLA's tile scheduler metadata: prefix sums, gathers and comparisons."""

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import mla_metadata as reference

flash_mla_metadata = Decompose(reference.flash_mla_metadata)

"""Lowerings of the slot stages: their references trace to masked loads and pointwise aten, which
Inductor fuses."""

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import slot_mapping as reference

compressed_slot_mapping = Decompose(reference.compressed_slot_mapping)

"""Lowerings of the rotary embedding: one loop from each reference."""

from __future__ import annotations

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import rope as reference

apply_rope = Decompose(reference.apply_rope)
inverse_rope_group = Decompose(reference.inverse_rope_group)
inverse_rope_group_quantize = Decompose(reference.inverse_rope_group_quantize)

"""Lowerings of routed experts."""

from dsv4_ops.lowering.kinds import Choices
from dsv4_ops.reference import experts as reference

experts = Choices(reference.experts_by_row)

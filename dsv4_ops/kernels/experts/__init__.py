"""Launchers of routed experts and the plan of their blocks."""

from dsv4_ops.kernels.experts.plan import expert_plan
from dsv4_ops.kernels.experts.products import experts

__all__ = ["expert_plan", "experts"]

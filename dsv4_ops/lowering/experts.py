"""Lowerings of routed experts."""

from dsv4_ops.lowering.kinds import Choices, TritonKernel
from dsv4_ops.reference import experts as reference

expert_plan = TritonKernel(reference.expert_plan)
experts = Choices(reference.experts_by_row)
grouped_topk = TritonKernel(reference.grouped_topk)
route = TritonKernel(reference.route)

"""Launchers of routers, of the plan that sorts rows into blocks, and of routed experts."""

from dsv4_ops.kernels.experts.grouped_gemm import experts as experts
from dsv4_ops.kernels.experts.grouped_topk import grouped_topk as grouped_topk
from dsv4_ops.kernels.experts.plan import expert_plan as expert_plan
from dsv4_ops.kernels.experts.route import route as route

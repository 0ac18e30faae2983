"""Fakes of routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import ExpertPlan, Routing, max_expert_blocks


def expert_plan(topk_ids: Tensor, num_experts: int, block_size: int) -> ExpertPlan:
    num_tokens, topk = topk_ids.shape
    blocks = max_expert_blocks(num_tokens * topk, num_experts, block_size)
    return ExpertPlan(
        topk_ids.new_empty((blocks * block_size,)),
        topk_ids.new_empty((blocks,)),
        topk_ids.new_empty((1,)),
    )


def experts(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def route(hidden: Tensor, top_k: int) -> Routing:
    shape = (hidden.shape[0], top_k)
    return Routing(
        hidden.new_empty(shape, dtype=torch.int32), hidden.new_empty(shape, dtype=torch.float32)
    )


def grouped_topk(logits: Tensor, top_k: int) -> Routing:
    return route(logits, top_k)

"""Route each token to experts of the token's best groups, with one program per token."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.types import Routing
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.experts import LEAST_SUM

WARPS = 4
"""Warps per program, as in ``route``. With one warp, a thread would need three times as many
registers."""


@triton.jit
def _nan_to_minus_inf(values):
    return tl.where(values != values, -float("inf"), values)


@triton.jit(do_not_specialize=SIZES)
def grouped_topk_kernel(
    logits, token_stride, expert_stride,
    bias, bias_stride,
    ids, weights,
    SCALE: tl.constexpr, LEAST: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Select the experts of one token. GROUPS, MEMBERS and CHOICES are NUM_GROUPS, GROUP_SIZE and
    TOP_K, each rounded up to a power of two."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    group, member, choice = tl.arange(0, GROUPS), tl.arange(0, MEMBERS), tl.arange(0, CHOICES)
    group_valid = group < NUM_GROUPS
    candidate = group_valid[:, None] & (member < GROUP_SIZE)[None, :]
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    row = logits + token * token_stride + expert.to(tl.int64) * expert_stride
    scores = 1.0 / (1.0 + tl.exp(-tl.load(row, mask=candidate, other=0.0)))
    biased = scores
    if HAS_BIAS:
        biased += tl.load(bias + expert.to(tl.int64) * bias_stride, mask=candidate, other=0.0)
    biased = tl.where(candidate, _nan_to_minus_inf(biased), -float("inf"))
    if NUM_GROUPS > 1:
        first_score = tl.max(biased, 1)
        first = tl.min(tl.where(biased == first_score[:, None], member[None, :], MEMBERS), 1)
        others = tl.where(member[None, :] == first[:, None], -float("inf"), biased)
        group_score = _nan_to_minus_inf(first_score + tl.max(others, 1))
        selected = group < 0
        for _ in tl.static_range(TOPK_GROUPS):
            remaining = group_valid & (selected == 0)
            score_max = tl.max(tl.where(remaining, group_score, -float("inf")))
            best = tl.min(tl.where(remaining & (group_score == score_max), group, GROUPS))
            selected = selected | (group == best)
        candidate = candidate & selected[:, None]
    topk_ids = tl.full((CHOICES,), -1, tl.int32)
    topk_weights = tl.zeros((CHOICES,), tl.float32)
    for rank in tl.static_range(TOP_K):
        score_max = tl.max(tl.max(tl.where(candidate, biased, -float("inf")), 1))
        ties = candidate & (biased == score_max)
        best = tl.min(tl.min(tl.where(ties, expert, GROUPS * MEMBERS), 1))
        is_best = expert == best
        score = tl.sum(tl.sum(tl.where(is_best & candidate, scores, 0.0), 1))
        topk_ids = tl.where(choice == rank, best, topk_ids)
        topk_weights = tl.where(choice == rank, score, topk_weights)
        candidate = candidate & (expert != best)
    if NORMALIZE:
        topk_weights = topk_weights / (tl.sum(topk_weights) + LEAST)
    tl.store(ids + token * TOP_K + choice, topk_ids, mask=choice < TOP_K)
    tl.store(weights + token * TOP_K + choice, topk_weights * SCALE, mask=choice < TOP_K)


def grouped_topk(
    launch: Launcher,
    logits: Tensor,
    bias: Tensor | None = None,
    **settings: Any,
) -> Routing:
    top_k, num_groups = settings["top_k"], settings["num_groups"]
    num_tokens, size = logits.shape[0], int(logits.shape[1]) // num_groups
    ids = logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    weights = logits.new_empty((num_tokens, top_k))
    if num_tokens == 0:
        return Routing(ids, weights)
    launch(grouped_topk_kernel)[num_tokens,](
        *strided(logits), *(strided(bias) if bias is not None else (logits, 0)), ids, weights,
        SCALE=settings["scale"], LEAST=LEAST_SUM, TOP_K=top_k, NORMALIZE=settings["normalize"],
        HAS_BIAS=bias is not None, NUM_GROUPS=num_groups, TOPK_GROUPS=settings["kept_groups"],
        GROUP_SIZE=size,
        GROUPS=triton.next_power_of_2(num_groups), MEMBERS=triton.next_power_of_2(size),
        CHOICES=triton.next_power_of_2(top_k), num_warps=WARPS,
    )  # fmt: skip
    return Routing(ids, weights)

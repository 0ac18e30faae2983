"""Routing from the best groups of experts: a program for each token."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.types import Routing
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.experts import LEAST_SUM

WARPS = 4
"""Warps of a program, as of a route's: one would need three times the registers."""


@triton.jit
def _not_nan(values):
    return tl.where(values != values, -float("inf"), values)


@triton.jit
def grouped_topk_kernel(
    logits, token_stride, expert_stride,
    bias, bias_stride,
    ids, weights,
    SCALE: tl.constexpr, LEAST: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr, NUM_GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """GROUPS, BLOCK and CHOICES are powers of two that are no less than NUM_GROUPS, the SIZE of a
    group, and TOP_K."""
    token = tl.program_id(0).to(tl.int64)
    group, member, choice = tl.arange(0, GROUPS), tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    exists = group < NUM_GROUPS
    left = exists[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]
    row = logits + token * token_stride + expert.to(tl.int64) * expert_stride
    scores = 1.0 / (1.0 + tl.exp(-tl.load(row, mask=left, other=0.0)))
    ranked = scores
    if BIASED:
        ranked += tl.load(bias + expert.to(tl.int64) * bias_stride, mask=left, other=0.0)
    ranked = tl.where(left, _not_nan(ranked), -float("inf"))
    if NUM_GROUPS > 1:
        most = tl.max(ranked, 1)
        best = tl.min(tl.where(ranked == most[:, None], member[None, :], BLOCK), 1)
        second = tl.max(tl.where(member[None, :] == best[:, None], -float("inf"), ranked), 1)
        value = _not_nan(most + second)
        kept = group < 0
        for _ in tl.static_range(KEPT):
            open_ = exists & (kept == 0)
            highest = tl.max(tl.where(open_, value, -float("inf")))
            first = tl.min(tl.where(open_ & (value == highest), group, GROUPS))
            kept = kept | (group == first)
        left = left & kept[:, None]
    chosen = tl.full((CHOICES,), -1, tl.int32)
    found = tl.zeros((CHOICES,), tl.float32)
    for place in tl.static_range(TOP_K):
        highest = tl.max(tl.max(tl.where(left, ranked, -float("inf")), 1))
        equal = left & (ranked == highest)
        first = tl.min(tl.min(tl.where(equal, expert, GROUPS * BLOCK), 1))
        taken = expert == first
        score = tl.sum(tl.sum(tl.where(taken & left, scores, 0.0), 1))
        chosen = tl.where(choice == place, first, chosen)
        found = tl.where(choice == place, score, found)
        left = left & (expert != first)
    if NORMALIZE:
        found = found / (tl.sum(found) + LEAST)
    tl.store(ids + token * TOP_K + choice, chosen, mask=choice < TOP_K)
    tl.store(weights + token * TOP_K + choice, found * SCALE, mask=choice < TOP_K)


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
        BIASED=bias is not None, NUM_GROUPS=num_groups, KEPT=settings["kept_groups"], SIZE=size,
        GROUPS=triton.next_power_of_2(num_groups), BLOCK=triton.next_power_of_2(size),
        CHOICES=triton.next_power_of_2(top_k), num_warps=WARPS,
    )  # fmt: skip
    return Routing(ids, weights)

"""Route tokens to experts. The first kernel multiplies by the router's weight, in splits of K. In
the second kernel, a program per token adds the partial sums of the splits and selects the top k."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.types import Routing
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.fp8 import multiply_add  # by name: Inductor copies no modules
from dsv4_ops.kernels.common.sizes import SIZES, SIZES_BUT_TOKENS
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.experts import LEAST_SUM

DEPTH, WARPS = 128, 4
"""Columns of K per step, and warps per program."""

FEW_TOKENS = 64
"""Maximum number of tokens of a batch that uses ``FEW``."""

FEW, MANY = (32, 16, 16), (64, 64, 4)
"""Experts per program, tokens per program, and splits of K, for a small batch and for a large or
symbolic batch."""


@triton.jit(do_not_specialize=SIZES_BUT_TOKENS)
def router_products_kernel(
    hidden, token_stride, width_stride,
    weight, row_stride, column_stride,
    partial,
    num_tokens, num_experts,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the logits over one split of K."""
    wait_for_previous_kernel()
    split = tl.program_id(1)
    expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    expert_valid, token_valid = expert < num_experts, token < num_tokens
    rows = weight + tl.where(expert_valid, expert, 0).to(tl.int64)[:, None] * row_stride
    tokens = hidden + tl.where(token_valid, token, 0).to(tl.int64)[None, :] * token_stride
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    STEPS: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH
    for step in tl.range(split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, num_stages=2):
        k = (step * DEPTH + tl.arange(0, DEPTH)).to(tl.int64)
        k_valid = k < WIDTH
        left_mask = expert_valid[:, None] & k_valid[None, :]
        left = tl.load(rows + k[None, :] * column_stride, mask=left_mask, other=0.0)
        right_mask = k_valid[:, None] & token_valid[None, :]
        right = tl.load(tokens + k[:, None] * width_stride, mask=right_mask, other=0.0)
        acc = multiply_add(left, right, acc)
    dst = partial + (split * num_tokens + token).to(tl.int64)[None, :] * num_experts
    tl.store(dst + expert[:, None], acc, mask=expert_valid[:, None] & token_valid[None, :])


@triton.jit
def _sqrt_softplus(logits):
    """Compute sqrt(softplus). For accurate small results, multiply log(1 + y) by y / ((1 + y) - 1),
    which corrects the rounding of 1 + y."""
    y = tl.exp(tl.minimum(logits, 20.0))
    one_plus = 1.0 + y
    is_small = one_plus == 1.0
    ratio = y / tl.where(is_small, 1.0, one_plus - 1.0)
    softplus = tl.where(is_small, y, tl.log(one_plus) * ratio)
    return tl.sqrt(tl.where(logits > 20.0, logits, tl.where(logits != logits, logits, softplus)))


@triton.jit(do_not_specialize=SIZES)
def choose_experts_kernel(
    partial,
    bias, bias_stride,
    table, table_token_stride, table_stride,
    token_ids, id_stride,
    ids, weights,
    num_tokens, vocab_size, num_experts,
    SCALE: tl.constexpr, LEAST: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    HAS_TABLE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Select the experts of one token: the top k of the token's scores, or the table's row for the
    token's id. BLOCK is the number of experts, and CHOICES is TOP_K, each rounded up to a power of
    two."""
    wait_for_previous_kernel()
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    expert_valid, choice_valid = expert < num_experts, choice < TOP_K
    split = tl.arange(0, SPLITS).to(tl.int64)
    rows = partial + (split * num_tokens + token)[:, None] * num_experts
    logits = tl.sum(tl.load(rows + expert[None, :], mask=expert_valid[None, :], other=0.0), 0)
    scores = _sqrt_softplus(logits)
    if HAS_TABLE:
        token_id = tl.load(token_ids + token * id_stride)
        in_table = (token_id >= 0) & (token_id < vocab_size)
        row = table + tl.where(in_table, token_id, 0) * table_token_stride
        entry = tl.load(row + choice * table_stride, mask=choice_valid & in_table, other=-1)
        topk_ids = tl.where((entry >= 0) & (entry < num_experts), entry, -1).to(tl.int32)
    else:
        biased = scores
        if HAS_BIAS:
            biased += tl.load(bias + expert * bias_stride, mask=expert_valid, other=0.0)
        biased = tl.where(biased != biased, -float("inf"), biased)
        candidate = expert_valid
        topk_ids = tl.full((CHOICES,), -1, tl.int32)
        for rank in tl.static_range(TOP_K):
            score_max = tl.max(tl.where(candidate, biased, -float("inf")))
            best = tl.min(tl.where(candidate & (biased == score_max), expert, BLOCK))
            topk_ids = tl.where(choice == rank, best, topk_ids)
            candidate = candidate & (expert != best)
    is_choice = topk_ids[:, None] == expert[None, :]
    topk_weights = tl.sum(tl.where(is_choice, scores[None, :], 0.0), 1)
    topk_weights = topk_weights / (tl.sum(topk_weights) + LEAST) * SCALE
    tl.store(ids + token * TOP_K + choice, topk_ids, mask=choice_valid)
    tl.store(weights + token * TOP_K + choice, topk_weights, mask=choice_valid)


def route(
    launch: Launcher,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    *,
    top_k: int,
    scale: float,
) -> Routing:
    num_tokens, width = hidden.shape[0], int(hidden.shape[1])
    num_experts = int(weight.shape[0])
    ids = hidden.new_empty((num_tokens, top_k), dtype=torch.int32)
    weights = hidden.new_empty((num_tokens, top_k), dtype=torch.float32)
    if num_tokens == 0:
        return Routing(ids, weights)
    is_small = isinstance(num_tokens, int) and num_tokens <= FEW_TOKENS
    rows, tokens, splits = FEW if is_small else MANY
    partial = hidden.new_empty((splits, num_tokens, num_experts), dtype=torch.float32)
    grid = (triton.cdiv(num_experts, rows), splits, (num_tokens + tokens - 1) // tokens)
    launch(router_products_kernel)[grid](
        *strided(hidden, weight), partial, num_tokens, num_experts,
        WIDTH=width, SPLITS=splits, ROWS=rows, TOKENS=tokens, DEPTH=DEPTH, num_warps=WARPS,
    )  # fmt: skip
    has_table = table is not None and token_ids is not None
    table_arguments = strided(table, token_ids) if has_table else (partial, 0, 0, partial, 0)
    launch(choose_experts_kernel)[num_tokens,](
        partial, *(strided(bias) if bias is not None else (partial, 0)), *table_arguments,
        ids, weights,
        num_tokens, table.shape[0] if table is not None else 0, num_experts,
        SCALE=scale, LEAST=LEAST_SUM, TOP_K=top_k, SPLITS=splits, HAS_TABLE=has_table,
        HAS_BIAS=bias is not None, BLOCK=triton.next_power_of_2(num_experts),
        CHOICES=triton.next_power_of_2(top_k), num_warps=WARPS,
    )  # fmt: skip
    return Routing(ids, weights)

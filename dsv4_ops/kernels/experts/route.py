"""Routing: partial products with the router's weight, and a program for each token that adds them
up and chooses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_ops.core.types import Routing
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.common.fp8 import multiply_add  # by name: Inductor copies kernels
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.reference.experts import LEAST_SUM

DEPTH, WARPS = 128, 4
"""Values of K of a product, and warps."""

FEW_TOKENS = 64
"""Tokens up to which they are few."""

FEW, MANY = (32, 16, 16), (64, 64, 4)
"""Experts and tokens of a program, and parts of K, of few tokens and of more or a symbol."""


@triton.jit
def router_products_kernel(
    hidden, token_stride, width_stride,
    weight, row_stride, column_stride,
    partial,
    num_tokens, num_experts,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    of_expert, given = row < num_experts, token < num_tokens
    rows = weight + tl.where(of_expert, row, 0).to(tl.int64)[:, None] * row_stride
    tokens = hidden + tl.where(given, token, 0).to(tl.int64)[None, :] * token_stride
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    STEPS: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH
    for step in tl.range(split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, num_stages=2):
        k = (step * DEPTH + tl.arange(0, DEPTH)).to(tl.int64)
        inside = k < WIDTH
        left = tl.load(
            rows + k[None, :] * column_stride, mask=of_expert[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            tokens + k[:, None] * width_stride, mask=inside[:, None] & given[None, :], other=0.0
        )
        sums = multiply_add(left, right, sums)
    target = partial + (split * num_tokens + token).to(tl.int64)[None, :] * num_experts
    tl.store(target + row[:, None], sums, mask=of_expert[:, None] & given[None, :])


@triton.jit
def _scores(logits):
    """sqrt(softplus), of small results too: log(1 + y) by what 1 + y rounds to."""
    power = tl.exp(tl.minimum(logits, 20.0))
    above = 1.0 + power
    small = above == 1.0
    quotient = power / tl.where(small, 1.0, above - 1.0)
    soft = tl.where(small, power, tl.log(above) * quotient)
    return tl.sqrt(tl.where(logits > 20.0, logits, tl.where(logits != logits, logits, soft)))


@triton.jit
def choose_experts_kernel(
    partial,
    bias, bias_stride,
    table, table_token_stride, table_stride,
    token_ids, id_stride,
    ids, weights,
    num_tokens, vocab_size, num_experts,
    SCALE: tl.constexpr, LEAST: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    HASHED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    inside, asked = expert < num_experts, choice < TOP_K
    split = tl.arange(0, SPLITS).to(tl.int64)
    rows = partial + (split * num_tokens + token)[:, None] * num_experts
    logits = tl.sum(tl.load(rows + expert[None, :], mask=inside[None, :], other=0.0), 0)
    scores = _scores(logits)
    if HASHED:
        word = tl.load(token_ids + token * id_stride)
        known = (word >= 0) & (word < vocab_size)
        row = table + tl.where(known, word, 0) * table_token_stride
        wanted = tl.load(row + choice * table_stride, mask=asked & known, other=-1)
        chosen = tl.where((wanted >= 0) & (wanted < num_experts), wanted, -1).to(tl.int32)
    else:
        ranked = scores
        if BIASED:
            ranked += tl.load(bias + expert * bias_stride, mask=inside, other=0.0)
        ranked = tl.where(ranked != ranked, -float("inf"), ranked)
        left = inside
        chosen = tl.full((CHOICES,), -1, tl.int32)
        for place in tl.static_range(TOP_K):
            most = tl.max(tl.where(left, ranked, -float("inf")))
            best = tl.min(tl.where(left & (ranked == most), expert, BLOCK))
            chosen = tl.where(choice == place, best, chosen)
            left = left & (expert != best)
    found = tl.sum(tl.where(chosen[:, None] == expert[None, :], scores[None, :], 0.0), 1)
    found = found / (tl.sum(found) + LEAST) * SCALE
    tl.store(ids + token * TOP_K + choice, chosen, mask=asked)
    tl.store(weights + token * TOP_K + choice, found, mask=asked)


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
    few = isinstance(num_tokens, int) and num_tokens <= FEW_TOKENS
    rows, tokens, splits = FEW if few else MANY
    partial = hidden.new_empty((splits, num_tokens, num_experts), dtype=torch.float32)
    grid = (triton.cdiv(num_experts, rows), splits, (num_tokens + tokens - 1) // tokens)
    launch(router_products_kernel)[grid](
        *strided(hidden, weight), partial, num_tokens, num_experts,
        WIDTH=width, SPLITS=splits, ROWS=rows, TOKENS=tokens, DEPTH=DEPTH, num_warps=WARPS,
    )  # fmt: skip
    hashed = table is not None and token_ids is not None
    of_table = (partial, 0, 0, partial, 0)
    if table is not None and token_ids is not None:
        of_table = strided(table, token_ids)
    launch(choose_experts_kernel)[num_tokens,](
        partial, *(strided(bias) if bias is not None else (partial, 0)), *of_table,
        ids, weights,
        num_tokens, table.shape[0] if table is not None else 0, num_experts,
        SCALE=scale, LEAST=LEAST_SUM, TOP_K=top_k, SPLITS=splits, HASHED=hashed,
        BIASED=bias is not None, BLOCK=triton.next_power_of_2(num_experts),
        CHOICES=triton.next_power_of_2(top_k), num_warps=WARPS,
    )  # fmt: skip
    return Routing(ids, weights)

"""References of routed experts: routing, the plan of blocks, and the experts themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.layout import FP4_BLOCK
from dsv4_ops.core.types import ABSENT, ExpertPlan, Routing, max_expert_blocks
from dsv4_ops.reference.common import dense, materialized, take
from dsv4_ops.reference.linear import activation_values, scale_values, weight_values

ROWS = 16
"""Rows per GEMM in the eager reference."""

LEAST_SUM = 1e-20
"""A token's routing weights are divided by their sum plus this number."""

_DOUBLED = -0x379BCDF0  # 0xC8643210: twice 0 .5 1 1.5 2 3 4 6, four bits each, as an int32


def route(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    *,
    top_k: int,
    scale: float,
) -> Routing:
    logits = hidden.to(torch.float32) @ weight.to(torch.float32).t()
    scores = torch.nn.functional.softplus(logits).sqrt()
    num_experts = weight.shape[0]
    if table is None or token_ids is None:
        biased = scores if bias is None else scores + bias
        ranked = torch.where(biased.isnan(), -torch.inf, biased)
        order = torch.sort(ranked, dim=1, descending=True, stable=True).indices
        ids = order[:, :top_k].to(torch.int32)
    else:
        in_table = (token_ids >= 0) & (token_ids < table.shape[0])
        listed = take(table, torch.where(in_table, token_ids, 0))
        present = in_table[:, None] & (listed >= 0) & (listed < num_experts)
        ids = torch.where(present, listed, ABSENT).to(torch.int32)
    exists = ids >= 0
    chosen = scores.gather(1, torch.where(exists, ids, 0).to(torch.int64))
    chosen = torch.where(exists, chosen, 0.0)
    return Routing(dense(ids), dense(chosen / (chosen.sum(1, keepdim=True) + LEAST_SUM) * scale))


def grouped_topk(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    num_groups: int,
    kept_groups: int,
    scale: float,
    normalize: bool,
) -> Routing:
    scores = logits.sigmoid()
    ranked = _not_nan(scores if bias is None else scores + bias)
    order = torch.sort(ranked, dim=1, descending=True, stable=True).indices
    if num_groups > 1:
        size = logits.shape[1] // num_groups
        members = torch.sort(ranked.unflatten(1, (num_groups, size)), dim=2, descending=True).values
        best = _not_nan(members[..., 0] + members[..., 1])
        groups = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :kept_groups]
        in_group = (order[..., None] // size == groups[:, None]).any(2)
        first = torch.sort((~in_group).to(torch.int32), dim=1, stable=True).indices
        order = order.gather(1, first)
    ids = order[:, :top_k]
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
    return Routing(dense(ids.to(torch.int32)), dense(weights * scale))


def _not_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), -torch.inf, values)


def expert_plan(topk_ids: Tensor, *, num_experts: int, block_size: int) -> ExpertPlan:
    ids = topk_ids.flatten()
    present = (ids >= 0) & (ids < num_experts)
    keys = torch.where(present, ids, num_experts)
    ordered, order = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
    # not a search: a compiler would unroll a fixed number of steps, which may be too few
    start = (ordered[None] < experts[:, None]).sum(1, dtype=torch.int32)
    stop = (ordered[None] <= experts[:, None]).sum(1, dtype=torch.int32)
    blocks = (stop - start + block_size - 1) // block_size
    last_block = torch.where(experts[None] <= experts[:, None], blocks[None], 0)
    last_block = last_block.sum(1, dtype=torch.int32)  # one past each expert's last block
    capacity = max_expert_blocks(ids.shape[0], num_experts, block_size)
    block = torch.arange(capacity, dtype=torch.int32, device=ids.device)
    owner = (last_block[None] <= block[:, None]).sum(1, dtype=torch.int32)
    used = owner < num_experts
    expert = torch.where(used, owner, 0)
    inside = block - (take(last_block, expert) - take(blocks, expert))
    first = take(start, expert) + inside * block_size
    offset = torch.arange(block_size, dtype=torch.int32, device=ids.device)
    row = first[:, None] + offset
    is_filled = used[:, None] & (row < take(stop, expert)[:, None])
    rows = take(order.to(torch.int32), torch.where(is_filled, row, 0))
    return ExpertPlan(
        torch.where(is_filled, rows, ABSENT).flatten(),
        torch.where(used, owner, ABSENT),
        last_block[-1:].clone(),
    )


def experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    shared: Tensor | None = None,
    *,
    swiglu_limit: float,
    activations: str,
    impl: str = "auto",
) -> Tensor:
    """Compute the blocks of rows one after the other, so that only one expert is dequantised at a
    time."""
    num_tokens, topk = topk_ids.shape
    num_rows = num_tokens * topk
    plan = expert_plan(topk_ids, num_experts=gate_up.shape[0], block_size=ROWS)
    rows = activation_values(x, None, activations)
    # the last row collects padding
    out = x.new_zeros((num_rows + 1, x.shape[1]), dtype=torch.float32)
    for block in range(plan.expert_of_block.shape[0]):
        expert = plan.expert_of_block[block : block + 1].clamp(min=0)
        members = plan.sorted_rows[block * ROWS : (block + 1) * ROWS]
        token = members.clamp(min=0) // topk
        up = _values(gate_up, gate_up_scale, expert)[0]
        hidden = swiglu(rows[token] @ up.t(), swiglu_limit)
        values = _values(down, down_scale, expert)[0]
        product = activation_values(hidden, None, activations) @ values.t()
        out[torch.where(members >= 0, members, num_rows)] = product
    rows = out[:num_rows].view(num_tokens, topk, x.shape[1])
    return combine(rows, topk_weights, topk_ids, gate_up, x, shared)


def experts_by_row(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    shared: Tensor | None = None,
    *,
    swiglu_limit: float,
    activations: str,
    impl: str = "auto",
) -> Tensor:
    """Compute row by row; compilers trace this function instead of ``experts``.

    Compilers fuse the gather of a row's weights, the dequantisation and the product into loops that
    store no weights. Run eagerly, this function would copy an expert's weights for every row."""
    present = (topk_ids >= 0) & (topk_ids < gate_up.shape[0])
    expert = torch.where(present, topk_ids, 0)
    rows = activation_values(x, None, activations)
    hidden = _products(rows[:, None], gate_up, gate_up_scale, expert)
    act = materialized(swiglu(materialized(hidden), swiglu_limit))
    out = _products(activation_values(act, None, activations), down, down_scale, expert)
    return combine(out, topk_weights, topk_ids, gate_up, x, shared)


def _products(rows: Tensor, weight: Tensor, scale: Tensor | None, expert: Tensor) -> Tensor:
    """Multiply rows [num_tokens, topk or 1, k] by the weights of their experts; return float32
    [num_tokens, topk, n]."""
    values = _values(weight, scale, expert)
    return (rows.unsqueeze(2) * values).sum(-1)


def _values(weight: Tensor, scale: Tensor | None, expert: Tensor) -> Tensor:
    """Return the float32 weights [..., n, k] of some experts; bf16 weights have no scales."""
    if scale is None:
        return take(weight, expert).to(torch.float32)
    return expert_values(take(weight, expert), take(scale, expert))


def expert_values(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantise FP4 codes, two per byte, or FP8 codes to float32 [..., n, k]."""
    if weight.dtype == torch.float8_e4m3fn:
        return weight_values(weight, scale)
    return fp4_values(weight, scale)


def fp4_values(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantise e2m1 codes [..., n, k / 2] with UE8M0 scales [..., n, k / 32] to float32.

    The first code is in the low half of a byte."""
    codes = weight.view(torch.uint8).to(torch.int32).unsqueeze(-1)
    halves = 4 * torch.arange(2, dtype=torch.int32, device=weight.device)
    pairs = ((codes >> halves) & 0xF).flatten(-2)
    # doubled values are integers, so there are no subnormals that a compiler might flush to 0
    doubled = (_DOUBLED >> ((pairs & 7) << 2)) & 0xF
    signed = torch.where(pairs >= 8, -doubled, doubled).to(torch.float32)
    blocks = signed.unflatten(-1, (scale.shape[-1], FP4_BLOCK))
    values: Tensor = blocks * (scale_values(scale) * 0.5).unsqueeze(-1)
    return values.flatten(-2)


def swiglu(hidden: Tensor, limit: float) -> Tensor:
    """Compute bf16 activations from float32 ``hidden``, whose columns are the gates, then the ups.
    Clamp gates to at most ``limit``, and ups to the range from ``-limit`` to ``limit``."""
    gate, up = hidden.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up).to(torch.bfloat16)


def combine(
    out: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    x: Tensor,
    shared: Tensor | None,
) -> Tensor:
    """Multiply the results of a token's experts by their weights, add them up, and add ``shared``.
    An absent expert adds nothing, whatever its weight."""
    present = (topk_ids >= 0) & (topk_ids < gate_up.shape[0])
    terms = torch.where(present[..., None], out * topk_weights[..., None], 0.0)
    total = terms.sum(1)
    total = total if shared is None else total + shared.to(torch.float32)
    return total.to(x.dtype)

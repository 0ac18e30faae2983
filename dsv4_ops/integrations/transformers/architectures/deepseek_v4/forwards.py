"""Replacement forwards of DeepSeek-V4's modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.types import HyperConnection
from dsv4_ops.integrations.transformers.modules import bf16_experts, quantized
from dsv4_ops.integrations.transformers.modules.checks import is_unchanged
from dsv4_ops.integrations.transformers.modules.fused_projections import (
    fused_layer,
    of_shared_experts,
)
from dsv4_ops.integrations.transformers.modules.replacement import (
    Forward,
    Maker,
    class_of,
    has_global_hooks,
    has_plain_weight,
    in_place_of,
    linear_float32,
    own_forward,
    runs_ours,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.integrations.transformers.modules.split import summed, sums
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.ops.experts import route
from dsv4_ops.ops.sinkhorn import MAX_ITERATIONS, MAX_STREAMS, sinkhorn
from dsv4_ops.ops.streams import hyper_connection
from dsv4_ops.reference.common import dense, products_of_heads
from dsv4_ops.reference.streams import mixed


class FamilyForwards(Rewrite):
    """Let hyper-connections run the Sinkhorn kernel, and replace forwards that the recipe changes.

    Args:
        recipe: The recipe that ``patch`` got.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.makers: dict[str | None, Maker] = {
            "DeepseekV4HyperConnection": in_place_of(_connect),
            "DeepseekV4GroupedLinear": _grouped_forward,
        }
        self.gates_float32 = recipe.swiglu_float32
        if recipe.streams_float32:
            layer = _layer_of_float32_norms if recipe.norms_float32 else _layer
            self.makers["DeepseekV4DecoderLayer"] = in_place_of(layer)
        if recipe.router_float32:
            router = in_place_of(_router)
            self.makers["DeepseekV4TopKRouter"] = self.makers["DeepseekV4HashRouter"] = router
        if recipe.swiglu_float32 or not recipe.shared_expert_clamp:
            self.makers["DeepseekV4MLP"] = partial(_shared_experts_forward, recipe)

    def applies(self, module: Any) -> bool:
        """Whether we replace a method of modules of this class."""
        name = class_of(module)
        if name == "DeepseekV4HyperConnection":
            return _fits_sinkhorn(module)
        return name in self.makers or (name == "DeepseekV4Experts" and self.gates_float32)

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Yield the new forward of a module; for experts, yield the new activation function."""
        name = class_of(module)
        if name == "DeepseekV4Experts":
            yield "_apply_gate", in_place_of(_gated)
        elif own_forward(module) is None:
            yield "forward", self.makers[name]


def _fits_sinkhorn(connection: Any) -> bool:
    """Whether the Sinkhorn kernel supports a hyper-connection of these sizes."""
    fits = connection.hc_mult <= MAX_STREAMS and connection.hc_sinkhorn_iters <= MAX_ITERATIONS
    return bool(fits)


def _grouped_forward(before: Forward) -> Forward:
    """Return a forward that projects in groups. The forward does not reshape a transposed result,
    because a reshape would fix the number of tokens in a trace."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dim() != 3 or not has_plain_weight(self):
            return before(self, x)
        groups: int = self.n_groups
        weight = self.weight.view(groups, -1, x.shape[-1]).transpose(1, 2)
        return dense(products_of_heads(x, weight))

    return forward


def _connect(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = self.hc_mult
    flat = self.input_norm(hidden_streams.flatten(2).float())
    weights = torch.nn.functional.linear(flat, self.fn.float())
    sizes = [count, count, count * count]
    pre, post, mix = (
        part * scale + base
        for part, scale, base in zip(
            weights.split(sizes, -1), self.scale.unbind(), self.base.split(sizes), strict=True
        )
    )
    collapsed = ((pre.sigmoid() + self.hc_eps)[..., None] * hidden_streams).sum(2)
    matrices = sinkhorn(
        mix.flatten(0, 1).float(),
        num_streams=count,
        iterations=self.hc_sinkhorn_iters,
        eps=self.hc_eps,
    )
    shape = (*hidden_streams.shape[:2], count, count)
    return 2 * post.sigmoid(), matrices.view(shape), collapsed.to(hidden_streams.dtype)


FUSED_ON = ("cuda",)
"""Devices where a step runs each hyper-connection as one op."""


class Carried(NamedTuple):
    """The streams between two layers, and a block's output that is not added to these streams yet.

    The next layer adds the output in the kernel that reads the streams. The attributes are
    arguments of ``hyper_connection``.
    """

    streams: Tensor
    block_out: Tensor
    post: Tensor
    mix: Tensor

    @classmethod
    def of(cls, streams: Tensor) -> Carried:
        """Return streams [1, num_tokens, num_streams, hidden_size] with a block output of zeros."""
        streams = streams.flatten(0, 1)
        tokens, count, width = streams.shape
        post = streams.new_zeros((tokens, count), dtype=torch.float32)
        identity = torch.eye(count, dtype=torch.float32, device=streams.device)
        mix = identity.expand(tokens, -1, -1).contiguous()
        return cls(streams, streams.new_zeros((tokens, width)), post, mix)

    def mixed(self) -> Tensor:
        """Add the output to the streams; return [1, num_tokens, num_streams, hidden_size]."""
        return mixed(self.post, self.mix, self.block_out, self.streams)[None]


def can_carry(recipe: Recipe, layers: Any, streams: Tensor, context: Any) -> bool:
    """Whether all layers take and return ``Carried``; False if a layer has hooks, because hooks
    need tensors."""
    replaced = recipe.streams_float32 and recipe.norms_float32  # see _layer_of_float32_norms
    return (
        replaced
        and not has_global_hooks()
        and all(
            runs_ours(layer) and is_unchanged(layer) and _is_fused(layer, streams, context)
            for layer in layers
        )
    )


def _layer_of_float32_norms(
    self: Any, hidden_states: Any, input_ids: Tensor | None = None, **rest: Any
) -> Any:
    carried = hidden_states if isinstance(hidden_states, Carried) else None
    if carried is None and not _is_fused(self, hidden_states, rest.get("dsv4_ops")):
        return _layer(self, hidden_states, input_ids, **rest)
    if carried is None:
        lead, streams = hidden_states.shape[:2], hidden_states.flatten(0, 1)
        connection = _connection(self.attn_hc, self.input_layernorm, streams)
    else:
        lead = (1, carried.streams.shape[0])
        connection = _connection(self.attn_hc, self.input_layernorm, *carried)
        streams = connection.streams
    out, _ = self.self_attn(connection.x.unflatten(0, lead), **rest)
    before = (out.flatten(0, 1).to(streams.dtype), connection.post, connection.mix)
    connection = _connection(self.ffn_hc, self.post_attention_layernorm, streams, *before)
    out = _experts(self.mlp, connection.x.unflatten(0, lead), input_ids).flatten(0, 1)
    if carried is not None:
        return Carried(connection.streams, out.to(streams.dtype), connection.post, connection.mix)
    return mixed(connection.post, connection.mix, out, connection.streams).view(hidden_states.shape)


def _experts(block: Any, x: Tensor, input_ids: Tensor | None) -> Tensor:
    """Run the router and the experts. If Hugging Face's modules are unchanged, run the router as
    one op."""
    gate = block.gate
    ours = (
        is_unchanged(block)
        and is_unchanged(gate)
        and runs_ours(block.experts)  # our op accepts expert ids of -1
        and (
            quantized.is_quantized(block.experts)
            or bf16_experts.runs_op(block.experts, x, gate.top_k)
        )
        and class_of(gate.score_fn) == "SqrtSoftplusActivation"
        and gate.weight.dtype == torch.bfloat16
    )
    if not ours:
        return block(x, input_ids=input_ids)
    rows = x.flatten(0, 1)
    settings = {"top_k": gate.top_k, "scale": float(gate.routed_scaling_factor)}
    if block.is_hash:
        assert input_ids is not None
        routing = route(rows, gate.weight, None, gate.tid2eid, input_ids.flatten(), **settings)
    else:
        routing = route(rows, gate.weight, gate.e_score_correction_bias.float(), **settings)
    shared: Tensor = block.shared_experts(x)
    hooks = block.experts._forward_hooks or block.experts._forward_pre_hooks
    # add the shared experts outside the op in three cases: the ranks sum the result of the experts,
    # so every rank would add the shared experts; autograd may need gradients, and the op has none;
    # hooks of a user expect the result of the experts alone
    if sums(block.experts) or torch.is_grad_enabled() or hooks:
        out: Tensor = block.experts(rows, routing.ids, routing.weights).view(x.shape) + shared
    else:
        added = shared.flatten(0, 1).to(rows.dtype)
        out = block.experts(rows, routing.ids, routing.weights, shared=added).view(x.shape)
    return summed(block, out)


def _is_fused(layer: Any, streams: Tensor, context: Any) -> bool:
    """Whether a layer's hyper-connections and norms are unchanged, and ``hyper_connection``
    supports their sizes and types."""
    if context is None or streams.device.type not in FUSED_ON:
        return False
    pairs = (layer.attn_hc, layer.input_layernorm), (layer.ffn_hc, layer.post_attention_layernorm)
    return streams.dtype == torch.bfloat16 and all(
        is_unchanged(connection)
        and is_unchanged(norm)
        and _fits_sinkhorn(connection)
        and connection.input_norm.eps == norm.variance_epsilon
        for connection, norm in pairs
    )


def _connection(connection: Any, norm: Any, streams: Tensor, *block: Tensor) -> HyperConnection:
    weights = (connection.fn, connection.base, connection.scale, norm.weight)
    return hyper_connection(
        streams,
        *(weight.float() for weight in weights),
        *block,
        iterations=connection.hc_sinkhorn_iters,
        eps=connection.hc_eps,
        norm_eps=norm.variance_epsilon,
    )


def _layer(
    self: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **rest: Any
) -> Tensor:
    post, mix, collapsed = self.attn_hc(hidden_states)
    out, _ = self.self_attn(self.input_layernorm(collapsed), **rest)
    streams = mixed(post, mix, out, hidden_states)
    post, mix, collapsed = self.ffn_hc(streams)
    out = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
    return mixed(post, mix, out, streams)


def _router(self: Any, hidden_states: Tensor, input_ids: Tensor | None = None) -> Any:
    logits = linear_float32(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores = self.score_fn(logits)
    if input_ids is not None:
        expert_ids = self.tid2eid[input_ids.reshape(-1)].long()
    else:
        biased = scores + self.e_score_correction_bias
        expert_ids = torch.topk(biased, self.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, expert_ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * self.routed_scaling_factor, expert_ids


def _gated(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _swiglu(self, gate, up, self.limit)


def _shared_experts_forward(recipe: Recipe, _: Forward) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        limit = self.limit if recipe.shared_expert_clamp else float("inf")
        together = fused_layer(self, of_shared_experts(self))
        if (
            together is not None
            and recipe.swiglu_float32
            and class_of(self.act_fn) in bf16_experts.SILU
        ):
            out = together.swiglu(x, min(float(limit), bf16_experts.NO_LIMIT))
            if out is not None:
                return self.down_proj(out)
        if together is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = together(x).chunk(2, -1)
        if not recipe.swiglu_float32:
            out = self.act_fn(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
        else:
            out = _swiglu(self, gate, up, limit)
        return self.down_proj(out)

    return forward


def _swiglu(module: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Compute the activation in float32, and round once."""
    active = module.act_fn(gate.float().clamp(max=limit))
    product: Tensor = active * up.float().clamp(min=-limit, max=limit)
    return product.to(gate.dtype)

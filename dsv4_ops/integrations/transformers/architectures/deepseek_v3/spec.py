"""Dense MLA models: the spec of their layers, their latent cache and their steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4_ops.attention import (
    ContextParallel,
    MlaCache,
    MlaInputs,
    MlaSpec,
    MlaStep,
    MlaWeights,
    mla_layer,
    mla_step_of_tokens,
)
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.gradient import differentiated
from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout
from dsv4_ops.core.torch_compat import statically_known_true
from dsv4_ops.core.types import TokenMap
from dsv4_ops.dispatch.libraries import LIBRARIES
from dsv4_ops.integrations.transformers.architectures.base import (
    WITHOUT_MASKS,
    Execution,
    LayerContext,
    ModelSpec,
    Runner,
    StepRun,
    StepTokens,
    check_drafts,
    draft_of,
    dtype_of,
    run_part,
)
from dsv4_ops.integrations.transformers.architectures.deepseek_v3 import draft
from dsv4_ops.integrations.transformers.architectures.deepseek_v3.rotary import (
    Rotary,
    RotaryFrequencies,
    check_rotary,
    rotary_of,
    softmax_scale,
)
from dsv4_ops.integrations.transformers.architectures.deepseek_v3.tensors import (
    MlaRope,
    MlaTables,
    ShardedMlaTables,
)
from dsv4_ops.integrations.transformers.modules.checks import (
    HeadPart,
    check_skipped,
    heads_are_split,
)
from dsv4_ops.integrations.transformers.modules.quantized import dense_weight
from dsv4_ops.integrations.transformers.modules.replacement import (
    SOURCE,
    Forward,
    Maker,
    class_of,
    is_part,
    linear_float32,
    local,
    own_forward,
    unwrapped,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.tensors import CacheTensors
from dsv4_ops.ops.experts import grouped_topk
from dsv4_ops.ops.mla import split_kv_b_proj
from dsv4_ops.ops.mla_context import max_context_chunks, mla_workspace_rows

_ROUTERS = ("DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "GlmMoeDsaTopkRouter")
_KEYS, _VALUES, _QUERY_SCALE = "dsv4_ops_w_uk_t", "dsv4_ops_w_uv", "dsv4_ops_q_scale"


@dataclass(frozen=True, kw_only=True)
class MlaModelSpec(ModelSpec):
    """The configuration of a patched ``DeepseekV3ForCausalLM`` or ``DeepseekV2ForCausalLM``.

    Attributes:
        layers: Spec of the attention layers.
        rotary: Frequencies and scale of the rotary embedding.
        interleaved: Whether RoPE rotates pairs (2 i, 2 i + 1) rather than halves.
    """

    layers: MlaSpec
    rotary: Rotary
    interleaved: bool

    causal_lm = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
    draft_layers: ClassVar[tuple[str, ...]] = ("mla",)
    """Kinds of the draft layers."""
    memory_groups: ClassVar[dict[str, str]] = {"kv": "latents", "scale": "latents"}
    shared_groups: ClassVar[tuple[str, ...]] = ("latents",)
    layout_of_kv: ClassVar[dict[str, tuple[str, torch.dtype]]] = {
        "fp8": (MlaFp8Layout.tag, torch.bfloat16),
        "ds_fp8": (MlaDsFp8Layout.tag, torch.bfloat16),
        "bf16": (PlainLayout.tag, torch.bfloat16),
        "fp32": (PlainLayout.tag, torch.float32),
    }
    """Layout of the cache, and dtype of the attention, for each ``kv``."""

    @classmethod
    def of(
        cls, op: str, config: Any, kv: str, recipe: Recipe, execution: Execution
    ) -> MlaModelSpec:
        """Build the spec of ``config``. If the family does not support ``config``, raise an error
        that names ``op``."""
        Checks(op).one_of("kv", kv, *cls.layout_of_kv, belongs_to="the cache shall hold")
        layout, dtype = cls.layout_of_kv[kv]
        _check_sizes(op, config, kv, layout)
        cls.check_config(op, config, kv, execution)
        rotary = rotary_of(op, config)
        layers = cls.layer_spec(
            config,
            num_heads=config.num_attention_heads,
            softmax_scale=softmax_scale(config),
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            kv_lora_rank=config.kv_lora_rank,
            layout=layout,
            dtype=dtype,
            query=execution.query,
            batch_invariant=execution.batch_invariant,
            parallel=execution.parallel,
        )
        # prefill steps use context="chunked": raise the errors of this setting now
        replace(layers, context="chunked").check_impl(op, 1, execution.impl)
        layers = replace(layers, impl=execution.impl)
        model_dtype = dtype_of(config, dtype)
        interleaved = cls.rotates_pairs(config)
        kinds = cls.layer_kinds(config)
        angles = "exact" if recipe.rope_float32 else model_dtype
        rope = sorted(config.rope_parameters.items())
        properties = {
            "layers": len(kinds),
            "kv_lora_rank": layers.kv_lora_rank,
            "qk_rope_head_dim": layers.qk_rope_head_dim,
            "block_size": layers.block_size,
            "layout": layout,
            "dtype": dtype,
            "rope": ",".join(f"{name}:{value}" for name, value in rope),
            "interleaved": interleaved,
            "angles": angles,
        }
        if layers.ranks is not None:
            properties["ranks"] = f"{layers.cp_world_size} of {layers.cp_interleave} rows"
        properties |= cls.own_properties(layers)
        return cls(
            kinds=kinds,
            recipe=recipe,
            kv=kv,
            dtype=model_dtype,
            fingerprint="; ".join(f"{name}={value}" for name, value in properties.items()),
            layers=layers,
            rotary=rotary,
            interleaved=interleaved,
            **cls.own_settings(config),
        )

    @classmethod
    def check_config(cls, op: str, config: Any, kv: str, execution: Execution) -> None:
        """Raise an error that names ``op`` for settings that the family does not support."""
        _check_execution(op, kv, execution)

    @classmethod
    def layer_spec(cls, config: Any, **settings: Any) -> MlaSpec:
        """Make the spec of the attention layers; ``settings`` are the fields of ``MlaSpec``."""
        return MlaSpec(**settings)

    @classmethod
    def layer_kinds(cls, config: Any) -> tuple[str, ...]:
        """Return the kind of every layer."""
        return ("mla",) * config.num_hidden_layers

    @classmethod
    def rotates_pairs(cls, config: Any) -> bool:
        """Whether RoPE rotates pairs (2 i, 2 i + 1) of queries and latents."""
        return bool(getattr(config, "rope_interleave", True))

    @classmethod
    def own_settings(cls, config: Any) -> dict[str, Any]:
        """Return the fields that only this family's spec has."""
        return {}

    @classmethod
    def own_properties(cls, layers: Any) -> dict[str, Any]:
        """Return the properties on which only this family's caches depend."""
        return {}

    @property
    def impl(self) -> str:
        return self.layers.impl

    @property
    def parallel(self) -> ContextParallel | None:
        return self.layers.ranks

    @property
    def block_tokens(self) -> int:
        return self.layers.block_tokens

    # The cache

    def rings(self, max_cache_len: int, max_chunk: int, next_n: int) -> dict[str, int]:
        return {}

    def tables(self, pool: Tensor, rings: dict[str, int], max_cache_len: int) -> MlaTables:
        ranks = self.parallel
        return MlaTables(pool) if ranks is None else ShardedMlaTables(pool, ranks.rank(pool.device))

    def rope_tables(self, num_positions: int, device: torch.device) -> MlaRope:
        rounded = None if self.recipe.rope_float32 else self.dtype
        return MlaRope(self.rotary.table(num_positions, rounded, device))

    def layer_caches(
        self,
        kind: str,
        num_rows: int,
        num_blocks: int,
        max_cache_len: int,
        rings: dict[str, int],
        device: torch.device,
    ) -> Any:
        return MlaCache.allocate(self.layers, num_blocks, device)

    def kind_of(self, caches: Any) -> str:
        return "mla" if isinstance(caches, MlaCache) else type(caches).__name__

    # A step

    def build_step(self, step: StepTokens, cache: CacheTensors, schedule: str) -> MlaStep:
        table, num_tokens = cache.tables.blocks, step.tokens.positions.shape[0]
        rank = None if self.parallel is None else cache.tables.cp_rank
        # this comparison adds no guard for a symbolic size
        if statically_known_true(num_tokens <= step.num_reqs):
            return mla_step_of_tokens(self.layers, step.tokens, table, cp_rank=rank)
        absorbed = schedule == "decode" or not self.expands(
            cache, num_tokens, step.num_reqs, step.has_context
        )
        requests = step.requests()
        is_stored = step.tokens.positions >= 0
        owned = table.index_select(0, requests.rows.clamp(min=0))
        return mla_step_of_tokens(
            self.layers if absorbed else self.expanding(cache, step),
            TokenMap(torch.where(is_stored, requests.indices, -1), step.tokens.positions),
            torch.where(requests.rows[:, None] >= 0, owned, -1),
            requests.query_start_loc,
            requests.seq_lens,
            rank,
        )

    def expands(
        self, cache: CacheTensors, num_tokens: int, num_reqs: int, has_context: bool
    ) -> bool:
        """Whether the prefills of a step attend to expanded keys and values instead of latents."""
        return not statically_known_true(num_tokens < self.layers.break_even * num_reqs)

    def expanding(self, cache: CacheTensors, step: StepTokens) -> MlaSpec:
        """Return the spec of a step that expands latents to keys and values."""
        num_reqs = step.num_reqs
        if not step.has_context:
            return replace(self.layers, context="chunked", max_decode_tokens=0, max_chunks=0)
        size, num_rows = self.layers.block_tokens, cache.num_rows
        longest = cache.rope.num_positions
        # rows share no blocks, so all contexts together fit into the cache
        capacity = cache.layers[0].kv.shape[0] * size
        rows = mla_workspace_rows(max_model_len=longest, max_num_seqs=num_rows, block_size=size)
        turn = self.layers.cp_world_size * self.layers.cp_interleave
        rows = min(-(-rows // turn) * turn, capacity)
        chunks = max_context_chunks(
            num_reqs=num_reqs,
            max_model_len=longest,
            workspace_rows=rows,
            max_context_tokens=capacity,
            cp_world_size=self.layers.cp_world_size,
            cp_interleave=self.layers.cp_interleave,
        )
        return replace(
            self.layers,
            context="chunked",
            max_decode_tokens=num_reqs,
            workspace_rows=rows,
            max_chunks=chunks,
        )

    def most_tokens(self, cache: CacheTensors) -> int:
        return cache.tables.blocks.shape[1] * self.block_tokens

    def skips_contexts(self, num_tokens: int, num_reqs: int, longest: int) -> bool:
        return num_tokens >= self.layers.break_even * num_reqs

    def can_go_back(self, first: Tensor, cache: Any) -> Tensor:
        return torch.ones_like(first, dtype=torch.bool)  # steps overwrite no latents

    # The model

    def run_layers(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        cache = step_run.cache
        for number, (layer, caches) in enumerate(zip(body.layers, cache.layers, strict=True)):
            hidden = step_run.run(
                str(class_of(layer.mlp)),
                layer,
                hidden,
                dsv4_ops=step_run.context(number, caches, cache.rope.table),
                **WITHOUT_MASKS,
            )
        return step_run.run("norm", normed, body, hidden, step_run.output_tokens)

    def run_streams(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        return self.run_layers(body, hidden, ids, step_run)

    def normed(
        self, body: Any, streams: Tensor, part: str = "norm", run: Runner = run_part
    ) -> Tensor:
        return streams

    # The draft layer

    def draft_kinds(self, op: str) -> tuple[str, ...]:
        check_drafts(op, self.parallel)
        return self.draft_layers

    def draft_layer(self, op: str, model: Any) -> Any:
        self.draft_kinds(op)
        return draft.DraftLayer(model)

    def build_draft_step(self, step: StepTokens, cache: CacheTensors) -> MlaStep:
        return self.build_step(step, cache, "decode")

    def run_draft(
        self, part: str, model: Any, tokens: Tensor, streams: Tensor, step_run: StepRun
    ) -> Tensor:
        cache = step_run.cache
        context = step_run.context(0, cache.draft[0], cache.rope.table)
        ran: Tensor = step_run.run(
            part, draft.run, draft_of(model), model.model, tokens, streams, context
        )
        return ran

    # The layers

    def attention(self, module: Any, hidden: Tensor, context: LayerContext) -> Tensor:
        x = hidden.flatten(0, 1)
        inputs, _ = self.project(module, x)
        weights = self.weights(module, context)
        attended = mla_layer(self.layers, inputs, weights, context.caches, context.step)
        return self.output(module, attended, hidden)

    def project(self, module: Any, x: Tensor) -> tuple[MlaInputs, Tensor]:
        """Return the projections of tokens [num_tokens, hidden_size], and the input of the query
        projection."""
        spec = self.layers
        if module.q_lora_rank is None:
            residual, project = x, module.q_proj
        else:
            residual, project = module.q_a_layernorm(module.q_a_proj(x)), module.q_b_proj
        heads = (spec.num_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        q = project(residual).unflatten(-1, heads)
        latent = module.kv_a_proj_with_mqa(x)
        kv_c, k_pe = latent.split((spec.kv_lora_rank, spec.qk_rope_head_dim), -1)
        if not self.interleaved:
            nope, rope = q.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), -1)
            q, k_pe = torch.cat((nope, _as_pairs(rope)), -1), _as_pairs(k_pe)
        kv_c = module.kv_a_layernorm(kv_c)
        return MlaInputs(*(each.to(spec.dtype) for each in (q, kv_c, k_pe))), residual

    def weights(self, module: Any, context: LayerContext) -> MlaWeights:
        """Return the parameters of a layer besides its projections."""
        expands = context.step.prefill_start_loc is not None
        scale = None if self.layers.query is None else getattr(module, _QUERY_SCALE)
        return MlaWeights(
            context.rope,
            getattr(module, _KEYS),
            getattr(module, _VALUES),
            self._keys_and_values(module.kv_b_proj).to(self.layers.dtype) if expands else None,
            None if scale is None else scale.to(torch.float32),  # the model may have been cast
        )

    def output(self, module: Any, attended: Tensor, hidden: Tensor) -> Tensor:
        """Project the attention output of a layer, in the shape and dtype of ``hidden``."""
        out: Tensor = module.o_proj(attended.to(hidden.dtype))
        return out.view(hidden.shape)

    def _keys_and_values(self, linear: Any) -> Tensor:
        return dense_weight(linear, self.shards_heads)

    @property
    def family_rewrites(self) -> tuple[Rewrite, ...]:
        return AbsorbedWeights(self.layers), OneOpRouter(), RotaryFrequencies(self.rotary)

    def refresh(self, op: str, body: Any, *, copies_only: bool = False) -> None:
        super().refresh(op, body, copies_only=copies_only)
        rotary = body._modules.get("rotary_emb")  # a draft layer has no rotary_emb
        if rotary is not None and not torch.compiler.is_compiling():
            RotaryFrequencies(self.rotary).check_unchanged(op, "model.rotary_emb", rotary)

    def skipped_modules(self, attention: Any) -> Iterator[tuple[str, Any]]:
        yield "kv_b_proj", attention.kv_b_proj

    def of_model(self, model: Any) -> MlaModelSpec:
        """Return the spec with the heads of this rank."""
        spec = self.layers
        if not heads_are_split("patch", model.model, self.parallel, self._head_parts):
            return self
        assert spec.parallel is not None  # without ranks, ``heads_are_split`` raises
        parallel = replace(spec.parallel, shards_heads=True)
        heads = spec.num_heads // parallel.world_size
        return replace(self, layers=replace(spec, num_heads=heads, parallel=parallel))

    def _head_parts(self, attention: Any) -> Iterator[HeadPart]:
        spec = self.layers
        keys = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        up, values = spec.qk_nope_head_dim + spec.v_head_dim, spec.v_head_dim
        q = "q_proj" if attention.q_lora_rank is None else "q_b_proj"
        for name, dim, width in ((q, 0, keys), ("kv_b_proj", 0, up), ("o_proj", 1, values)):
            # check_model refuses a layer without a weight
            weight = getattr(getattr(attention, name), "weight", None)
            yield name, weight, dim, spec.num_heads * width

    def check_model(self, op: str, model: Any) -> None:
        check_rotary(op, model, self.rotary)
        for index, attention in _attentions(model.model):
            # check only this module, because ``patch`` has not marked the other skipped modules yet
            modules = [("kv_b_proj", attention.kv_b_proj)]
            check_skipped(op, f"model.layers.{index}.self_attn", modules, self.shards_heads)
        has_experts = any(is_part(module, "Experts") for module in model.modules())
        experts = getattr(model.config, "_experts_implementation", None)
        if has_experts and experts == "eager":
            raise argument_error(
                op,
                "experts_implementation",
                must="be 'grouped_mm' or 'batched_mm', as a loop over experts is no graph",
                got="'eager'",
                do="Call model.set_experts_implementation('grouped_mm')",
                kind=NotImplementedError,
            )
        for (index, attention), kind in zip(_attentions(model.model), self.kinds, strict=False):
            self.check_attention(op, f"model.layers.{index}.self_attn", kind, attention)

    def check_attention(self, op: str, name: str, kind: str, attention: Any) -> None:
        if abs(attention.scaling - self.layers.softmax_scale) > 1e-6 * attention.scaling:
            raise argument_error(
                op,
                f"{name}.scaling",
                must=f"be {self.layers.softmax_scale}, as config.rope_parameters has it",
                got=attention.scaling,
                do="Make the model from this configuration",
            )


class AbsorbedWeights(Rewrite):
    """Add the buffers of absorbed MLA to attention modules: the halves of ``kv_b_proj``, and the
    query scale.

    Args:
        layers: Spec of the attention layers.
    """

    attention_only = True
    copies_weights = True

    def __init__(self, layers: MlaSpec) -> None:
        self.layers = layers

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's attention."""
        return "kv_b_proj" in module._modules

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Add the buffers; replace no method."""
        self._split(module)
        if self.layers.query is not None:
            one = torch.ones(1, device=module.kv_b_proj.weight.device)
            module.register_buffer(_QUERY_SCALE, one, persistent=False)
        return iter(())

    def restore(self, module: Any) -> None:
        """Remove the buffers."""
        added = (_KEYS, _VALUES, SOURCE)
        for name in added if self.layers.query is None else (*added, _QUERY_SCALE):
            delattr(module, name)

    def needs_refresh(self, body: Any) -> bool:
        """True: the halves are copies of the weight."""
        return True

    def refresh(self, op: str, name: str, module: Any) -> None:
        """Split the weight again if the weight changed or may have changed."""
        linear = module.kv_b_proj
        # torch does not count writes through weight.data or NumPy
        changed = getattr(module, SOURCE) != _identity(linear)
        if changed or linear.weight.device.type == "cpu":
            self._split(module)

    @torch.no_grad()
    def _split(self, attention: Any) -> None:
        """Compute the halves of ``kv_b_proj``, and store them in the same buffers if possible."""
        spec = self.layers
        halves = split_kv_b_proj(
            dense_weight(attention.kv_b_proj),
            num_heads=spec.num_heads,
            qk_nope_head_dim=spec.qk_nope_head_dim,
            v_head_dim=spec.v_head_dim,
            dtype=spec.dtype,
        )
        for name, half in zip((_KEYS, _VALUES), halves, strict=True):
            buffer = getattr(attention, name, None)
            if buffer is None or not _can_hold(buffer, half):
                attention.register_buffer(name, half, persistent=False)
            else:
                buffer.copy_(half)
        source = _identity(attention.kv_b_proj)
        # compiled steps watch attributes: set this attribute only after a change
        if getattr(attention, SOURCE, None) != source:
            setattr(attention, SOURCE, source)


class OneOpRouter(Rewrite):
    """Run the router of V3, V3.2 and GLM-5 as one op; Hugging Face's router launches a dozen
    kernels."""

    def applies(self, module: Any) -> bool:
        """Whether a module is the family's router."""
        return class_of(module) in _ROUTERS

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Yield the forward."""
        if own_forward(module) is None:
            yield "forward", _router_forward


def normed(body: Any, hidden: Tensor, output_tokens: Tensor | None) -> Any:
    """Return the final, normed states of ``output_tokens``, or of all tokens if ``output_tokens``
    is None."""
    return body.norm(hidden if output_tokens is None else hidden.index_select(1, output_tokens))


def _router_forward(before: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if differentiated((hidden_states, self.weight)):
            stock: tuple[Tensor, Tensor, Tensor] = before(self, hidden_states)
            return stock
        # under autocast the product is in bfloat16, as in Hugging Face's router
        logits = linear_float32(hidden_states.view(-1, self.hidden_dim), self.weight).float()
        routing = grouped_topk(
            logits,
            self.e_score_correction_bias.float(),
            top_k=self.top_k,
            num_groups=self.num_group,
            kept_groups=self.topk_group,
            scale=float(self.routed_scaling_factor),
            normalize=bool(self.norm_topk_prob),
        )
        return logits, routing.weights, routing.ids.long()

    return forward


def _attentions(body: Any) -> Iterator[tuple[int, Any]]:
    for index, layer in enumerate(body.layers):
        yield index, unwrapped(layer.self_attn)


def _identity(linear: Any) -> tuple[tuple[int, int], ...]:
    """Return the address and the version of each parameter. A change of a parameter changes its
    address or its version."""
    parameters = (local(each) for each in linear._parameters.values() if each is not None)
    return tuple(
        (each.data_ptr(), 0 if each.is_inference() else each._version) for each in parameters
    )


def _can_hold(buffer: Tensor, half: Tensor) -> bool:
    """Whether ``half`` can be copied into ``buffer``. A move of the model can change the device or
    the dtype of ``half``."""
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return (buffer.device, buffer.shape, buffer.dtype) == (half.device, half.shape, half.dtype)


def _as_pairs(x: Tensor) -> Tensor:
    """Interleave two halves: value i of the first half moves to 2 i, and value i of the second half
    to 2 i + 1. ``apply_rope`` rotates such pairs."""
    pairs: Tensor = x.unflatten(-1, (2, -1)).transpose(-1, -2)
    return pairs.flatten(-2)


def _check_sizes(op: str, config: Any, kv: str, layout: str) -> None:
    if config.num_key_value_heads != config.num_attention_heads:
        raise argument_error(
            op,
            "config.num_key_value_heads",
            must=f"be {config.num_attention_heads}, as heads are",
            got=config.num_key_value_heads,
            do="Latent attention has one key per head",
            kind=NotImplementedError,
        )
    width = config.kv_lora_rank + config.qk_rope_head_dim
    sizes = (config.kv_lora_rank, width)
    if layout == MlaDsFp8Layout.tag and sizes != (
        MlaDsFp8Layout.kv_lora_rank,
        MlaDsFp8Layout.width,
    ):
        rank, rope = MlaDsFp8Layout.kv_lora_rank, MlaDsFp8Layout.width - MlaDsFp8Layout.kv_lora_rank
        others = "'fp8', 'bf16' or 'fp32'" if kv == "ds_fp8" else "'bf16' or 'fp32'"
        raise argument_error(
            op,
            "kv",
            must=f"be {others} unless kv_lora_rank is {rank} and qk_rope_head_dim is {rope}",
            got=f"{kv!r} with {config.kv_lora_rank} and {config.qk_rope_head_dim}",
            do="Pass kv='bf16', say",
            kind=NotImplementedError,
        )
    if layout == MlaFp8Layout.tag and width % 16:
        raise argument_error(
            op,
            "kv",
            must="be 'bf16' or 'fp32' unless kv_lora_rank + qk_rope_head_dim is a multiple of 16",
            got=f"{kv!r} with {width}",
            do="Pass another kv",
            kind=NotImplementedError,
        )


def _check_execution(op: str, kv: str, execution: Execution) -> None:
    if execution.query is not None and kv != "fp8":
        raise argument_error(
            op,
            "query",
            must=f"be None with kv {kv!r}",
            got=repr(execution.query),
            do="Pass kv='fp8', or leave it out",
        )
    impl = execution.impl
    if impl in LIBRARIES:
        raise argument_error(
            op,
            "impl",
            must="be 'auto', 'triton' or 'reference' for dense MLA",
            got=repr(impl),
            do="Pass one of them",
            kind=NotImplementedError,
        )

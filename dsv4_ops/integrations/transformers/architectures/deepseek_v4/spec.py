"""DeepSeek-V4: its configuration as a ``LayerSpec``, its caches and its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4_ops.attention import KINDS, AttentionStep, ContextParallel, LayerCaches, LayerSpec
from dsv4_ops.attention.metadata import AttentionSpec
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.core.registry import REFERENCE
from dsv4_ops.core.types import MAX_REQUESTS
from dsv4_ops.core.yarn import YarnScaling
from dsv4_ops.dispatch import choice
from dsv4_ops.dispatch.choice import FLASH_MLA_HEADS
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES
from dsv4_ops.dispatch.providers import deep_gemm_num_sms, flash_mla_num_sm_parts
from dsv4_ops.integrations.transformers.architectures.base import (
    WITHOUT_MASKS,
    Execution,
    LayerContext,
    Runner,
    StepRun,
    StepTokens,
    check_drafts,
    draft_of,
    dtype_of,
    run_part,
)
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import draft
from dsv4_ops.integrations.transformers.architectures.deepseek_v4.attention import (
    KIND_OF_TYPE,
    OWN_SINKS,
    attention,
    head_parts,
    index_head_parts,
    skipped_modules,
)
from dsv4_ops.integrations.transformers.architectures.deepseek_v4.forwards import (
    Carried,
    FamilyForwards,
    can_carry,
)
from dsv4_ops.integrations.transformers.architectures.deepseek_v4.ring_caches import RingSpec
from dsv4_ops.integrations.transformers.architectures.deepseek_v4.rotary import (
    check_frequencies,
    check_rope,
    check_rotary,
    rounded_table,
    yarn_of,
)
from dsv4_ops.integrations.transformers.modules.checks import heads_are_split
from dsv4_ops.integrations.transformers.modules.fused_projections import FusedProjections
from dsv4_ops.integrations.transformers.modules.replacement import (
    Maker,
    class_of,
    local,
    unwrapped,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.tensors import (
    CacheTables,
    CacheTensors,
    RopeTables,
    ShardedTables,
)
from dsv4_ops.ops.rope import ROPE_DIM

_DTYPE_OF_KV = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Spec(RingSpec):
    """The configuration of a patched ``DeepseekV4ForCausalLM``.

    Attributes:
        step_layers: ``layers`` with the ``batch_invariant`` and ``impl`` of ``patch``.
        num_heads: Number of query heads.
        plan_heads: Number of query heads of split-KV plans; 0 for no plan.
    """

    step_layers: LayerSpec
    num_heads: int
    plan_heads: int

    causal_lm = ("DeepseekV4ForCausalLM",)
    memory_groups: ClassVar[dict[str, str]] = {
        "swa": "window",
        "compressed": "compressed",
        "indexer": "indexer",
        "states": "states",
        "indexer_states": "states",
    }
    shared_groups = ("compressed", "indexer")

    @classmethod
    def of(
        cls, op: str, config: Any, kv: str, recipe: Recipe, execution: Execution
    ) -> DeepseekV4Spec:
        """Build the spec of ``config``. If the family does not support ``config``, raise an error
        that names ``op``."""
        batch_invariant, impl, plan, parallel, query = execution
        if query is not None:
            raise argument_error(
                op,
                "query",
                must="be None for DeepSeek-V4",
                got=repr(query),
                do="Its attention takes queries in bfloat16",
                kind=NotImplementedError,
            )
        _check_layer_types(op, config)
        Checks(op).one_of("kv", kv, *_DTYPE_OF_KV, belongs_to="the cache shall hold")
        _check_sizes(op, config, kv)
        check_rope(op, config)
        kinds = tuple(KIND_OF_TYPE[kind] for kind in config.layer_types)
        layout, indexer_layout = PlainLayout.tag, PlainLayout.tag
        if kv == "fp8":
            layout, indexer_layout = MainLayout.tag, IndexerLayout.tag
        layers = LayerSpec(
            attention=_attention(config),
            num_groups=config.o_groups,
            head_dim=config.head_dim,
            rope_dim=config.qk_rope_head_dim,
            eps=config.rms_norm_eps,
            rope_theta=float(config.rope_parameters["main"]["rope_theta"]),
            compress_rope_theta=float(config.rope_parameters["compress"]["rope_theta"]),
            yarn=yarn_of(op, config),
            layout=layout,
            indexer_layout=indexer_layout,
            dtype=_DTYPE_OF_KV[kv],
            parallel=parallel,
            kinds=tuple(kind for kind in KINDS if kind in kinds),
        )
        check_frequencies(op, config, layers)
        _check_flash_mla(op, impl, kv, batch_invariant)
        dtype = dtype_of(config, _DTYPE_OF_KV[kv])
        takes_plan = not batch_invariant and impl not in (FLASH_MLA, REFERENCE)
        num_heads = config.num_attention_heads
        return cls(
            kinds=kinds,
            recipe=recipe,
            kv=kv,
            dtype=dtype,
            fingerprint=_fingerprint(layers, kinds, None if recipe.rope_float32 else dtype),
            layers=layers,
            step_layers=replace(layers, batch_invariant=batch_invariant, impl=impl),
            num_heads=num_heads,
            plan_heads=num_heads if plan and takes_plan and "c128" in kinds else 0,
        )

    def scheduled(self, device: torch.device) -> DeepseekV4Spec:
        """Add SM counts for a library's schedules, so that layers share one schedule per step."""
        layers = self.step_layers
        if layers.impl in LIBRARIES and device.type in choice.DEVICES:
            choice.require("patch", layers.impl)
        # FlashMLA's schedule depends on lengths that a rank knows only inside of the layer
        if layers.impl == FLASH_MLA and layers.ranks is not None:
            return self
        if layers.impl not in LIBRARIES or choice.unusable(layers.impl):
            return self
        if layers.impl == DEEP_GEMM and "c4" in self.kinds:
            layers = replace(layers, schedule_sms=deep_gemm_num_sms())
        elif layers.impl == FLASH_MLA and self.num_heads in FLASH_MLA_HEADS:
            if device.type not in choice.DEVICES:  # the model will move to a GPU before a run
                device = torch.device(choice.DEVICES[0])
            layers = replace(layers, sm_parts=flash_mla_num_sm_parts(self.num_heads, device))
        return replace(self, step_layers=layers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without SM counts: the copy may be loaded on another GPU."""
        plain = replace(self.step_layers, schedule_sms=0, sm_parts=0)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return partial(DeepseekV4Spec, **values | {"step_layers": plain}), ()

    @property
    def impl(self) -> str:
        return self.step_layers.impl

    @property
    def parallel(self) -> ContextParallel | None:
        return self.layers.ranks

    @property
    def block_tokens(self) -> int:
        ranks = self.layers.ranks
        return self.layers.attention.block_tokens * (1 if ranks is None else ranks.world_size)

    # The cache

    def tables(self, pool: Tensor, rings: dict[str, int], max_cache_len: int) -> CacheTables:
        sizes = {
            "swa": self.layers.attention.swa_block_size,
            "c4_states": self.layers.c4_state_block_size,
            "c128_states": self.layers.c128_state_block_size,
        }
        ints: dict[str, Any] = {"dtype": torch.int32, "device": pool.device}
        row = torch.arange(pool.shape[0], **ints)[:, None]
        tables = {}
        for name, block_size in sizes.items():
            block = torch.arange(-(-max_cache_len // block_size), **ints)
            tables[name] = row * rings[name] + block % rings[name]
        if self.parallel is None:
            return CacheTables(compressed=pool, **tables)
        return ShardedTables(compressed=pool, **tables, cp_rank=self.parallel.rank(pool.device))

    def rope_tables(self, num_positions: int, device: torch.device) -> RopeTables:
        return RopeTables(
            window=self.rope_table("window", num_positions, device),
            compressed=self.rope_table("c4", num_positions, device),
        )

    def rope_table(self, kind: str, num_positions: int, device: torch.device) -> Tensor:
        """Return the cosines and sines for a kind of layer."""
        if self.recipe.rope_float32:
            return self.layers.rope_table(kind, num_positions, device)
        return rounded_table(self.layers, kind, num_positions, self.dtype).to(device)

    def layer_caches(
        self,
        kind: str,
        num_rows: int,
        num_blocks: int,
        max_cache_len: int,
        rings: dict[str, int],
        device: torch.device,
    ) -> LayerCaches:
        states = 0 if kind == "window" else rings[f"{kind}_states"]
        return LayerCaches.allocate(
            self.layers,
            kind,
            swa_blocks=num_rows * rings["swa"],
            compressed_blocks=num_blocks,
            state_blocks=num_rows * states,
            device=device,
        )

    # A step

    def build_step(self, step: StepTokens, cache: CacheTensors, schedule: str) -> AttentionStep:
        num_tokens = step.tokens.positions.shape[0]
        decodes = schedule == "decode" and self.plan_heads > 0
        heads = self.plan_heads if decodes and num_tokens <= MAX_REQUESTS else 0
        layers = self.layers_for(schedule, num_tokens)
        return self.build_ring_step(layers, step, cache, heads)

    def layers_for(self, schedule: str, num_tokens: int) -> LayerSpec:
        """Return the spec for a step, with a library's schedules if the layers can use them in this
        step."""
        layers = self.step_layers
        if layers.sm_parts and schedule != "decode":
            return self.layers
        # compare num_tokens last: the comparison adds a guard to a trace
        if layers.schedule_sms and num_tokens > MAX_REQUESTS:
            return self.layers
        return layers

    # The model

    def run_layers(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        return step_run.run(
            "norm", _normed, body, self._run(body, hidden, ids, step_run), step_run.output_tokens
        )

    def run_streams(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        return self.states_of(self._run(body, hidden, ids, step_run))

    def states_of(self, hidden: Any) -> Tensor:
        states: Tensor = hidden.mixed() if isinstance(hidden, Carried) else hidden
        return states

    def _run(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor | Carried:
        streams: Tensor | Carried
        streams = hidden.unsqueeze(2).expand(-1, -1, body.config.hc_mult, -1).contiguous()
        cache = step_run.cache
        if can_carry(self.recipe, body.layers, streams, step_run):
            streams = Carried.of(streams)
        layers = zip(self.kinds, body.layers, cache.layers, strict=True)
        for number, (kind, layer, caches) in enumerate(layers):
            streams = step_run.run(
                f"{kind}_{class_of(layer.mlp.gate)}",
                layer,
                streams,
                input_ids=ids,
                dsv4_ops=step_run.context(number, caches, cache.rope.of(kind)),
                **WITHOUT_MASKS,
            )
        return streams

    def normed(
        self, body: Any, streams: Tensor, part: str = "norm", run: Runner = run_part
    ) -> Tensor:
        states: Tensor = run(part, _normed, body, streams)
        return states

    # The draft layer

    def draft_kinds(self, op: str) -> tuple[str, ...]:
        check_drafts(op, self.parallel)
        return draft.KINDS

    def draft_layer(self, op: str, model: Any) -> Any:
        self.draft_kinds(op)
        return draft.DraftLayer(model)

    def build_draft_step(self, step: StepTokens, cache: CacheTensors) -> AttentionStep:
        layers = self.layers_for("decode", step.tokens.positions.shape[0])
        layers = replace(layers, kinds=draft.KINDS)
        cache = replace(cache, layers=cache.draft)
        return self.build_ring_step(layers, step, cache, 0)

    def run_draft(
        self, part: str, model: Any, tokens: Tensor, streams: Tensor, step_run: StepRun
    ) -> Tensor:
        cache, kind = step_run.cache, draft.KINDS[0]
        rope, schedule = cache.rope.of(kind), step_run.schedule
        context = LayerContext(step_run.step, cache.draft[0], rope, schedule, state_rings=False)
        ran: Tensor = step_run.run(
            part, draft.run, draft_of(model), model.model, tokens, streams, context
        )
        return ran

    def attention(self, module: Any, hidden: Tensor, context: LayerContext) -> Tensor:
        return attention(module, self.step_layers, self.recipe, hidden, context)

    @property
    def family_rewrites(self) -> tuple[Rewrite, ...]:
        own = FusedProjections(self.recipe, self.impl), FamilyForwards(self.recipe)
        return (SplitHeads(self.num_groups), *own) if self.shards_heads else own

    def skipped_modules(self, attention: Any) -> Iterator[tuple[str, Any]]:
        return skipped_modules(attention)

    def of_model(self, model: Any) -> DeepseekV4Spec:
        split = [
            heads_are_split("patch", model.model, self.parallel, parts)
            for parts in (head_parts, index_head_parts)
        ]
        if not any(split):
            return self
        assert self.parallel is not None  # without ranks, ``heads_are_split`` raises
        parallel = replace(self.parallel, shards_heads=split[0], shards_index_heads=split[1])
        ranks = parallel.head_parts
        Checks("patch").divides("parallel.world_size", ranks, "config.o_groups", self.num_groups)
        changed: dict[str, Any] = {"num_groups": self.num_groups // ranks, "parallel": parallel}
        return replace(
            self,
            layers=replace(self.layers, **changed),
            step_layers=replace(self.step_layers, **changed),
            num_heads=self.num_heads // ranks,
            plan_heads=self.plan_heads // ranks,
        )

    def check_model(self, op: str, model: Any) -> None:
        check_rotary(op, model, self.layers)

    def check_other_cache(self, op: str) -> None:
        if self.shards_heads:
            raise argument_error(
                op,
                "cache",
                must="be a PagedCache if ranks split the heads",
                got="another cache, or none",
                do="Pass cache=cache",
                kind=NotImplementedError,
            )

    @property
    def num_groups(self) -> int:
        """Number of output projection groups on this rank."""
        return self.layers.num_groups


class SplitHeads(Rewrite):
    """Give attention modules this rank's attention sinks, and the number of output groups on this
    rank.

    Hugging Face's modules have the number over all ranks. The sinks go into a buffer, because torch
    cannot load a saved trace that reads a distributed tensor.

    Args:
        num_groups: Number of groups on this rank.
    """

    attention_only = True

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's attention."""
        return class_of(module) == "DeepseekV4Attention"

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Set the number and the buffer; replace no method."""
        self._set_groups(module, self.num_groups)
        self.refresh("patch", "", module)
        return iter(())

    def needs_refresh(self, body: Any) -> bool:
        """True: a program may replace the sinks."""
        return True

    def refresh(self, op: str, name: str, module: Any) -> None:
        """Let the buffer share the sinks' memory."""
        # call local first: torch cannot detach a distributed tensor in inference mode
        sinks, own = local(module.sinks).detach(), getattr(module, OWN_SINKS, None)
        if own is None or own.data_ptr() != sinks.data_ptr():
            module.register_buffer(OWN_SINKS, sinks, persistent=False)

    def restore(self, module: Any) -> None:
        """Restore the number of groups over all ranks, and remove the buffer."""
        self._set_groups(module, module.config.o_groups)
        delattr(module, OWN_SINKS)

    def _set_groups(self, module: Any, count: int) -> None:
        projection = unwrapped(module.o_a_proj)
        if hasattr(projection, "n_groups"):
            projection.n_groups = count


def _normed(body: Any, streams: Tensor | Carried, output_tokens: Tensor | None = None) -> Any:
    if isinstance(streams, Carried):
        if output_tokens is not None:
            streams = Carried(*(each.index_select(0, output_tokens) for each in streams))
        streams = streams.mixed()
    elif output_tokens is not None:
        streams = streams.index_select(1, output_tokens)
    return body.norm(body.hc_head(streams))


def _check_layer_types(op: str, config: Any) -> None:
    unknown = sorted(set(config.layer_types) - set(KIND_OF_TYPE))
    if unknown:
        raise argument_error(
            op,
            "config.layer_types",
            must="hold only " + ", ".join(map(repr, KIND_OF_TYPE)),
            got=", ".join(map(repr, unknown)),
            do="These layers are unknown to this version",
            kind=NotImplementedError,
        )


def _check_flash_mla(op: str, impl: str, kv: str, batch_invariant: bool) -> None:
    """Raise for settings that FlashMLA does not support. FlashMLA has one layout, and its split
    of KV rows depends on the batch."""
    for name, value, wanted in (("kv", kv, "fp8"), ("batch_invariant", batch_invariant, False)):
        if impl == FLASH_MLA and value != wanted:
            raise argument_error(
                op,
                name,
                must=f"be {wanted!r} for impl 'flash_mla'",
                got=repr(value),
                do="FlashMLA runs nothing else",
                kind=NotImplementedError,
            )


def _check_sizes(op: str, config: Any, kv: str) -> None:
    has_indexer = "compressed_sparse_attention" in config.layer_types
    if has_indexer and config.index_head_dim != IndexerLayout.head_dim:
        raise argument_error(
            op,
            "config.index_head_dim",
            must=f"be {IndexerLayout.head_dim}",
            got=config.index_head_dim,
            do="The indexer's cache has rows of that many values",
            kind=NotImplementedError,
        )
    sizes = (config.head_dim, config.qk_rope_head_dim)
    wanted = (MainLayout.head_dim, ROPE_DIM)
    if kv == "fp8" and sizes != wanted:
        raise argument_error(
            op,
            "kv",
            must=f"be 'bf16' or 'fp32' unless head_dim is {wanted[0]} with {wanted[1]} rotated",
            got=f"{kv!r} with head_dim {sizes[0]} and {sizes[1]} rotated",
            do="Pass kv='bf16' or 'fp32'",
            kind=NotImplementedError,
        )


def _attention(config: Any) -> AttentionSpec:
    rates = config.compress_rates
    ratios = rates["compressed_sparse_attention"], rates["heavily_compressed_attention"]
    both = math.lcm(*ratios)
    return AttentionSpec(
        window_size=config.sliding_window,
        c4_ratio=ratios[0],
        c128_ratio=ratios[1],
        block_tokens=-(-AttentionSpec.block_tokens // both) * both,
        index_topk=config.index_topk,
        max_model_len=config.max_position_embeddings,
        indexer_workspace=max(
            AttentionSpec.indexer_workspace, config.max_position_embeddings // ratios[0]
        ),
    )


_OF_STEPS = ("batch_invariant", "impl", "schedule_sms", "sm_parts")


def _fingerprint(layers: LayerSpec, kinds: tuple[str, ...], rope_dtype: torch.dtype | None) -> str:
    """Return, as text, all settings on which the meaning of a cache's tensors depends."""
    values: dict[str, Any] = {"layers": ",".join(kinds), "angles": rope_dtype or "exact"}
    parts: list[LayerSpec | AttentionSpec | YarnScaling] = [layers.attention, layers]
    for part in parts if layers.yarn is None else [*parts, layers.yarn]:
        values |= {field.name: getattr(part, field.name) for field in fields(part)}
    # these fields have entries of their own, or no effect on the cache
    for name in ("attention", "parallel", "kinds", *_OF_STEPS):
        del values[name]
    if layers.ranks is not None:
        values["ranks"] = f"{layers.ranks.world_size} of {layers.ranks.interleave} rows"
    values["yarn"] = layers.yarn is not None
    return "; ".join(f"{name}={value}" for name, value in values.items())

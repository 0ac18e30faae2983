"""Translate Hugging Face's configuration to a ``LayerSpec``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import LayerSpec
from dsv4_ops.attention.metadata import AttentionSpec
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import REFERENCE
from dsv4_ops.core.types import MAX_REQUESTS
from dsv4_ops.core.yarn import YarnScaling
from dsv4_ops.dispatch import choice
from dsv4_ops.dispatch.choice import FLASH_MLA_HEADS
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES
from dsv4_ops.dispatch.providers import deep_gemm_num_sms, flash_mla_num_sm_parts
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.rotary import (
    check_frequencies,
    check_rope,
    rounded_table,
    yarn_of,
)
from dsv4_ops.ops.rope import ROPE_DIM

KIND_OF_TYPE = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "c4",
    "heavily_compressed_attention": "c128",
}
"""Layer kind for each of Hugging Face's layer types."""

_DTYPE_OF_KV = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
_OLDEST = (5, 17)


@dataclass(frozen=True)
class ModelSpec:
    """The configuration that a patched model's cache and steps depend on.

    Attributes:
        layers: Spec of the attention layers, which the cache follows.
        kinds: Kind of every layer.
        recipe, kv: As passed to ``patch``.
        step_layers: ``layers`` with the ``batch_invariant`` and ``impl`` of ``patch``.
        dtype: Dtype of the model.
        num_heads: Query heads.
        plan_heads: ``plan_heads`` of decode steps; 0 for no plan.
        fingerprint: Everything that a cache depends on, as "name=value" joined by "; ".
    """

    layers: LayerSpec
    kinds: tuple[str, ...]
    recipe: Recipe
    kv: str
    step_layers: LayerSpec
    dtype: torch.dtype
    num_heads: int
    plan_heads: int
    fingerprint: str

    @classmethod
    def of(
        cls,
        op: str,
        config: Any,
        kv: str,
        precision: str | Recipe,
        *,
        batch_invariant: bool = False,
        impl: str = "auto",
        plan: bool = True,
    ) -> ModelSpec:
        """Build the spec of ``config``; raise an error of ``op`` if it is not supported."""
        _check_model(op, config)
        checks = Checks(op)
        checks.one_of("kv", kv, *_DTYPE_OF_KV, belongs_to="the cache shall hold")
        recipe = Recipe.named(op, precision)
        _check_sizes(op, config, kv)
        check_rope(op, config)
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
        )
        check_frequencies(op, config, layers)
        kinds = tuple(KIND_OF_TYPE[kind] for kind in config.layer_types)
        _check_flash_mla(op, impl, kv, batch_invariant)
        step_layers = replace(layers, batch_invariant=batch_invariant, impl=impl)
        dtype = getattr(config, "dtype", None)
        if not isinstance(dtype, torch.dtype):  # no model was made from this configuration
            dtype = _DTYPE_OF_KV[kv]
        takes_plan = not batch_invariant and impl not in (FLASH_MLA, REFERENCE)
        num_heads = config.num_attention_heads
        plan_heads = num_heads if plan and takes_plan and "c128" in kinds else 0
        fingerprint = _fingerprint(layers, kinds, None if recipe.rope_float32 else dtype)
        steps = (step_layers, dtype, num_heads, plan_heads)
        return cls(layers, kinds, recipe, kv, *steps, fingerprint)

    def scheduled(self, device: torch.device) -> ModelSpec:
        """Add the SM counts of a library's schedules, so that layers share one schedule per step.

        Args:
            device: Device of the model.
        """
        layers = self.step_layers
        if layers.impl not in LIBRARIES or choice.unusable(layers.impl):
            return self
        if layers.impl == DEEP_GEMM and "c4" in self.kinds:
            layers = replace(layers, schedule_sms=deep_gemm_num_sms())
        elif layers.impl == FLASH_MLA and self.num_heads in FLASH_MLA_HEADS:
            if device.type not in choice.DEVICES:  # the model will be moved before it runs
                device = torch.device(choice.DEVICES[0])
            layers = replace(layers, sm_parts=flash_mla_num_sm_parts(self.num_heads, device))
        return replace(self, step_layers=layers)

    def layers_for(self, schedule: str, num_tokens: int) -> LayerSpec:
        """Spec to build a step with; it has a library's schedules where the layers take them."""
        layers = self.step_layers
        if layers.sm_parts and schedule != "decode":
            return self.layers
        # compare num_tokens only if needed: the comparison guards a graph
        if layers.schedule_sms and num_tokens > MAX_REQUESTS:
            return self.layers
        return layers

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without SM counts: the copy may be loaded for another GPU."""
        plain = replace(self.step_layers, schedule_sms=0, sm_parts=0)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return ModelSpec, tuple((values | {"step_layers": plain}).values())

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSpec:
        return self

    def rope_table(self, kind: str, num_positions: int, device: torch.device) -> Tensor:
        """Cosines and sines for layers of a kind."""
        if self.recipe.rope_float32:
            return self.layers.rope_table(kind, num_positions, device)
        return rounded_table(self.layers, kind, num_positions, self.dtype).to(device)


def require_transformers(op: str) -> Any:
    """Import ``transformers``, or raise if it is missing or too old for DeepSeek-V4."""
    advice = 'Install "dsv4_ops[transformers]"'
    try:
        import transformers
    except ImportError as error:
        raise refusal(
            ImportError, op, "transformers", "be installed", "no such module", advice
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _OLDEST:
        rule = "be " + ".".join(map(str, _OLDEST)) + " or newer"
        raise refusal(ImportError, op, "transformers", rule, transformers.__version__, advice)
    return transformers


def _check_model(op: str, config: Any) -> None:
    advice = "Pass a DeepseekV4ForCausalLM or its configuration"
    found = getattr(config, "model_type", type(config).__name__)
    if found != "deepseek_v4":
        raise refusal(NotImplementedError, op, "model_type", "be 'deepseek_v4'", found, advice)
    unknown = sorted(set(config.layer_types) - set(KIND_OF_TYPE))
    if unknown:
        rule = "hold only " + ", ".join(map(repr, KIND_OF_TYPE))
        found, advice = ", ".join(map(repr, unknown)), "These layers are unknown to this version"
        raise refusal(NotImplementedError, op, "config.layer_types", rule, found, advice)


def _check_flash_mla(op: str, impl: str, kv: str, batch_invariant: bool) -> None:
    """FlashMLA reads its own layout only, and chooses its splits by the batch."""
    if impl != "flash_mla" or (kv == "fp8" and not batch_invariant):
        return
    name, rule, value = ("kv", "be 'fp8'", repr(kv))
    if kv == "fp8":
        name, rule, value = ("batch_invariant", "be False", "True")
    rule, advice = f"{rule} for impl 'flash_mla'", "FlashMLA runs nothing else"
    raise refusal(NotImplementedError, op, name, rule, value, advice)


def _check_sizes(op: str, config: Any, kv: str) -> None:
    has_indexer = "compressed_sparse_attention" in config.layer_types
    if has_indexer and config.index_head_dim != IndexerLayout.head_dim:
        name, rule = "config.index_head_dim", f"be {IndexerLayout.head_dim}"
        advice = "The indexer's cache has rows of that many values"
        raise refusal(NotImplementedError, op, name, rule, config.index_head_dim, advice)
    sizes = (config.head_dim, config.qk_rope_head_dim)
    wanted = (MainLayout.head_dim, ROPE_DIM)
    if kv == "fp8" and sizes != wanted:
        rule = f"be 'bf16' or 'fp32' unless head_dim is {wanted[0]} with {wanted[1]} rotated"
        found = f"{kv!r} with head_dim {sizes[0]} and {sizes[1]} rotated"
        raise refusal(NotImplementedError, op, "kv", rule, found, "Pass another kv")


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
    """Everything besides weights that decides what a cache's tensors mean."""
    values: dict[str, Any] = {"layers": ",".join(kinds), "angles": rope_dtype or "exact"}
    parts: list[LayerSpec | AttentionSpec | YarnScaling] = [layers.attention, layers]
    for part in parts if layers.yarn is None else [*parts, layers.yarn]:
        values |= {field.name: getattr(part, field.name) for field in fields(part)}
    for name in ("attention", *_OF_STEPS):  # listed field by field, or not about the cache
        del values[name]
    values["yarn"] = layers.yarn is not None
    return "; ".join(f"{name}={value}" for name, value in values.items())

"""Tensors of an attention layer: projection outputs, parameters and caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.attention import pytrees
from dsv4_ops.attention.dsa_spec import DsaSpec
from dsv4_ops.attention.mla_spec import MlaSpec
from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.attention.step import AttentionStep
from dsv4_ops.core.gradient import differentiated, without_derivative
from dsv4_ops.core.layout import MlaFp8Layout


@dataclass(frozen=True)
class LayerInputs:
    """Projection outputs of a layer, one row per token.

    Attributes:
        q: Queries before norm and RoPE, [num_tokens, num_heads, head_dim], bfloat16; with plain
            layouts, the spec's dtype.
        kv: Keys after norm, before RoPE, [num_tokens, head_dim], of the same dtype.
        kv_score: For "c4" and "c128": the compressor's kv and score side by side, [num_tokens, 2 *
            ``LayerSpec.compressor_width``], float32.
        indexer_q: For "c4": indexer queries, [num_tokens, index_heads, 128].
        indexer_weights: For "c4": head weights of the indexer, [num_tokens, index_heads], bfloat16
            or float32.
        indexer_kv_score: For "c4": ``kv_score`` of the indexer's compressor, [num_tokens, 512].
    """

    q: Tensor
    kv: Tensor
    kv_score: Tensor | None = None
    indexer_q: Tensor | None = None
    indexer_weights: Tensor | None = None
    indexer_kv_score: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """Float32 parameters of a layer besides its projections.

    Attributes:
        cos_sin_cache: ``LayerSpec.rope_table`` of the kind, [num_positions, rope_dim].
        attn_sink: Attention sink logits, [num_heads].
        ape: Position bias of the compressor's scores, [ratio, width].
        norm_weight: Weight of the compressor's norm, [head_dim].
        indexer_ape: ``ape`` of the indexer's compressor.
        indexer_norm_weight: ``norm_weight`` of the indexer's compressor.
    """

    cos_sin_cache: Tensor
    attn_sink: Tensor
    ape: Tensor | None = None
    norm_weight: Tensor | None = None
    indexer_ape: Tensor | None = None
    indexer_norm_weight: Tensor | None = None


@dataclass(frozen=True)
class LayerCaches:
    """Hold the paged caches of one layer, which are written in place.

    Their layouts are those of ``LayerSpec.layouts``.

    Attributes:
        swa: Sliding-window keys.
        compressed: Compressed keys.
        states: Compressor states of windows that are not complete yet.
        indexer: Compressed indexer keys.
        indexer_states: States of the indexer's compressor.
    """

    swa: Tensor
    compressed: Tensor | None = None
    states: Tensor | None = None
    indexer: Tensor | None = None
    indexer_states: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        spec: LayerSpec,
        kind: str,
        *,
        swa_blocks: int,
        compressed_blocks: int = 0,
        state_blocks: int = 0,
        device: torch.device | str | None = None,
    ) -> LayerCaches:
        """Allocate empty caches for one layer. ``indexer`` has as many blocks as ``compressed``,
        and ``indexer_states`` as many as ``states``."""
        blocks = {"swa": swa_blocks, "compressed": compressed_blocks, "states": state_blocks}
        blocks |= {"indexer": compressed_blocks, "indexer_states": state_blocks}
        layouts = spec.layouts(kind).items()
        return cls(**{name: layout.allocate(blocks[name], device) for name, layout in layouts})


class LayerCall(NamedTuple):
    """The arguments of ``attention_layer``, as one value that its stages take."""

    spec: LayerSpec
    kind: str
    inputs: LayerInputs
    weights: LayerWeights
    caches: LayerCaches
    step: AttentionStep


@dataclass(frozen=True)
class MlaInputs:
    """Projection outputs of a dense MLA layer, one row per token, in the spec's dtype.

    Attributes:
        q: Queries before RoPE, [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim].
        kv_c: Latents after their norm, [num_tokens, kv_lora_rank].
        k_pe: The key part that heads share, before RoPE, [num_tokens, qk_rope_head_dim].
    """

    q: Tensor
    kv_c: Tensor
    k_pe: Tensor


@dataclass(frozen=True)
class MlaWeights:
    """Parameters of a dense MLA layer besides its projections.

    Attributes:
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, qk_rope_head_dim], float32.
        w_uk_t: Key weights from ``split_kv_b_proj``, [num_heads, qk_nope_head_dim, kv_lora_rank].
        w_uv: Value weights from ``split_kv_b_proj``, [num_heads, kv_lora_rank, v_head_dim].
        w_kv_b: ``kv_b_proj.weight`` itself, [num_heads * (qk_nope_head_dim + v_head_dim),
            kv_lora_rank], for chunked contexts.
        q_scale: With ``MlaSpec.query`` "fp8": scale of the codes of absorbed queries, [1], float32.
            Values above 448 times the scale saturate.
    """

    cos_sin_cache: Tensor
    w_uk_t: Tensor
    w_uv: Tensor
    w_kv_b: Tensor | None = None
    q_scale: Tensor | None = None


@dataclass(frozen=True)
class MlaCache:
    """Hold the paged latent rows of a dense MLA layer, which are written in place.

    Their layout is ``MlaSpec.cache_layout``.

    Attributes:
        kv: The rows.
        scale: With the layout "mla_fp8": scale of the codes, [1], float32; 1 until calibrated.
    """

    kv: Tensor
    scale: Tensor | None = None

    @classmethod
    def allocate(
        cls, spec: MlaSpec, num_blocks: int, device: torch.device | str | None = None
    ) -> MlaCache:
        """Allocate an empty cache for one layer."""
        scaled = spec.layout == MlaFp8Layout.tag
        scale = torch.ones(1, dtype=torch.float32, device=device) if scaled else None
        return cls(spec.cache_layout().allocate(num_blocks, device), scale)


@dataclass(frozen=True)
class IndexerInputs:
    """Projection outputs of the indexer of ``dsa_layer``, one row per token.

    Attributes:
        q: Queries before RoPE, [num_tokens, index_heads, 128], in the spec's dtype. None if the
            step selects no rows (``dsa_layer``).
        k: Keys after their norm, before RoPE, [num_tokens, 128], in the spec's dtype.
        weights: Head weights, [num_tokens, index_heads], bfloat16 or float32. None if q is None.
    """

    q: Tensor | None
    k: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class DsaCache:
    """Hold the paged rows of a sparse layer, which are written in place.

    One block table serves both tensors, so that a slot is the same token in both.

    Attributes:
        kv: Latent rows, of the layout ``DsaSpec.cache_layout``.
        indexer: Indexer keys, of the layout ``DsaSpec.index_cache_layout``; None for a layer that
            attends to the rows that another layer selected.
    """

    kv: Tensor
    indexer: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        spec: DsaSpec,
        num_blocks: int,
        device: torch.device | str | None = None,
        *,
        selects: bool = True,
        num_key_blocks: int | None = None,
    ) -> DsaCache:
        """Allocate an empty cache for one layer.

        ``selects`` says whether the layer has an indexer; ``num_key_blocks`` is the number of
        blocks of the indexer's keys, by default ``num_blocks``.
        """
        blocks = num_blocks if num_key_blocks is None else num_key_blocks
        keys = spec.index_cache_layout().allocate(blocks, device) if selects else None
        return cls(spec.cache_layout().allocate(num_blocks, device), keys)


class DsaAttention(NamedTuple):
    """The result of ``dsa_layer``.

    Attributes:
        out: Input of the output projection, [num_tokens, num_heads * v_head_dim].
        slots: Slots of the rows that each token attended to, [num_tokens, index_topk], int32; -1
            after the last row. None if the step selects no rows.
    """

    out: Tensor
    slots: Tensor | None


_CLASSES = (
    *(LayerInputs, LayerWeights, LayerCaches),
    *(MlaInputs, MlaWeights, MlaCache, IndexerInputs, DsaCache),
)
pytrees.register(*_CLASSES)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``function`` without autograd; backward through the result raises.

    Caches keep no autograd history. If a tensor of the layer requires a gradient, autograd sees the
    result as computed from that tensor, so that backward fails instead of silently skipping the
    layer.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        wrapped = [each for each in (*args, *kwargs.values()) if isinstance(each, _CLASSES)]
        # fields(): Dynamo in torch 2.11 cannot trace vars() of a frozen dataclass
        names = [(each, field.name) for each in wrapped for field in fields(each)]
        tied = differentiated([getattr(each, name) for each, name in names])
        if not tied:
            return function(*args, **kwargs)
        with torch.no_grad():
            result = function(*args, **kwargs)
        copy = functools.partial(without_derivative, function.__name__, sources=tied)
        copies: _R = pytree.tree_map_only(Tensor, copy, result)
        return copies

    return call

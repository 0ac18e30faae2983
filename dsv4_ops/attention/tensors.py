"""The tensors of an attention layer: what projections give, parameters, caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.core.gradient import differentiated, without_derivative


@dataclass(frozen=True)
class LayerInputs:
    """What the projections of a layer give for every token.

    ``q`` [num_tokens, num_heads, head_dim]: queries before their norm. ``kv`` [num_tokens,
    head_dim]: keys after theirs. Both without RoPE, bfloat16 (of plain layouts: their dtype).
    "c4" and "c128": ``kv_score`` float32 [num_tokens, 2 * width]: kv and score of the compressor;
    width is 2 * head_dim for "c4", head_dim for "c128". "c4": ``indexer_q`` [num_tokens,
    index_heads, 128], ``indexer_weights`` [num_tokens, index_heads] bfloat16 or float32,
    and ``indexer_kv_score`` float32 [num_tokens, 512].
    """

    q: Tensor
    kv: Tensor
    kv_score: Tensor | None = None
    indexer_q: Tensor | None = None
    indexer_weights: Tensor | None = None
    indexer_kv_score: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """Parameters of a layer that are no projection, float32.

    ``cos_sin_cache`` [num_positions, rope_dim]: from ``LayerSpec.rope_table`` of its kind.
    ``attn_sink`` [num_heads]. Of the compressor, ``ape`` [ratio, width]: position bias of the
    scores, and ``norm_weight`` [head_dim]; ``indexer_ape`` and ``indexer_norm_weight``: of that of
    the indexer.
    """

    cos_sin_cache: Tensor
    attn_sink: Tensor
    ape: Tensor | None = None
    norm_weight: Tensor | None = None
    indexer_ape: Tensor | None = None
    indexer_norm_weight: Tensor | None = None


@dataclass(frozen=True)
class LayerCaches:
    """Paged caches of a layer, written in place; their layouts are ``LayerSpec.layouts``.

    ``swa``: keys of the window. ``compressed`` and ``states``: compressed keys, and the unfinished
    windows of the compressor. ``indexer`` and ``indexer_states``: the same of the indexer.
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
        """Empty caches of a layer. The indexer's have as many pages as the others."""
        pages = {"swa": swa_blocks, "compressed": compressed_blocks, "states": state_blocks}
        pages |= {"indexer": compressed_blocks, "indexer_states": state_blocks}
        layouts = spec.layouts(kind).items()
        return cls(**{name: layout.allocate(pages[name], device) for name, layout in layouts})


_CLASSES = (LayerInputs, LayerWeights, LayerCaches)
for _pytree_class in _CLASSES:
    pytree.register_dataclass(
        _pytree_class, serialized_type_name=f"dsv4_ops.{_pytree_class.__name__}"
    )


_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` of the tensors of a layer, out of autograd's sight: caches keep no history, and
    what it returns raises in backward where a tensor required gradients."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        held = [each for each in (*args, *kwargs.values()) if isinstance(each, _CLASSES)]
        # by name: Dynamo of torch 2.11 does not trace vars() of a frozen dataclass
        names = [(each, field.name) for each in held for field in fields(each)]
        tied = differentiated([getattr(each, name) for each, name in names])
        if not tied:
            return function(*args, **kwargs)
        with torch.no_grad():
            result = function(*args, **kwargs)
        copy = functools.partial(without_derivative, function.__name__, sources=tied)
        copies: _R = pytree.tree_map_only(Tensor, copy, result)
        return copies

    return call

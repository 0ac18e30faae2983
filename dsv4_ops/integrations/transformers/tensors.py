"""The tensors of a step: its batch, the block tables, the caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.attention import LayerCaches


@dataclass(frozen=True)
class StepBatch:
    """A step of a ragged batch: decodes, prefills, chunks of them, padding requests.

    ``tokens`` int64 [num_tokens]: token ids, request after request; those of padding tokens are not
    read. ``query_start_loc`` int32 [num_reqs + 1]: first token of every request and one past the
    last; tokens behind that are padding. ``seq_lens`` int32 [num_reqs]: tokens of every request,
    those of the step included; 0 marks a padding request. ``rows`` int32 [num_reqs]: row of the
    cache of every request; no two requests share one. -1, or any row that the cache does not have,
    makes it a padding request.
    """

    tokens: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor


@dataclass(frozen=True)
class CacheTables:
    """Block tables of all rows of a cache, int32 [max_batch_size, max_blocks of the group] each.

    ``swa``: blocks of the window cache, a ring per row. ``compressed``: blocks of the compressed
    caches and of the indexer's, from the pool; -1 where none is reserved. ``c4_states`` and
    ``c128_states``: blocks of the compressors' states, rings too.
    """

    swa: Tensor
    compressed: Tensor
    c4_states: Tensor
    c128_states: Tensor


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of layers with a window only and of those with a compressor."""

    window: Tensor
    compressed: Tensor

    def of(self, kind: str) -> Tensor:
        """The table of a kind of layer."""
        return self.window if kind == "window" else self.compressed


@dataclass(frozen=True)
class CacheTensors:
    """All tensors of a ``PagedCache`` that a step reads or writes; ``layers`` are written.

    ``dropped`` int64 [1]: steps add the tokens that they could not store
    (``PagedCache.raise_if_dropped``).
    ``made_for``: what of the model the cache depends on, ``ModelSpec.fingerprint``; a step refuses
    that of another. It is no leaf, but part of the structure: a graph holds it as a constant.
    """

    tables: CacheTables
    rope: RopeTables
    layers: tuple[LayerCaches, ...]
    dropped: Tensor
    made_for: str


_CACHE = ("tables", "rope", "layers", "dropped")


def _flatten(cache: CacheTensors) -> tuple[list[Any], str]:
    return [getattr(cache, name) for name in _CACHE], cache.made_for


def _flatten_with_keys(cache: CacheTensors) -> tuple[list[tuple[Any, Any]], str]:
    keys = [(pytree.GetAttrKey(name), getattr(cache, name)) for name in _CACHE]
    return keys, cache.made_for


def _unflatten(values: Iterable[Any], made_for: str) -> CacheTensors:
    tables, rope, layers, dropped = values
    return CacheTensors(tables, rope, layers, dropped, made_for)


pytree.register_pytree_node(
    CacheTensors,
    _flatten,
    _unflatten,
    serialized_type_name="dsv4_ops.transformers.CacheTensors",
    to_dumpable_context=str,
    from_dumpable_context=str,
    flatten_with_keys_fn=_flatten_with_keys,
)
for _pytree_class in (StepBatch, CacheTables, RopeTables):
    pytree.register_dataclass(
        _pytree_class, serialized_type_name=f"dsv4_ops.transformers.{_pytree_class.__name__}"
    )

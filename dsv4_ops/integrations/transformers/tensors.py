"""Tensors of a step: its batch, block tables and caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.attention import pytrees


@dataclass(frozen=True)
class StepBatch:
    """A ragged batch of decodes, prefills, prefill chunks and padding requests.

    Attributes:
        tokens: Token ids, request after request, [num_tokens], int64.
        query_start_loc: Start of every request in ``tokens``, then the end of the last request,
            [num_reqs + 1], int32. Tokens after that end are padding.
        seq_lens: Length of every request including this step's tokens, [num_reqs], int32. 0 marks a
            padding request.
        rows: Cache row of every request, [num_reqs], int32; distinct. A negative row marks a
            padding request.
    """

    tokens: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor


@dataclass(frozen=True)
class CacheTables:
    """Block tables of a cache, each int32 [max_batch_size, maximum blocks of a row].

    Attributes:
        swa: Blocks of the window cache; the blocks of a row are a ring.
        compressed: Numbers of the pool's blocks that hold compressed rows and indexer keys; -1
            where none is reserved.
        c4_states, c128_states: Blocks of the compressor states; the blocks of a row are a ring.
    """

    swa: Tensor
    compressed: Tensor
    c4_states: Tensor
    c128_states: Tensor

    @property
    def pool(self) -> Tensor:
        """The block table of the pool that all rows share."""
        return self.compressed


@dataclass(frozen=True)
class ShardedTables(CacheTables):
    """Tables of a cache whose compressed rows several ranks share.

    Attributes:
        cp_rank: The rank, [1], int32; a tensor, so that one AOTInductor package serves all ranks.
    """

    cp_rank: Tensor


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of window layers and of layers with a compressor."""

    window: Tensor
    compressed: Tensor

    def of(self, kind: str) -> Tensor:
        """Return the table for a kind of layer."""
        return self.window if kind == "window" else self.compressed

    @property
    def num_positions(self) -> int:
        """Number of rows of a table."""
        return self.window.shape[0]


@dataclass(frozen=True)
class CacheTensors:
    """All tensors of a ``PagedCache`` that a step reads or writes.

    Attributes:
        tables: Block tables, such as ``CacheTables``.
        rope: RoPE tables, such as ``RopeTables``.
        layers: Caches of every layer, such as ``LayerCaches``. Steps write to these caches.
        dropped: Number of tokens that steps could not store, [1], int64.
        seq_lens: Length of the request in every row after its last step, [max_batch_size], int32; 0
            before the first step. The next step begins at this length or a smaller length.
        written: Largest length of each row since its length was 0, [max_batch_size], int32. Rings
            may have overwritten positions before ``written``.
        made_for: ``fingerprint`` of the model. Steps refuse the cache of another model.
            ``made_for`` belongs to the pytree's structure, so it is a constant in graphs.
        draft: Caches of the draft layer, such as ``LayerCaches``; empty without a draft layer.
    """

    tables: Any
    rope: Any
    layers: tuple[Any, ...]
    dropped: Tensor
    seq_lens: Tensor
    written: Tensor
    made_for: str
    draft: tuple[Any, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows of the cache."""
        return self.tables.pool.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.dropped.device


def in_vocabulary(tokens: Tensor, vocab_size: int) -> Tensor:
    """Whether each id is in the vocabulary."""
    return (tokens >= 0) & (tokens < vocab_size)


def store_lengths(seq_lens: Tensor, written: Tensor, ends: Tensor, first: Tensor) -> None:
    """Set ``seq_lens`` to ``ends`` and update ``written``. The step began at positions ``first``.

    A row whose end is 0 took no part in the step and keeps its length."""
    furthest = torch.where(first > 0, torch.maximum(written, ends), ends)
    written.copy_(torch.where(ends > 0, furthest, written))
    seq_lens.copy_(torch.where(ends > 0, ends, seq_lens))


_NAMESPACE = "dsv4_ops.transformers"
_CACHE = ("tables", "rope", "layers", "dropped", "seq_lens", "written", "draft")


def _flatten(cache: CacheTensors) -> tuple[list[Any], str]:
    return [getattr(cache, name) for name in _CACHE], cache.made_for


def _flatten_with_keys(cache: CacheTensors) -> tuple[list[tuple[Any, Any]], str]:
    keys = [(pytree.GetAttrKey(name), getattr(cache, name)) for name in _CACHE]
    return keys, cache.made_for


def _unflatten(values: Iterable[Any], made_for: str) -> CacheTensors:
    tables, rope, layers, dropped, seq_lens, written, draft = values
    return CacheTensors(tables, rope, layers, dropped, seq_lens, written, made_for, draft)


pytree.register_pytree_node(
    CacheTensors,
    _flatten,
    _unflatten,
    serialized_type_name=f"{_NAMESPACE}.CacheTensors",
    to_dumpable_context=str,
    from_dumpable_context=str,
    flatten_with_keys_fn=_flatten_with_keys,
)
pytrees.register(StepBatch, CacheTables, ShardedTables, RopeTables, namespace=_NAMESPACE)

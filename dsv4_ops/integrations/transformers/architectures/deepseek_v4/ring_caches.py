"""Steps over caches that keep window keys and compressor states in rings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import (
    AttentionStep,
    CompressedStep,
    LayerCaches,
    LayerSpec,
    StateTables,
    attention_step_of_tokens,
)
from dsv4_ops.attention.metadata import BlockTables, token_slots
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.architectures.base import ModelSpec, StepTokens
from dsv4_ops.integrations.transformers.tensors import CacheTensors


@dataclass(frozen=True, kw_only=True)
class RingSpec(ModelSpec):
    """A family whose window keys and compressor states are in rings.

    Attributes:
        layers: Spec of the attention layers.
    """

    layers: LayerSpec

    def rings(self, max_cache_len: int, max_chunk: int, next_n: int) -> dict[str, int]:
        """Return the number of blocks per row in the rings of window keys and compressor states.

        A step stores a chunk before the first token of the chunk reads its window, so the window
        ring holds a chunk and a window. A step reads states before it overwrites them, so the rings
        of states hold only the last states.
        """
        layers, attention = self.layers, self.layers.attention
        spans = {"swa": (max_chunk + attention.window_size - 1, attention.swa_block_size)}
        for kind in ("c4", "c128"):
            count = self._kept_states(kind, next_n)
            spans[f"{kind}_states"] = (count, layers.state_block_size(kind))
        # an unaligned span touches one more block
        return {
            name: min((span - 1) // block + 2, -(-max_cache_len // block))
            for name, (span, block) in spans.items()
        }

    def _kept_states(self, kind: str, next_n: int) -> int:
        """Return the number of positions at a request's end whose states later steps may read."""
        windows = 2 if kind == "c4" else 1
        return windows * self.layers.ratio(kind) + next_n - 1

    def holds_states(self, cache: CacheTensors, next_n: int) -> bool:
        for layer in cache.layers:
            kind = self.kind_of(layer)
            if layer.states is not None:
                table = getattr(cache.tables, f"{kind}_states")
                block, count = self.layers.state_block_size(kind), self._kept_states(kind, next_n)
                if _is_ring(layer.states, table) and _positions(layer.states, table, block) < count:
                    return False
        return True

    def kind_of(self, caches: LayerCaches) -> str:
        if not isinstance(caches, LayerCaches):  # caches of another family
            return type(caches).__name__
        if caches.compressed is None:
            return "window"
        return "c128" if caches.indexer is None else "c4"

    def build_ring_step(
        self, spec: LayerSpec, step: StepTokens, cache: CacheTensors, heads: int
    ) -> AttentionStep:
        """Build the metadata of a step for caches with rings.

        The caller has applied ``storable`` to ``step``. ``heads`` is the number of query heads of
        the split-KV plan; 0 builds no plan.
        """
        tables, tokens, ends = cache.tables, step.tokens, step.ends
        late = tokens.positions >= ends - self.most_tokens(cache)
        tokens = TokenMap(*(torch.where(late, values, -1) for values in tokens))
        built = attention_step_of_tokens(
            spec,
            tokens,
            token_slots(tokens, tables.swa, spec.attention.swa_block_size),
            BlockTables(swa=tables.swa, c4=tables.compressed, c128=tables.compressed),
            StateTables(c4=tables.c4_states, c128=tables.c128_states),
            plan_heads=heads,
            cp_rank=None if spec.ranks is None else tables.cp_rank,
        )
        groups = {kind: getattr(built, kind) for kind in ("c4", "c128")}
        for layer in cache.layers:
            kind = self.kind_of(layer)
            if layer.states is not None:
                block = spec.state_block_size(kind)
                groups[kind] = _last_states(getattr(built, kind), tokens, ends, layer.states, block)
        return replace(built, **groups)

    def most_tokens(self, cache: CacheTensors) -> int:
        """Return ``max_chunk``, rounded up to whole blocks of the ring."""
        attention, window, table = self.layers.attention, cache.layers[0].swa, cache.tables.swa
        positions = _positions(window, table, attention.swa_block_size)
        return positions - (attention.window_size - 1) * _is_ring(window, table)

    def can_go_back(self, first: Tensor, cache: Any) -> Tensor:
        batch, layers, attention = first.shape[0], self.layers, self.layers.attention
        before = cache.seq_lens[:batch, None].to(torch.int64)
        end = torch.maximum(cache.written[:batch, None].to(torch.int64), before)
        needed = {"swa": (first - attention.window_size + 1, attention.swa_block_size)}
        for kind, windows in (("c4", 2), ("c128", 1)):
            if kind in self.kinds:
                ratio = layers.ratio(kind)
                begin = (first // ratio - windows + 1) * ratio
                needed[f"{kind}_states"] = (begin, layers.state_block_size(kind))
        is_intact = torch.ones_like(first, dtype=torch.bool)
        for name, (begin, block) in needed.items():
            ring, blocks = cache.rings[name], getattr(cache.tensors.tables, name).shape[1]
            if ring < blocks:  # an unaligned span fills one block fewer than the ring has
                begin = begin.clamp(min=0)
                is_intact = is_intact & ((begin >= end - (ring - 1) * block) | (begin >= first))
        return is_intact


def _last_states(
    group: CompressedStep, tokens: TokenMap, ends: Tensor, states: Tensor, block: int
) -> CompressedStep:
    """Keep only a chunk's last states, so that no two tokens share a slot of the ring."""
    is_last = tokens.positions >= ends - _positions(states, group.state_block_table, block)
    return replace(group, state_slot_mapping=torch.where(is_last, group.state_slot_mapping, -1))


def _is_ring(blocks: Tensor, table: Tensor) -> int:
    """Return 1 if a row has fewer blocks than its table has columns, else 0. The comparison adds no
    guard to a trace."""
    # not torch.sym_min, which Dynamo of torch 2.11 refuses for constants
    return min(table.shape[1] - blocks.shape[0] // table.shape[0], 1)


def _positions(blocks: Tensor, table: Tensor, block: int) -> int:
    """Return how many positions a row's blocks can hold. In a ring the first position may be in the
    middle of a block, so one block is left out of the count."""
    full_blocks: int = blocks.shape[0] // table.shape[0] - _is_ring(blocks, table)
    return full_blocks * block

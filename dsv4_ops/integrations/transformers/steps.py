"""Decode and prefill steps of a patched model as functions of tensors."""

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
from dsv4_ops.attention.metadata import BlockTables
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.types import MAX_REQUESTS, TokenMap
from dsv4_ops.dispatch.choice import check_device
from dsv4_ops.integrations.transformers.cache import PagedCache
from dsv4_ops.integrations.transformers.config import ModelSpec
from dsv4_ops.integrations.transformers.dropped import (
    check_batch,
    count_dropped,
    in_vocabulary,
    storable,
    values_are_free,
)
from dsv4_ops.integrations.transformers.modules import check_body, check_modules
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch
from dsv4_ops.ops.batch import token_map
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping

_FOR_MODEL = "Make it with PagedCache.for_model"


@dataclass(frozen=True)
class LayerContext:
    """Passed to an attention layer in place of Hugging Face's masks and cache."""

    step: AttentionStep
    caches: LayerCaches
    rope: Tensor
    schedule: str
    state_rings: bool


@torch.no_grad()
def decode_step(
    model: Any, batch: StepBatch, cache: CacheTensors | PagedCache, *, state_rings: bool = True
) -> Tensor:
    """Compute the logits of every token of a (speculative) decode step.

    Args:
        model: A patched ``DeepseekV4ForCausalLM``.
        batch: The step.
        cache: A ``PagedCache``, or its ``tensors``, with blocks reserved for all tokens of
            ``batch``.
        state_rings: Whether a request may bring more tokens than the cache's ``next_n``. If none
            does, pass False; it saves launches (with FP8 caches a C4 layer inserts in one).

    Returns:
        [num_tokens, vocab_size]. Rows of padding tokens are finite but undefined.

    Mutates: the caches, at the positions of the step. Lengths come from ``batch``; those of the
        ``PagedCache`` are neither read nor written. Tokens that cannot be stored are treated as
        padding and counted in ``cache.dropped``: beyond ``max_cache_len``, without a reserved
        block, in a row that an earlier request of the batch uses, beyond ``max_chunk``, or missing
        between ``query_start_loc`` and ``tokens``. An id outside the vocabulary is counted too, and
        read as id 0.

    Raises:
        ValueError, TypeError: the model is not patched, the cache is for another model or ``kv``, a
            shape or dtype is wrong; in an eager CPU call also for tokens that cannot be stored
            (elsewhere see ``PagedCache.raise_if_dropped``). Nothing is written.
        NotImplementedError, RuntimeError: a module that our ops replace was changed, or the device
            cannot run the ``impl``. Nothing is written.

    Compile: ``torch.compile(decode_step, fullgraph=True)`` gives one graph and one CUDA graph;
        ``torch.export`` works too (``export_decode``).
    """
    hidden = _run("decode_step", model, batch, cache, "decode", state_rings)
    logits: Tensor = model.lm_head(hidden)
    return logits


@torch.no_grad()
def prefill_step(model: Any, batch: StepBatch, cache: CacheTensors | PagedCache) -> Tensor:
    """Compute the logits of every request's last token, for any mix of prefills and decodes.

    Args:
        model: A patched ``DeepseekV4ForCausalLM``.
        batch: The step, with at most ``max_chunk`` tokens per request; of more, the first are
            dropped.
        cache: As for ``decode_step``.

    Returns:
        [num_reqs, vocab_size]. Rows of requests without tokens are undefined.

    Mutates: as ``decode_step``.

    Raises:
        ValueError, TypeError: as ``decode_step``.

    Compile: as ``decode_step``; ``export_prefill`` makes a package for any number of tokens.
    """
    hidden = _run("prefill_step", model, batch, cache, "prefill", True)
    if hidden.shape[0] == 0:
        last_hidden = hidden.new_zeros(batch.seq_lens.shape[0], hidden.shape[1])
    else:
        last = (batch.query_start_loc[1:] - 1).clamp(0, hidden.shape[0] - 1)
        last_hidden = hidden.index_select(0, last)
    logits: Tensor = model.lm_head(last_hidden)
    return logits


def _run(
    op: str,
    model: Any,
    batch: StepBatch,
    given: CacheTensors | PagedCache,
    schedule: str,
    state_rings: bool,
) -> Tensor:
    spec = spec_of(op, model)
    cache = _tensors_of(op, given)
    checks = Checks(op)
    checks.tensor("batch.tokens", batch.tokens, torch.int64, "num_tokens")
    starts = batch.query_start_loc
    checks.tensor("batch.query_start_loc", starts, torch.int32, "num_reqs + 1")
    checks.tensor("batch.seq_lens", batch.seq_lens, torch.int32, "num_reqs")
    checks.tensor("batch.rows", batch.rows, torch.int32, "num_reqs")
    check_cache(op, spec, cache)
    check_body(op, model)
    check_modules(op, model.model, cache.tables.swa.device)
    vocab_size, block_tokens = model.config.vocab_size, spec.layers.attention.block_tokens
    of_batch = (batch.tokens, starts, batch.seq_lens, batch.rows)
    if values_are_free(*of_batch, cache.tables.compressed):
        sizes = (block_tokens, most_tokens(spec.layers, cache))
        check_batch(op, batch, cache, vocab_size, sizes)
    num_tokens = batch.tokens.shape[0]
    if num_tokens == 0 or batch.rows.shape[0] == 0:
        cache.dropped.add_((starts[1:] - starts[:-1]).clamp(min=0).sum())
        return starts.new_zeros(num_tokens, model.config.hidden_size, dtype=spec.dtype)
    tokens, ends, wanted = tokens_of(batch, cache)
    heads = plan_heads(spec, schedule, num_tokens)
    layers = spec.layers_for(schedule, num_tokens)
    step = build_step(layers, storable(tokens, cache, block_tokens), ends, cache, heads)
    stored = (step.positions >= 0) & in_vocabulary(batch.tokens, vocab_size)
    count_dropped(cache, wanted, stored)
    return run_layers(model.model, spec, batch.tokens, None, step, cache, schedule, state_rings)


def _tensors_of(op: str, cache: CacheTensors | PagedCache) -> CacheTensors:
    if isinstance(cache, PagedCache):
        return cache.tensors
    if isinstance(cache, CacheTensors):
        return cache
    advice = "Make one with PagedCache.for_model"
    raise refusal(TypeError, op, "cache", "be a PagedCache", type(cache).__name__, advice)


def spec_of(op: str, model: Any) -> ModelSpec:
    """The spec that ``patch`` stored on the model."""
    spec = getattr(model, "dsv4_ops_spec", None)
    if not isinstance(spec, ModelSpec):
        raise refusal(ValueError, op, "model", "be patched", "another", "Call patch first")
    return spec


def check_cache(op: str, spec: ModelSpec, cache: CacheTensors) -> None:
    """Raise if the cache was made for another model; layers check the shapes of its tensors."""
    found = tuple(_kind_of(layer) for layer in cache.layers)
    if found != spec.kinds:
        rule = "have the layers of the model, " + ", ".join(spec.kinds)
        raise refusal(ValueError, op, "cache", rule, ", ".join(found), _FOR_MODEL)
    if cache.made_for != spec.fingerprint:
        wanted, held = _named(spec.fingerprint), _named(cache.made_for)
        others = [name for name in wanted if wanted[name] != held.get(name)]
        rule = "have the model's " + ", ".join(f"{name}={wanted[name]}" for name in others)
        actual = ", ".join(f"{name}={held.get(name)}" for name in others)
        raise refusal(ValueError, op, "cache", rule, actual, _FOR_MODEL)
    check_device(op, spec.step_layers.impl, cache.tables.swa.device)


def _named(fingerprint: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in fingerprint.split("; "))


def _kind_of(caches: LayerCaches) -> str:
    if caches.compressed is None:
        return "window"
    return "c128" if caches.indexer is None else "c4"


def plan_heads(spec: ModelSpec, schedule: str, num_tokens: int) -> int:
    """``plan_heads`` of a step: 0 for a prefill or more tokens than a plan supports."""
    return spec.plan_heads if schedule == "decode" and num_tokens <= MAX_REQUESTS else 0


def tokens_of(batch: StepBatch, cache: CacheTensors) -> tuple[TokenMap, Tensor, Tensor]:
    """Map a batch's tokens to cache rows.

    Returns:
        Cache row and position of every token; the length of its request after the step; and the
        query length of every request by ``query_start_loc``.
    """
    num_rows = cache.tables.swa.shape[0]
    starts, request_rows = batch.query_start_loc, batch.rows
    # a decreasing start counts as dropped tokens
    counts = (starts[1:] - starts[:-1]).abs()
    live = (counts > 0) & (batch.seq_lens > 0) & (request_rows >= 0) & (request_rows < num_rows)
    index = torch.arange(request_rows.shape[0], dtype=torch.int32, device=starts.device)
    owner = torch.where(live, request_rows, -1 - index)
    taken = ((owner[:, None] == owner) & (index[:, None] > index)).any(1)
    owner = torch.where(taken, -1, owner)
    found = token_map(starts, batch.seq_lens, num_tokens=batch.tokens.shape[0])
    request = found.req_indices.clamp(min=0)
    row = owner.index_select(0, request)
    there = (found.req_indices >= 0) & (row >= 0)
    rows = torch.where(there, row, -1)
    positions = torch.where(there, found.positions, -1)
    ends = batch.seq_lens.index_select(0, request)
    return TokenMap(rows, positions), ends, torch.where(live, counts, 0)


def build_step(
    spec: LayerSpec, tokens: TokenMap, ends: Tensor, cache: CacheTensors, heads: int
) -> AttentionStep:
    """Build the step metadata for caches whose window and states are rings.

    Args:
        spec: From ``ModelSpec.layers_for``.
        tokens: Cache row and position of every token, from ``storable``.
        ends: Length of every token's request after the step.
        cache: The caches and their tables.
        heads: From ``plan_heads``.
    """
    tables, window = cache.tables, cache.layers[0].swa
    block = spec.attention.swa_block_size
    if _is_ring(window, tables.swa):
        late = tokens.positions >= ends - most_tokens(spec, cache)
        tokens = TokenMap(*(torch.where(late, values, -1) for values in tokens))
    slots = compressed_slot_mapping(
        tokens.positions,
        tokens.req_indices,
        tables.swa,
        tokens.positions,  # every token that exists is stored
        block_size=block,
        compress_ratio=1,
    )
    step = attention_step_of_tokens(
        spec,
        tokens,
        slots,
        BlockTables(swa=tables.swa, c4=tables.compressed, c128=tables.compressed),
        StateTables(c4=tables.c4_states, c128=tables.c128_states),
        plan_heads=heads,
    )
    groups = {kind: getattr(step, kind) for kind in ("c4", "c128")}
    for layer in cache.layers:
        kind = _kind_of(layer)
        if layer.states is not None:
            block = spec.state_block_size(kind)
            groups[kind] = _last_states(getattr(step, kind), tokens, ends, layer.states, block)
    return replace(step, **groups)


def most_tokens(spec: LayerSpec, cache: CacheTensors) -> int:
    """Maximum tokens of a request in one step: ``max_chunk``, rounded up to the ring's blocks."""
    window, table, block = cache.layers[0].swa, cache.tables.swa, spec.attention.swa_block_size
    if not _is_ring(window, table):
        return table.shape[1] * block
    return _ring(window, table, block) - spec.attention.window_size + 1


def _last_states(
    group: CompressedStep, tokens: TokenMap, ends: Tensor, states: Tensor, block: int
) -> CompressedStep:
    """Keep only a chunk's last states, so that no two tokens share a slot of the ring."""
    table = group.state_block_table
    if not _is_ring(states, table):
        return group
    kept = tokens.positions >= ends - _ring(states, table, block)
    return replace(group, state_slot_mapping=torch.where(kept, group.state_slot_mapping, -1))


def _is_ring(blocks: Tensor, table: Tensor) -> bool:
    return blocks.shape[0] // table.shape[0] < table.shape[1]


def _ring(blocks: Tensor, table: Tensor, block: int) -> int:
    """Positions that a ring holds at any alignment."""
    return (blocks.shape[0] // table.shape[0] - 1) * block


def run_layers(
    body: Any,
    spec: ModelSpec,
    tokens: Tensor | None,
    embeddings: Tensor | None,
    step: AttentionStep,
    cache: CacheTensors,
    schedule: str,
    state_rings: bool = True,
) -> Tensor:
    """Run all layers; return the final hidden states, [num_tokens, hidden_size].

    Args:
        body: The ``DeepseekV4Model`` of a patched model.
        spec: Its spec.
        tokens: Token ids, [num_tokens]; ids of padding or outside the vocabulary are read as 0.
        embeddings: [num_tokens, hidden_size], instead of those of ``tokens``.
        step: From ``build_step``.
        cache: The caches.
        schedule: "decode" or "prefill".
        state_rings: As for ``attention_layer``.
    """
    ids = None
    if tokens is not None:
        read = (step.positions >= 0) & in_vocabulary(tokens, body.config.vocab_size)
        ids = torch.where(read, tokens, 0)[None]
    hidden = body.embed_tokens(ids) if embeddings is None else embeddings[None]
    streams = hidden.unsqueeze(2).expand(-1, -1, body.config.hc_mult, -1).contiguous()
    for kind, layer, caches in zip(spec.kinds, body.layers, cache.layers, strict=True):
        context = LayerContext(step, caches, cache.rope.of(kind), schedule, state_rings)
        streams = layer(
            streams,
            input_ids=ids,
            dsv4_ops=context,
            position_embeddings=None,
            position_ids=None,
            attention_mask=None,
        )
    states: Tensor = body.norm(body.hc_head(streams))[0]
    return states

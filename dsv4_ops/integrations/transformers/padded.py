"""Hugging Face's padded batches, [batch, length], as steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import AttentionStep
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.cache import PagedCache
from dsv4_ops.integrations.transformers.config import ModelSpec
from dsv4_ops.integrations.transformers.steps import build_step, check_cache, plan_heads

OP = "model"


def padded_step(
    spec: ModelSpec,
    shape: tuple[int, int],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: PagedCache,
) -> AttentionStep:
    """The step of a padded batch, and the lengths of the cache after it.

    Args:
        spec: The model's specification.
        shape: Batch and length of the inputs; row r of the batch is row r of the cache.
        attention_mask: 0 for padding, on any side, [batch, any length from that of the inputs on];
            the last columns are those of the inputs. None if there is no padding.
        position_ids: Positions, [batch or 1, length]; below 0 for padding too. None continues where
            every row of the cache ends.
        cache: The cache; its lengths are written.
    """
    _check(spec, shape, attention_mask, position_ids, cache)
    batch, length = shape
    before = cache.seq_lens[:batch]
    there = torch.ones(shape, dtype=torch.bool, device=before.device)
    if attention_mask is not None:
        there = attention_mask[:, attention_mask.shape[1] - length :] != 0
    if position_ids is None:
        positions = before[:, None] + there.cumsum(1) - 1
    else:
        positions = position_ids.to(torch.int64).expand(batch, length)
    there = there & (positions >= 0)
    positions = torch.where(there, positions, -1)
    ends = positions.amax(1).to(torch.int32) + 1
    before.copy_(torch.where(ends > 0, ends, before))
    rows = torch.arange(batch, dtype=torch.int32, device=before.device)[:, None]
    tokens = TokenMap(torch.where(there, rows, -1).flatten(), positions.flatten())
    heads = plan_heads(spec, "decode" if length == 1 else "prefill", batch)
    ends = ends[:, None].expand(shape).flatten()
    return build_step(spec.layers, tokens, ends, cache.tensors, heads)


def check_inputs(
    config: Any, ids: Tensor | None, embeddings: Tensor | None, outputs: Mapping[str, Any]
) -> None:
    """What a call without a step of ours would not have needed, or would have seen too late."""
    checks = Checks(OP)
    if ids is not None:
        checks.floats("input_ids", ids, torch.int64, torch.int32)
        checks.tensor("input_ids", ids, ids.dtype, "batch_size", "sequence_length")
    elif embeddings is None or "hash_moe" in config.mlp_layer_types:
        rule, advice = "be given", "Pass input_ids or inputs_embeds"
        if embeddings is not None:
            rule, advice = "be given to hash routers", "Pass input_ids beside inputs_embeds"
        raise refusal(ValueError, OP, "input_ids", rule, "None", advice)
    if embeddings is not None:
        sizes = ("batch_size", "sequence_length", config.hidden_size)
        checks.tensor("inputs_embeds", embeddings, embeddings.dtype, *sizes)
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if outputs.get(name, getattr(config, name, False)):
            rule, advice = "be False with a PagedCache", "Pass another cache, or none"
            raise refusal(NotImplementedError, OP, name, rule, "True", advice)


def _check(
    spec: ModelSpec,
    shape: tuple[int, int],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: PagedCache,
) -> None:
    batch, length = shape
    checks = Checks(OP)
    checks.at_least(1, batch_size=batch, sequence_length=length)
    checks.at_most("batch_size", batch, "max_batch of the cache", cache.max_batch)
    checks.at_most("sequence_length", length, "max_chunk of the cache", cache.max_chunk)
    if cache.spec.kv != spec.kv:
        advice = "Make the cache with PagedCache.for_model"
        rule = f"hold {spec.kv!r} keys like the model"
        raise refusal(ValueError, OP, "past_key_values", rule, repr(cache.spec.kv), advice)
    check_cache(OP, spec, cache.tensors)
    # of the host's books, not of the inputs: in a graph they would compile anew at every request
    if not torch.compiler.is_compiling() and not cache.requests and cache.lacking_pages(None, 1):
        advice = "Give each row of the batch its pages with add and reserve"
        rule = "have requests, as its rows share pages"
        raise refusal(ValueError, OP, "past_key_values", rule, "none", advice)
    if attention_mask is not None and (
        not isinstance(attention_mask, Tensor)
        or attention_mask.dim() != 2
        or attention_mask.shape[0] != batch
        or attention_mask.shape[1] < length
    ):
        found = getattr(attention_mask, "shape", type(attention_mask).__name__)
        rule = f"have shape [{batch}, {length} or more]"
        advice = "Pass the mask of the tokens, 0 for padding"
        raise refusal(ValueError, OP, "attention_mask", rule, _shown(found), advice)
    if position_ids is not None and (
        not isinstance(position_ids, Tensor)
        or position_ids.dim() != 2
        or position_ids.shape[1] != length
        or position_ids.shape[0] not in (1, batch)
    ):
        rule = f"have shape [{batch} or 1, {length}]"
        advice = "Pass a position per token, or None to go on where the cache ends"
        found = getattr(position_ids, "shape", type(position_ids).__name__)
        raise refusal(ValueError, OP, "position_ids", rule, _shown(found), advice)


def _shown(found: object) -> object:
    return list(found) if isinstance(found, torch.Size) else found

"""Hugging Face's padded batches, [batch, length], as steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import AttentionStep
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.cache import PagedCache
from dsv4_ops.integrations.transformers.config import ModelSpec
from dsv4_ops.integrations.transformers.dropped import (
    count_dropped,
    in_vocabulary,
    may_wait,
    storable,
    unknown_id,
)
from dsv4_ops.integrations.transformers.steps import build_step, check_cache, plan_heads

OP = "model"


@dataclass(frozen=True)
class PaddedStep:
    """A step, and the column of the inputs of each of its tokens.

    Ops find the token before another one by its place, so that the tokens of a row stand side by
    side in a step wherever padding is among them. ``places`` int64 [batch, length]: where the step
    has each column of the inputs, or None for the same place.
    """

    step: AttentionStep
    places: Tensor | None

    def take(self, values: Tensor | None) -> Tensor | None:
        """Inputs [batch, length, ...] as the tokens of the step."""
        if values is None:
            return None
        return _moved(values, self.places).flatten(0, 1)

    def give_back(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Values of the tokens of the step as those of the inputs, [batch, length, width]."""
        values = values.view(*shape, -1)
        if self.places is None:
            return values
        return values.gather(1, self.places[..., None].expand_as(values))


def padded_step(
    spec: ModelSpec,
    shape: tuple[int, int],
    ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: PagedCache,
    vocab_size: int,
) -> PaddedStep:
    """The step of a padded batch, and the lengths of the cache after it.

    Args:
        spec: The model's specification.
        shape: Batch and length of the inputs; row r of the batch is row r of the cache.
        ids: The inputs, if they are ids.
        attention_mask: 0 for padding, anywhere, [batch, any length from that of the inputs on];
            the last columns are those of the inputs. None if there is no padding.
        position_ids: Positions, [batch or 1, length]; below 0 for padding too. Those of a row
            follow each other, from where the row ends, or from a place before it whose states are
            still there. None continues where every row of the cache ends.
        cache: The cache; its lengths are written.
        vocab_size: Ids that exist.

    Raises:
        ValueError: as ``check_inputs``; in an eager call also tokens that the cache cannot store,
            for which the device is waited for. In a graph they are counted (``cache.dropped``).
    """
    _check(spec, shape, attention_mask, position_ids, cache)
    batch, length = shape
    before, device = cache.seq_lens[:batch], cache.device
    there = torch.ones(shape, dtype=torch.bool, device=device)
    if attention_mask is not None:
        there = attention_mask[:, attention_mask.shape[1] - length :] != 0
    if position_ids is not None:
        position_ids = position_ids.to(torch.int64).expand(batch, length)
        there = there & (position_ids >= 0)
    places = None
    if length > 1 and (attention_mask is not None or position_ids is not None):
        places = _side_by_side(there)
    column = torch.arange(length, device=device)
    kept, first = column < there.sum(1, keepdim=True), before[:, None].to(torch.int64)
    if position_ids is not None:
        given = _moved(position_ids, places)
        first = given[:, :1]
        follows = (given - first != column).cumsum(1) == 0
        kept = kept & follows & can_go_on(spec, first, cache)
    rows = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    tokens = TokenMap(*(torch.where(kept, of, -1).flatten() for of in (rows, first + column)))
    tokens = storable(tokens, cache.tensors, spec.layers.attention.block_tokens)
    positions = tokens.positions.view(shape)
    stored = tokens.positions >= 0
    wanted = there.flatten()
    if ids is not None:
        known = in_vocabulary(ids, vocab_size) | ~there
        stored = stored & _moved(known, places).flatten()
    if may_wait(before) and bool(wanted.sum() > stored.sum()):
        places_given = None if position_ids is None else _moved(position_ids, places)
        lacking = there.sum(1) - positions.ge(0).sum(1)
        wrong = None if ids is None else ids[there & ~in_vocabulary(ids, vocab_size)]
        if wrong is not None and wrong.numel():
            raise unknown_id(OP, "input_ids", wrong, vocab_size)
        raise _refused(spec, int(lacking.argmax()), there, places_given, first, cache)
    ends = positions.amax(1).to(torch.int32) + 1
    written = cache.written[:batch]
    furthest = torch.where(first[:, 0] > 0, torch.maximum(written, ends), ends)
    written.copy_(torch.where(ends > 0, furthest, written))
    before.copy_(torch.where(ends > 0, ends, before))
    count_dropped(cache.tensors, wanted, stored)
    schedule = "decode" if length == 1 else "prefill"
    heads, layers = plan_heads(spec, schedule, batch), spec.layers_for(schedule, batch * length)
    ends = ends[:, None].expand(shape).flatten()
    step = build_step(layers, tokens, ends, cache.tensors, heads)
    return PaddedStep(step, places)


def can_go_on(spec: ModelSpec, first: Tensor, cache: PagedCache) -> Tensor:
    """Whether rows can go on from positions ``first`` [batch, 1]: there is no gap behind their
    tokens, and what the next token needs of those before it has not been overwritten."""
    batch, attention = first.shape[0], spec.layers.attention
    before = cache.seq_lens[:batch, None].to(torch.int64)
    end = torch.maximum(cache.written[:batch, None].to(torch.int64), before)
    needed = {"swa": (first - attention.window_size + 1, attention.swa_block_size)}
    for kind, windows in (("c4", 2), ("c128", 1)):
        if kind in spec.kinds:
            ratio = spec.layers.ratio(kind)
            begin = (first // ratio - windows + 1) * ratio
            needed[f"{kind}_states"] = (begin, spec.layers.state_block_size(kind))
    there = torch.ones_like(first, dtype=torch.bool)
    for name, (begin, block) in needed.items():
        ring, blocks = cache.rings[name], getattr(cache.tensors.tables, name).shape[1]
        if ring < blocks:  # as many of the last positions as it holds wherever they begin
            begin = begin.clamp(min=0)
            there = there & ((begin >= end - (ring - 1) * block) | (begin >= first))
    return (first == before) | ((first < before) & there)


def _side_by_side(there: Tensor) -> Tensor:
    """Places for columns: tokens that are there first, each in the order of the inputs."""
    absent = ~there
    behind = there.sum(1, keepdim=True) + absent.cumsum(1) - 1
    return torch.where(there, there.cumsum(1) - 1, behind)


def _moved(values: Tensor, places: Tensor | None) -> Tensor:
    """``values`` [batch, length, ...] at their places."""
    if places is None:
        return values
    places = places.view(*places.shape, *[1] * (values.dim() - 2)).expand_as(values)
    return values.scatter(1, places, values)


def _refused(
    spec: ModelSpec, row: int, there: Tensor, given: Tensor | None, first: Tensor, cache: PagedCache
) -> ValueError:
    """The error for a row that the cache cannot store all of."""
    count, ends = int(there[row].sum()), int(cache.seq_lens[row])
    if given is not None:
        places = given[row, :count].tolist()
        if places != list(range(places[0], places[0] + count)) or places[0] > ends:
            rule = f"follow each other from position {ends} of row {row}, where the cache ends"
            advice = "Pass them without a gap, or None; mark padding in attention_mask"
            return refusal(ValueError, OP, "position_ids", rule, _brief(places), advice)
        if not bool(can_go_on(spec, first, cache)[row]):
            rule = "go back to a position whose states are still there"
            found = f"{places[0]} in row {row} of {ends} tokens"
            advice = "Make the cache with a larger next_n, or begin at 0"
            return refusal(ValueError, OP, "position_ids", rule, found, advice)
    length = int(first[row, 0]) + count
    found = f"{length} in row {row}"
    if length > cache.max_cache_len:
        rule = f"lead to at most max_cache_len of the cache = {cache.max_cache_len} tokens"
        advice = "Make the cache with a larger max_cache_len"
        return refusal(ValueError, OP, "sequence_length", rule, found, advice)
    rule = "have blocks for all tokens"
    return refusal(ValueError, OP, "past_key_values", rule, found, "Call reserve before the step")


def _brief(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return f"[{shown}{', ...' if len(values) > 6 else ''}]"


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
    checks.at_most("batch_size", batch, "max_batch_size of the cache", cache.max_batch_size)
    checks.at_most("sequence_length", length, "max_chunk of the cache", cache.max_chunk)
    if cache.spec.kv != spec.kv:
        advice = "Make the cache with PagedCache.for_model"
        rule = f"hold {spec.kv!r} keys like the model"
        raise refusal(ValueError, OP, "past_key_values", rule, repr(cache.spec.kv), advice)
    check_cache(OP, spec, cache.tensors)
    # of the host's books, not of the inputs: in a graph they would compile anew at every request
    if not torch.compiler.is_compiling() and not cache.requests and cache.lacking_blocks(None, 1):
        advice = "Give each row of the batch its blocks with add and reserve"
        rule = "have requests, as its rows share blocks"
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

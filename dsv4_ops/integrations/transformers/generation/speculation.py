"""Speculative steps: a model verifies the drafts of its draft layer, and drafts new tokens.

A step and its drafts are one graph: the number of accepted drafts stays on the device, and selects
the streams (``ModelSpec.run_streams``) from which the next drafts start. The next step overwrites
the keys of rejected tokens, also in the draft layer, before any token attends to these keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dsv4_ops.ops.draft as ops
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.architectures.base import (
    ModelSpec,
    Runner,
    StepRun,
    draft_of,
    run_part,
)
from dsv4_ops.integrations.transformers.cache.dropped_tokens import storable, values_are_free
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.modules.checks import check_modules
from dsv4_ops.integrations.transformers.steps.step import build_step, checked, embedded, tokens_of
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch

Warp = Callable[[Tensor], Tensor]


class SpeculativeStep(NamedTuple):
    """The result of a speculative step.

    Attributes:
        tokens: New tokens of every request, [num_reqs, num_drafts + 1], int64: the accepted drafts,
            then one token of the model, then -1.
        num_accepted: Number of accepted drafts, [num_reqs], int32.
        batch: The next step: the last new token and the new drafts of every request. Lengths have
            grown by ``num_accepted + 1``; lengths of padding requests stay 0.
        draft_probs: Probabilities from which the new drafts were sampled, [num_reqs, num_drafts,
            vocab_size], float32; None for greedy drafts.
    """

    tokens: Tensor
    num_accepted: Tensor
    batch: StepBatch
    draft_probs: Tensor | None


@torch.no_grad()
def speculative_step(
    model: Any,
    batch: StepBatch,
    cache: CacheTensors | PagedCache,
    *,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
    temperature: float = 0.0,
    warp: Warp | None = None,
) -> SpeculativeStep:
    """Verify the drafts of every request, and draft the same number of new tokens.

    Greedy decoding returns the same tokens as without drafts. Sampled tokens have the same
    distribution as tokens sampled from the model one by one.

    Args:
        model: A patched model with a draft layer (``load_mtp``).
        batch: The step, such as ``batch`` of the previous step. Every request has its last token,
            then num_drafts drafts (at least 1); ``query_start_loc`` is [0, num_drafts + 1,
            2 * (num_drafts + 1), ...].
        cache: A cache of ``PagedCache.for_model`` with ``next_n`` of at least num_drafts + 1, or
            the ``tensors`` of this cache.
        draft_probs: ``draft_probs`` of the previous step; None if the drafts were not sampled.
        uniforms: Random numbers in [0, 1), [num_reqs, 2 * num_drafts + 1], float32: first the
            numbers for ``verify_draft``, then one per new draft.
        temperature: 0 for greedy decoding, without ``draft_probs`` and ``uniforms``; above 0 for
            sampling.
        warp: Function that changes logits [rows, vocab_size] before sampling, for example to keep
            only the most likely tokens. The function changes the logits of the model and of the
            draft layer.

    Returns:
        The new tokens and the next step.

    Mutates: the caches, at the positions of the step and of the drafts. A draft that the cache
        cannot store does not count as dropped. A token of the step that the cache cannot store
        counts as dropped, as in ``decode_step``.

    Raises:
        ValueError, TypeError: see ``decode_step``; also if the model has no draft layer, or the
            cache was made without a draft layer or with a smaller ``next_n``; if requests have
            different numbers of tokens (in an eager CPU call); or if ``temperature`` is above 0
            without ``uniforms``, or 0 with ``uniforms`` or ``draft_probs``. Nothing is written.

    Compile: ``torch.compile(speculative_step, fullgraph=True)`` makes one graph; ``torch.export``
        works too.

    Example:
        >>> import tempfile, torch
        >>> from dsv4_ops.integrations import transformers as v4
        >>> from dsv4_ops.testing.checkpoint import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = v4.patch(v4.load_quantized(write_checkpoint(folder)))
        ...     model = v4.load_mtp(model, folder)
        >>> cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=64, next_n=3)
        >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> row = cache.add("a", num_tokens=64)
        >>> prompt = v4.StepBatch(torch.tensor([5, 6, 7]), int32(0, 3), int32(3), int32(row))
        >>> found = v4.speculative_prefill(model, prompt, cache, num_drafts=2)
        >>> found = v4.speculative_step(model, found.batch, cache)
        >>> found.tokens.shape, found.batch.tokens.shape
        (torch.Size([1, 3]), torch.Size([3]))
    """
    return speculate(
        model,
        batch,
        cache,
        draft_probs=draft_probs,
        uniforms=uniforms,
        temperature=temperature,
        warp=warp,
    )


def speculate(
    model: Any,
    batch: StepBatch,
    cache: CacheTensors | PagedCache,
    *,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
    temperature: float = 0.0,
    warp: Warp | None = None,
    run: Runner = run_part,
    shared: bool = False,
) -> SpeculativeStep:
    """Run ``speculative_step`` in parts. ``run`` runs each part. For ``shared``, see ``decode``. No
    part depends on the number of drafts or on the sampling."""
    op = "speculative_step"
    spec, tensors, width = _checked(op, model, batch, cache, shared)
    num_reqs, num_drafts = batch.rows.shape[0], width - 1
    checks = Checks(op)
    if uniforms is not None:
        checks.tensor("uniforms", uniforms, torch.float32, "num_reqs", "2 * num_drafts + 1")
        _check_columns(op, uniforms, 2 * num_drafts + 1)
    step_run, streams = _trunk(spec, model, batch, tensors, "decode", run)
    hidden = spec.normed(model.model, streams, "norm", run)[0]
    logits = run("head", model.lm_head, hidden)
    drafted = batch.tokens.view(num_reqs, width)[:, 1:]
    verified = ops.verify_draft(
        _warped(warp, logits).view(num_reqs, width, -1),
        drafted,
        draft_probs,
        None if uniforms is None else uniforms[:, :width].contiguous(),
        temperature=temperature,
    )
    accepted = verified.num_accepted
    first = torch.arange(num_reqs, dtype=torch.int32, device=accepted.device) * width
    lens = _grown(batch.seq_lens, accepted - num_drafts)
    _forget_rejected(batch, tensors, num_drafts - accepted)
    drafts, probs = _draft(
        spec,
        model,
        replace(batch, seq_lens=lens),
        (step_run, streams, verified.tokens.flatten(), first + accepted),
        num_drafts,
        (None if uniforms is None else uniforms[:, width:], temperature, warp),
    )
    last = verified.tokens.gather(1, accepted[:, None].to(torch.int64))
    following = _next(batch, torch.cat([last, drafts], 1), _grown(lens, width))
    return SpeculativeStep(verified.tokens, accepted, following, probs)


@torch.no_grad()
def speculative_prefill(
    model: Any,
    batch: StepBatch,
    cache: CacheTensors | PagedCache,
    *,
    num_drafts: int,
    following: Tensor | None = None,
    uniforms: Tensor | None = None,
    temperature: float = 0.0,
    warp: Warp | None = None,
) -> SpeculativeStep:
    """Run prompts through a model and its draft layer, choose the next token, and draft tokens.

    Args:
        model: A patched model with a draft layer (``load_mtp``).
        batch: The step, as in ``prefill_step``.
        cache: See ``speculative_step``.
        num_drafts: Number of drafts per request. At least 1.
        following: For each request, the next token of its prompt after this step, [num_reqs],
            int64; -1 if the prompt ends in this step, so that the model chooses the next token.
            None if all prompts end in this step.
        uniforms: [num_reqs, num_drafts + 1], float32: one for the next token, then one per draft.
        temperature: See ``speculative_step``.
        warp: See ``speculative_step``.

    Returns:
        See ``speculative_step``. Every request has one new token and no accepted drafts. Results of
        requests with a ``following`` token are undefined.

    Mutates, Raises, Compile: as ``speculative_step``, except that requests may have different
    numbers of tokens.
    """
    op = "speculative_prefill"
    checks = Checks(op)
    checks.at_least(1, num_drafts=num_drafts)
    spec, tensors = checked(op, model, batch, cache)
    _check_draft(op, spec, model, tensors, 1 + num_drafts)
    num_reqs, num_tokens = batch.rows.shape[0], batch.tokens.shape[0]
    if num_tokens == 0 or num_reqs == 0:
        raise argument_error(
            op,
            "batch",
            must="have a token and a request",
            got=f"{num_tokens} and {num_reqs}",
            do="Pass a prompt",
        )
    if following is not None:
        checks.tensor("following", following, torch.int64, "num_reqs")
    if uniforms is not None:
        checks.tensor("uniforms", uniforms, torch.float32, "num_reqs", "num_drafts + 1")
        _check_columns(op, uniforms, num_drafts + 1)
    step_run, streams = _trunk(spec, model, batch, tensors, "prefill")
    last = (batch.query_start_loc[1:] - 1).clamp(0, num_tokens - 1)
    ends = streams.index_select(1, last)
    logits = model.lm_head(spec.normed(model.model, ends))[0]
    verified = ops.verify_draft(
        _warped(warp, logits)[:, None],
        batch.tokens.new_empty(num_reqs, 0),
        None,
        None if uniforms is None else uniforms[:, :1].contiguous(),
        temperature=temperature,
    )
    next_tokens = verified.tokens[:, 0]
    if following is not None:
        next_tokens = torch.where(following >= 0, following, next_tokens)
    # gather, because in a scatter to ``last`` a request without tokens would write to the previous
    # request's last token
    request = torch.searchsorted(
        batch.query_start_loc[1:].contiguous(),
        torch.arange(num_tokens, dtype=torch.int32, device=last.device),
        right=True,
    ).clamp(max=num_reqs - 1)
    is_last = torch.arange(num_tokens, device=last.device) == last.index_select(0, request)
    following_tokens = torch.where(
        is_last, next_tokens.index_select(0, request), batch.tokens.roll(-1)
    )
    drafts, probs = _draft(
        spec,
        model,
        batch,
        (step_run, streams, following_tokens, last),
        num_drafts,
        (None if uniforms is None else uniforms[:, 1:], temperature, warp),
    )
    lens = _grown(batch.seq_lens, 1 + num_drafts)
    tokens = torch.nn.functional.pad(next_tokens[:, None], (0, num_drafts), value=-1)
    following_batch = _next(batch, torch.cat([next_tokens[:, None], drafts], 1), lens)
    return SpeculativeStep(tokens, verified.num_accepted, following_batch, probs)


def _forget_rejected(batch: StepBatch, cache: CacheTensors, rejected: Tensor) -> None:
    """Subtract the number of ``rejected`` drafts from the lengths of the cache's rows."""
    row = torch.arange(cache.num_rows, dtype=torch.int32, device=rejected.device)[:, None]
    # the step changed no row for a request that the step could not store
    is_stored = (row == batch.rows) & (batch.seq_lens == cache.seq_lens[:, None])
    cache.seq_lens.sub_(torch.where(is_stored, rejected, 0).amax(1))


def _checked(
    op: str, model: Any, batch: StepBatch, cache: CacheTensors | PagedCache, shared: bool
) -> tuple[ModelSpec, CacheTensors, int]:
    """Raise if a step cannot run; return the spec, the caches, and the tokens per request."""
    spec, tensors = checked(op, model, batch, cache, shared)
    num_reqs, num_tokens = batch.rows.shape[0], batch.tokens.shape[0]
    width = num_tokens // max(num_reqs, 1)
    rule, advice = "have as many tokens for every request, at least 2", "Pass `batch` of a step"
    if width < 2 or width * num_reqs != num_tokens:
        raise argument_error(
            op, "batch.tokens", must=rule, got=f"{num_tokens} of {num_reqs} requests", do=advice
        )
    starts = batch.query_start_loc
    if values_are_free(starts) and bool((starts.diff() != width).any()):
        raise argument_error(op, "batch.query_start_loc", must=rule, got=starts.tolist(), do=advice)
    _check_draft(op, spec, model, tensors, width)
    return spec, tensors, width


def _check_draft(op: str, spec: ModelSpec, model: Any, cache: CacheTensors, next_n: int) -> None:
    draft = draft_of(model)
    if draft is None:
        spec.draft_kinds(op)
        raise argument_error(
            op,
            "model",
            must="have a draft layer",
            got="none",
            do="Call load_mtp(model, path) first, with the folder of its checkpoint",
        )
    if len(cache.draft) != len(spec.draft_kinds(op)):
        raise argument_error(
            op,
            "cache",
            must="have the keys of a draft layer",
            got="none",
            do="Make it with PagedCache.for_model after load_mtp",
        )
    if not spec.holds_states(cache, next_n):
        raise argument_error(
            op,
            "cache",
            must=f"be made with next_n of at least {next_n}",
            got="fewer",
            do="Make another",
        )
    check_modules(op, spec, spec.draft_kinds(op), draft, cache.device)
    spec.refresh(op, draft)


def _check_columns(op: str, uniforms: Tensor, columns: int) -> None:
    if uniforms.shape[1] != columns:
        raise argument_error(
            op,
            "uniforms",
            must=f"have {columns} columns",
            got=uniforms.shape[1],
            do="Pass torch.rand of that shape",
        )


def _trunk(
    spec: ModelSpec,
    model: Any,
    batch: StepBatch,
    cache: CacheTensors,
    schedule: str,
    run: Runner = run_part,
) -> tuple[StepRun, Tensor]:
    """Run the layers; return the step, and the streams of its tokens."""
    step = run("metadata", build_step, spec, batch, cache, schedule, model.config.vocab_size)
    ids, hidden = embedded(model.model, batch.tokens, None, step)
    step_run = StepRun(step, cache, schedule, schedule == "prefill", run)
    return step_run, spec.run_streams(model.model, hidden, ids, step_run)


def _draft(
    spec: ModelSpec,
    model: Any,
    batch: StepBatch,
    trunk: tuple[StepRun, Tensor, Tensor, Tensor],
    num_drafts: int,
    sampling: tuple[Tensor | None, float, Warp | None],
) -> tuple[Tensor, Tensor | None]:
    """Draft tokens after the last token of every request.

    Args:
        spec: Spec of the model.
        model: The model.
        batch: The step. The lengths of requests do not include the token that the model has just
            chosen.
        trunk: The step; the streams of its tokens; the next token after each token; and the index
            of each request's last token.
        num_drafts: Number of drafts per request.
        sampling: A uniform random number per draft, or None; the temperature; and ``warp``.

    Returns:
        Drafts [num_reqs, num_drafts], and ``SpeculativeStep.draft_probs``.
    """
    step_run, streams, following, last = trunk
    uniforms, temperature, warp = sampling
    streams = spec.run_draft("draft", model, following, streams, step_run)
    streams = streams.index_select(1, last)
    cache, lens, run = step_run.cache, batch.seq_lens, step_run.run
    drafts: list[Tensor] = []
    probs: list[Tensor] = []
    for index in range(num_drafts):
        hidden = spec.normed(draft_of(model), streams, "draft_norm", run)[0]
        logits = _warped(warp, run("head", model.lm_head, hidden))
        if uniforms is None:
            drafts.append(logits.float().argmax(-1))
        else:
            one = uniforms[:, index : index + 1].contiguous()
            nothing = batch.tokens.new_empty(len(lens), 0)
            chosen = ops.verify_draft(logits[:, None], nothing, None, one, temperature=temperature)
            drafts.append(chosen.tokens[:, 0])
            probs.append(torch.softmax(logits.float() / temperature, -1))
        if index + 1 < num_drafts:
            lens = _grown(lens, 1)
            # the draft layer reads its own streams, for one token per request
            starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device)
            following_batch = StepBatch(drafts[-1], starts, lens, batch.rows)
            step = run("draft_metadata", _draft_step, spec, following_batch, cache)
            step_run = StepRun(step, cache, "decode", False, run)
            streams = spec.run_draft("next_draft", model, drafts[-1], streams, step_run)
    return torch.stack(drafts, 1), torch.stack(probs, 1) if probs else None


def _draft_step(spec: ModelSpec, batch: StepBatch, cache: CacheTensors) -> Any:
    step_tokens, _ = tokens_of(batch, cache)
    tokens = storable(step_tokens.tokens, cache, spec.block_tokens)
    return spec.build_draft_step(replace(step_tokens, tokens=tokens), cache)


def _grown(lens: Tensor, by: Tensor | int) -> Tensor:
    """Add ``by`` to the lengths of requests; lengths of padding requests stay 0."""
    return torch.where(lens > 0, lens + by, torch.zeros_like(lens))


def _warped(warp: Warp | None, logits: Tensor) -> Tensor:
    return logits if warp is None else warp(logits)


def _next(batch: StepBatch, tokens: Tensor, lens: Tensor) -> StepBatch:
    num_reqs, width = tokens.shape
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=lens.device) * width
    return StepBatch(tokens.flatten(), starts, lens, batch.rows)

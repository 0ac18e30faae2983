"""Decode and prefill steps of a patched model as functions of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.types import TokenMap
from dsv4_ops.dispatch.choice import check_device
from dsv4_ops.integrations.transformers.architectures.base import (
    LayerContext,
    ModelSpec,
    Requests,
    Runner,
    StepRun,
    StepTokens,
    run_part,
    unpatched,
)
from dsv4_ops.integrations.transformers.cache.dropped_tokens import (
    check_batch,
    check_first,
    count_dropped,
    storable,
    values_are_free,
)
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.modules.checks import check_body, check_modules
from dsv4_ops.integrations.transformers.tensors import (
    CacheTensors,
    StepBatch,
    in_vocabulary,
    store_lengths,
)
from dsv4_ops.ops.batch import token_map

__all__ = ["LayerContext", "decode_step", "prefill_step"]

_FOR_MODEL = "Make it with PagedCache.for_model"


@torch.no_grad()
def decode_step(
    model: Any, batch: StepBatch, cache: CacheTensors | PagedCache, *, state_rings: bool = True
) -> Tensor:
    """Compute the logits of every token of a (speculative) decode step.

    Args:
        model: A patched model.
        batch: The step.
        cache: A ``PagedCache``, or its ``tensors``, with blocks reserved for all tokens of
            ``batch``.
        state_rings: Whether a request may have more tokens in this step than the cache's
            ``next_n``. If no request has more, pass False to save launches (with FP8 caches, a C4
            layer then inserts in one launch).

    Returns:
        [num_tokens, vocab_size]. Rows of padding tokens are finite but undefined.

    Mutates: the caches, at the positions of the step, and ``cache.seq_lens``, which gets the
        lengths of ``batch``. A step treats a token that it cannot store as padding, and counts it
        in ``cache.dropped``. A step cannot store a token if it is beyond ``max_cache_len`` or
        ``max_chunk``; if no block is reserved for it; if its row does not exist, or belongs to an
        earlier request of the batch; if ``query_start_loc`` counts it but ``tokens`` lacks it; or
        if its request starts beyond the length of its row. A step also counts an id outside of the
        vocabulary, and reads it as id 0.

    Raises:
        ValueError, TypeError: the model is not patched, the cache is for another model or ``kv``,
            or a shape or dtype is wrong; in an eager CPU call also if a token cannot be stored
            (for other calls, see ``PagedCache.raise_if_dropped``). Nothing is written.
        NotImplementedError, RuntimeError: a module that our ops replace was changed, or the device
            cannot run ``impl``. Nothing is written.

    Compile: ``torch.compile(decode_step, fullgraph=True)`` makes one graph, which fits into one
        CUDA graph; ``torch.export`` works too (``export_decode``). ``patch`` adds buffers that
        share the weights' memory. If weights are replaced later (``weight.data = other``,
        ``load_state_dict(assign=True)``), a graph does not update these buffers; a step of
        ``compile_step`` updates them.
    """
    return decode(model, batch, cache, state_rings=state_rings)


def decode(
    model: Any,
    batch: StepBatch,
    cache: CacheTensors | PagedCache,
    *,
    state_rings: bool = True,
    run: Runner = run_part,
    shared: bool = False,
) -> Tensor:
    """Run ``decode_step`` in parts. ``run`` runs each part. ``shared`` says whether the buffers of
    ``patch`` still share the weights' memory."""
    hidden = _run("decode_step", model, batch, cache, "decode", state_rings, run, shared)
    return run("head", model.lm_head, hidden)


@torch.no_grad()
def prefill_step(
    model: Any, batch: StepBatch, cache: CacheTensors | PagedCache, *, has_context: bool = True
) -> Tensor:
    """Compute the logits of every request's last token, for any mix of prefills and decodes.

    Args:
        model: A patched model.
        batch: The step, with at most ``max_chunk`` tokens per request. If a request has more
            tokens, the step drops the first tokens of the request.
        cache: See ``decode_step``.
        has_context: Whether a request may have tokens in the cache before this step. If no request
            has any, pass False to save time: DeepSeek-V3 then expands no context, and DeepSeek-V3.2
            attends to all keys without its indexer, so a request of V3.2 may have at most
            ``index_topk`` tokens. Such a step drops all tokens of other requests. With
            ``batch_invariant=True`` V3.2 runs its indexer.

    Returns:
        [num_reqs, vocab_size]. Rows of requests without tokens are undefined. The last norm and the
        head compute only the last token of every request.

    Mutates: see ``decode_step``.

    Raises:
        ValueError, TypeError: see ``decode_step``.

    Compile: see ``decode_step``. ``export_prefill`` makes a package for any number of tokens.
    """
    return prefill(model, batch, cache, has_context=has_context)


def prefill(
    model: Any,
    batch: StepBatch,
    cache: CacheTensors | PagedCache,
    *,
    has_context: bool = True,
    run: Runner = run_part,
    shared: bool = False,
) -> Tensor:
    """Run ``prefill_step`` in parts. ``run`` runs each part. For ``shared``, see ``decode``."""
    op = "prefill_step"
    Checks(op).flag("has_context", has_context)
    hidden = _run(op, model, batch, cache, "prefill", True, run, shared, has_context, last=True)
    return run("head", model.lm_head, hidden)


def _run(
    op: str,
    model: Any,
    batch: StepBatch,
    paged: CacheTensors | PagedCache,
    schedule: str,
    state_rings: bool,
    run: Runner,
    shared: bool,
    has_context: bool = True,
    last: bool = False,
) -> Tensor:
    """Return the hidden states of all tokens, or of every request's last token if ``last``."""
    Checks(op).flag("state_rings", state_rings)
    spec, cache = checked(op, model, batch, paged, shared, has_context)
    num_tokens = batch.tokens.shape[0]
    if num_tokens == 0 or batch.rows.shape[0] == 0:
        starts = batch.query_start_loc
        cache.dropped.add_((starts[1:] - starts[:-1]).clamp(min=0).sum())
        count = batch.seq_lens.shape[0] if last else num_tokens
        return starts.new_zeros(count, model.config.hidden_size, dtype=spec.dtype)
    vocab_size = model.config.vocab_size
    step = run("metadata", build_step, spec, batch, cache, schedule, vocab_size, has_context)
    output_tokens = (batch.query_start_loc[1:] - 1).clamp(0, num_tokens - 1) if last else None
    with_step = StepRun(step, cache, schedule, state_rings, run, output_tokens)
    return run_layers(model.model, spec, batch.tokens, None, with_step)


def checked(
    op: str,
    model: Any,
    batch: StepBatch,
    paged: CacheTensors | PagedCache,
    shared: bool = False,
    has_context: bool = True,
) -> tuple[ModelSpec, CacheTensors]:
    """Raise if a step cannot run, before it writes anything; return the model's spec and the
    cache's tensors. For ``shared``, see ``decode``; for ``has_context``, ``prefill_step``."""
    spec = spec_of(op, model)
    cache = tensors_of(op, paged)
    check_tensors(op, batch, cache)
    starts = batch.query_start_loc
    check_cache(op, spec, cache)
    check_model(op, model, cache.device)
    spec.refresh(op, model.model, copies_only=shared)
    of_batch = (batch.tokens, starts, batch.seq_lens, batch.rows)
    if values_are_free(*of_batch, cache.tables.pool):
        sizes = (spec.block_tokens, spec.most_tokens(cache))
        check_batch(op, batch, cache, model.config.vocab_size, sizes)
        if not has_context:
            check_first(op, batch, spec.most_first_tokens)
        if spec.parallel is not None:
            shapes = {"num_tokens": len(batch.tokens), "num_reqs": len(batch.rows)}
            spec.parallel.agree(op, "batch", cache.device, **shapes, has_context=has_context)
    return spec, cache


def check_model(op: str, model: Any, device: torch.device) -> None:
    """Raise if a module that a step replaces, or does not call, was changed after ``patch``."""
    spec = spec_of(op, model)
    check_body(op, model)
    check_modules(op, spec, spec.kinds, model.model, device)


def build_step(
    spec: ModelSpec,
    batch: StepBatch,
    cache: CacheTensors,
    schedule: str,
    vocab_size: int,
    has_context: bool = True,
) -> Any:
    """Build the data that all layers of a step share; store lengths, and count dropped tokens."""
    most = None if has_context else spec.most_first_tokens
    step_tokens, counts = tokens_of(batch, cache, cache.seq_lens, has_context, most)
    requests = step_tokens.requests()
    of_row = torch.arange(cache.num_rows, dtype=torch.int32, device=counts.device)[:, None]
    ends, first = (
        torch.where(of_row == requests.rows, each, 0).amax(1)
        for each in (requests.seq_lens, requests.seq_lens - counts)
    )
    store_lengths(cache.seq_lens, cache.written, ends, first)
    step_tokens = replace(
        step_tokens, tokens=storable(step_tokens.tokens, cache, spec.block_tokens)
    )
    step = spec.build_step(step_tokens, cache, schedule)
    is_stored = (step.positions >= 0) & in_vocabulary(batch.tokens, vocab_size)
    count_dropped(cache, counts, is_stored)
    return step


def tensors_of(op: str, cache: CacheTensors | PagedCache) -> CacheTensors:
    """Return the tensors of a ``PagedCache``, or ``cache`` if it is ``CacheTensors``."""
    if isinstance(cache, CacheTensors):
        return cache
    check_paged(op, cache)
    return cache.tensors


def check_paged(op: str, cache: PagedCache) -> None:
    """Raise if ``cache`` is not a ``PagedCache``."""
    if not isinstance(cache, PagedCache):
        raise argument_error(
            op,
            "cache",
            must="be a PagedCache",
            got=type(cache).__name__,
            do="Make one with PagedCache.for_model",
            kind=TypeError,
        )


def check_tensors(op: str, batch: StepBatch, cache: CacheTensors) -> None:
    """Raise if ``batch`` is not a ``StepBatch``, or has wrong shapes, dtypes or devices."""
    checks = Checks(op, cache.device)
    check_is_batch(op, batch)
    checks.tensor("batch.tokens", batch.tokens, torch.int64, "num_tokens")
    checks.tensor("batch.query_start_loc", batch.query_start_loc, torch.int32, "num_reqs + 1")
    checks.tensor("batch.seq_lens", batch.seq_lens, torch.int32, "num_reqs")
    checks.tensor("batch.rows", batch.rows, torch.int32, "num_reqs")


def check_is_batch(op: str, batch: StepBatch) -> None:
    """Raise if ``batch`` is not a ``StepBatch``."""
    if not isinstance(batch, StepBatch):
        raise argument_error(
            op,
            "batch",
            must="be a StepBatch",
            got=type(batch).__name__,
            do="Make one from the tokens and the starts of the requests",
            kind=TypeError,
        )


def spec_of(op: str, model: Any) -> ModelSpec:
    """Return the spec that ``patch`` stored on the model."""
    spec = getattr(model, "dsv4_ops_spec", None)
    if not isinstance(spec, ModelSpec):
        raise unpatched(op, model)
    return spec


def check_cache(op: str, spec: ModelSpec, cache: CacheTensors) -> None:
    """Raise if the cache was made for another model; layers check the shapes."""
    kinds = tuple(spec.kind_of(layer) for layer in cache.layers)
    if kinds != spec.kinds:
        raise argument_error(
            op,
            "cache",
            must="have the layers of the model, " + ", ".join(spec.kinds),
            got=", ".join(kinds),
            do=_FOR_MODEL,
        )
    if cache.made_for != spec.fingerprint:
        expected, actual_parts = _named(spec.fingerprint), _named(cache.made_for)
        others = [name for name in expected if expected[name] != actual_parts.get(name)]
        raise argument_error(
            op,
            "cache",
            must="have the model's " + ", ".join(f"{name}={expected[name]}" for name in others),
            got=", ".join(f"{name}={actual_parts.get(name)}" for name in others),
            do=f"{_FOR_MODEL}. "
            "If the config changed after patch, restore it, or patch the model again",
        )
    check_device(op, spec.impl, cache.device)


def _named(fingerprint: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in fingerprint.split("; "))


def tokens_of(
    batch: StepBatch,
    cache: CacheTensors,
    row_lengths: Tensor | None = None,
    has_context: bool = True,
    most_tokens: int | None = None,
) -> tuple[StepTokens, Tensor]:
    """Map a batch's tokens to cache rows.

    Args:
        batch: The step.
        cache: The caches.
        row_lengths: Length of every row. A request that starts beyond the length of its row becomes
            padding. None skips this check.
        has_context: See ``prefill_step``. If False, requests with a context become padding.
        most_tokens: Requests with more tokens in this step become padding.

    Returns:
        The tokens of the step, and the number of tokens that ``query_start_loc`` gives each
        request.
    """
    num_rows = cache.num_rows
    starts, request_rows = batch.query_start_loc, batch.rows
    # if starts decrease, their difference counts as dropped tokens
    counts = (starts[1:] - starts[:-1]).abs()
    live = (counts > 0) & (batch.seq_lens > 0) & (request_rows >= 0)
    index = torch.arange(request_rows.shape[0], dtype=torch.int32, device=starts.device)
    owner = torch.where(live & (request_rows < num_rows), request_rows, -1 - index)
    is_taken = ((owner[:, None] == owner) & (index[:, None] > index)).any(1)
    owner = torch.where(is_taken, -1, owner)
    if row_lengths is not None:
        row_lens = row_lengths.index_select(0, owner.clamp(min=0))
        owner = torch.where(batch.seq_lens - counts > row_lens, -1, owner)
    if not has_context:
        owner = torch.where(batch.seq_lens > counts, -1, owner)
    if most_tokens is not None:
        owner = torch.where(counts > most_tokens, -1, owner)
    by_token = token_map(starts, batch.seq_lens, num_tokens=batch.tokens.shape[0])
    request = by_token.req_indices.clamp(min=0)
    row = owner.index_select(0, request)
    is_mapped = (by_token.req_indices >= 0) & (row >= 0)
    rows = torch.where(is_mapped, row, -1)
    positions = torch.where(is_mapped, by_token.positions, -1)
    ends = batch.seq_lens.index_select(0, request)

    def requests() -> Requests:
        lens = torch.where(owner >= 0, batch.seq_lens, 0)
        return Requests(starts, lens, owner, by_token.req_indices)

    num_reqs, tokens = request_rows.shape[0], TokenMap(rows, positions)
    step_tokens = StepTokens(tokens, ends, num_reqs, requests, has_context)
    return step_tokens, torch.where(live, counts, 0)


def run_layers(
    body: Any, spec: ModelSpec, tokens: Tensor | None, embeddings: Tensor | None, step_run: StepRun
) -> Tensor:
    """Run all layers of a patched model on tokens, or on embeddings instead.

    Ids of padding, and ids outside of the vocabulary, are read as 0. Return the final hidden states
    of the tokens in ``step_run.output_tokens``, [n, hidden_size], or of all tokens.
    """
    ids, hidden = embedded(body, tokens, embeddings, step_run.step)
    return spec.run_layers(body, hidden, ids, step_run)[0]


def embedded(
    body: Any, tokens: Tensor | None, embeddings: Tensor | None, step: Any
) -> tuple[Tensor | None, Tensor]:
    """Return the ids and the embeddings of a step's tokens, each [1, num_tokens, ...]."""
    ids = None
    if tokens is not None:
        is_read = (step.positions >= 0) & in_vocabulary(tokens, body.config.vocab_size)
        ids = torch.where(is_read, tokens, 0)[None]
    return ids, body.embed_tokens(ids) if embeddings is None else embeddings[None]

"""Methods of Hugging Face's ``generate`` that make its cache, its masks and its chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.integrations.transformers.blocks import out_of_blocks
from dsv4_ops.integrations.transformers.cache import DEFAULT_CHUNK, PagedCache

Method = Callable[..., Any]

_OURS = (None, "static", "hybrid")
_CACHE, _MASK = "past_key_values", "attention_mask"

# Tokens of all requests of a step of prompts, and the least of each: rings of the window's keys for
# more would take most of the memory of a cache of many rows.
_STEP, _LEAST = 16384, 256


@dataclass
class _Call:
    """A call of ``generate``: the caches that it fills, and the rows that have ended."""

    caches: list[PagedCache] = field(default_factory=list)
    ended: Tensor | None = None
    padded: Tensor | None = None  # rows whose last token is no token: they had ended before it

    def step(self, ended: Tensor) -> None:
        """Note which rows end with the token just chosen, or have ended before."""
        before = torch.zeros_like(ended) if self.ended is None else self.ended
        self.padded, self.ended = before, before | ended


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)


def generate(before: Method) -> Method:
    """``generate``: fails if not all tokens could be stored."""

    @functools.wraps(before)
    def run(self: Any, *args: Any, **given: Any) -> Any:
        call = _Call()
        token = _CALL.set(call)
        try:
            out = before(self, *args, **given)
        finally:
            _CALL.reset(token)
        for cache in call.caches:
            cache.raise_if_dropped()
        return out

    return run


def prepare_cache(before: Method) -> Method:
    """``_prepare_cache_for_generation``: a ``PagedCache`` unless the user asks for another."""

    def prepare(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        rows = batch_size * (generation_config.num_return_sequences or 1)
        cache = model_kwargs.get(_CACHE)
        ours = cache is None and generation_config.cache_implementation in _OURS
        searches = (generation_config.num_beams or 1) > 1
        static = generation_config.cache_implementation is not None
        if searches and (isinstance(cache, PagedCache) or (ours and static)):
            rule, advice = "be 1 with a PagedCache", "Pass cache_implementation='dynamic' instead"
            raise refusal(
                NotImplementedError,
                "generate",
                "num_beams",
                rule,
                generation_config.num_beams,
                advice,
            )
        if ours and not searches and generation_config.use_cache is not False:
            made = PagedCache.for_model(
                self,
                max_batch_size=rows,
                max_cache_len=max_cache_length + 1,
                max_chunk=_chunk(generation_config, model_kwargs, rows, max_cache_length + 1),
            )
            model_kwargs[_CACHE] = made
            return None
        found = before(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if isinstance(cache, PagedCache):
            _make_room(cache, rows, max_cache_length)
        return found

    return prepare


def _chunk(
    generation_config: Any, model_kwargs: dict[str, Any], rows: int, max_cache_len: int
) -> int:
    """Most tokens of a request in a step: what the prompt or its chunks need, bounded; a power of
    two, as every other size of a cache is another graph."""
    mask = model_kwargs.get(_MASK)
    columns = max_cache_len if mask is None else mask.shape[1]
    prompt = getattr(generation_config, "_mask_length", columns)
    most = min(prompt, generation_config.prefill_chunk_size or chunk_of(rows, max_cache_len))
    rounded: int = 1 << (most - 1).bit_length()
    return min(rounded, max_cache_len)


def chunk_of(rows: int, max_cache_len: int) -> int:
    """Most tokens of a request in a step of a long prompt, in a cache that ``generate`` makes."""
    return min(max_cache_len, DEFAULT_CHUNK, max(_STEP // rows, _LEAST))


def _make_room(cache: PagedCache, rows: int, length: int) -> None:
    """Requests and blocks for all tokens that ``generate`` may store, or an error and no change."""
    checks = Checks("generate")
    checks.at_most("batch size", rows, "max_batch_size of the cache", cache.max_batch_size)
    checks.at_most("max_length", length, "max_cache_len of the cache", cache.max_cache_len)
    owners = {row: request for request, row in cache.requests.items()}
    vacant = [row for row in range(rows) if row not in owners]
    if owners and vacant:
        rule = f"have a request in each of its first {rows} rows, or none at all"
        advice = "Add requests, or free them all"
        raise refusal(ValueError, "generate", _CACHE, rule, f"none in row {vacant[0]}", advice)
    lacking = sum(cache.lacking_blocks(owners.get(row), length) for row in range(rows))
    if lacking > cache.num_free_blocks:
        advice = "Free a request, or pass a smaller max_new_tokens"
        sizes = (cache.num_free_blocks, cache.num_blocks, lacking)
        raise out_of_blocks("generate", "max_length", *sizes, advice)
    for row in range(rows):
        if not owners:
            cache.add(row)
        cache.reserve(owners.get(row, row), length)


def stopping_criteria(before: Method) -> Method:
    """``_get_stopping_criteria``: criteria that note which rows have ended, if padding follows."""
    from transformers import StoppingCriteriaList

    class Noted(StoppingCriteriaList):  # type: ignore[misc]  # transformers is partly untyped
        """The same criteria, of a call of ``generate``."""

        def __call__(self, input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
            ended: Tensor = super().__call__(input_ids, scores, **rest)
            call = _CALL.get()
            if call is not None:
                call.step(ended)
            return ended

    def get(self: Any, *args: Any, **given: Any) -> Any:
        criteria = before(self, *args, **given)
        # as Hugging Face decides whether padding follows
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        return Noted(criteria) if pads else criteria

    return get


def prefill(before: Method) -> Method:
    """``_prefill``: of a conversation, computes the columns from the first one on that a row of a
    ``PagedCache`` lacks, in chunks that it has room for."""

    def run(
        self: Any,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> Any:
        cache = model_kwargs.get(_CACHE)
        if not isinstance(cache, PagedCache):
            return before(self, input_ids, generation_config, model_kwargs, is_first_iteration)
        cache.raise_if_dropped()
        call = _CALL.get()
        if call is not None:
            call.caches.append(cache)
        embeddings = model_kwargs.get("inputs_embeds")
        inputs = input_ids if embeddings is None else embeddings
        mask = _whole_mask(inputs, generation_config, model_kwargs, cache)
        start = _first_column(mask, inputs.shape[1], cache)
        before_inputs = mask.shape[1] - inputs.shape[1]
        if before_inputs:
            _make_room(cache, mask.shape[0], generation_config.max_length - 1 + before_inputs)
        asked, forward = generation_config.prefill_chunk_size, self.__call__
        if asked and self._valid_auto_compile_criteria(model_kwargs, generation_config):
            forward = self.get_compiled_call(generation_config.compile_config)
        chunk = min(asked or mask.shape[1], cache.max_chunk)
        for begin in range(start, mask.shape[1], chunk):
            end = min(begin + chunk, mask.shape[1])
            part, place = dict(model_kwargs), slice(begin - before_inputs, end - before_inputs)
            for name in (_MASK, "position_ids"):
                if part.get(name) is not None:
                    part[name] = part[name][..., :end]
            if embeddings is not None:
                part["inputs_embeds"] = embeddings[:, place]
            ids = input_ids if embeddings is not None else input_ids[:, place]
            given = self.prepare_inputs_for_generation(
                ids, is_first_iteration=is_first_iteration, **part
            )
            outputs = forward(**given, return_dict=True)
        return outputs

    return run


def _whole_mask(
    inputs: Tensor, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache
) -> Tensor:
    """The mask of all tokens; Hugging Face leaves one of ones only out, which rows of different
    lengths need."""
    mask: Tensor | None = model_kwargs.get(_MASK)
    if mask is None:
        columns = getattr(generation_config, "_mask_length", inputs.shape[1])
        mask = torch.ones(inputs.shape[0], columns, dtype=torch.int64, device=cache.device)
        if len(set(cache.seq_lens[: inputs.shape[0]].tolist())) > 1:
            model_kwargs[_MASK] = mask
    return mask


def _first_column(mask: Tensor, length: int, cache: PagedCache) -> int:
    """The first column of ``mask`` that ``generate`` has to compute, of the last ``length`` ones;
    or an error, if a row of the cache cannot go on with these."""
    stored = cache.seq_lens[: mask.shape[0], None].to(mask.device)
    there = mask != 0
    new = there & (there.cumsum(1) > stored)
    first = torch.where(new.any(1), new.to(torch.int8).argmax(1), mask.shape[1])
    given = mask.shape[1] - length
    if not bool(there[:, -1].all()):
        row = int((~there[:, -1]).to(torch.int8).argmax())
        advice = "Pad on the left, or cut columns of padding"
        rule = "be 1 in the last column, which the next token follows"
        raise refusal(ValueError, "generate", _MASK, rule, f"0 in row {row}", advice)
    known, last = int(first.min()), int(first.max())
    if last == mask.shape[1]:
        row = int(first.argmax())
        rule = "have more tokens than the cache in every row"
        found = f"{int(there[row].sum())} of {int(stored[row])} in row {row}"
        advice = "Pass the mask of all tokens, those of the cache included, or another cache"
        raise refusal(ValueError, "generate", _MASK, rule, found, advice)
    if known < given:
        row = int(first.argmin())
        rule = f"count tokens before input_ids that the cache has, {int(stored[row])} in row {row}"
        counted = int(there[row, :given].sum())
        raise refusal(ValueError, "generate", _MASK, rule, counted, "Pass all tokens as input_ids")
    return given if given else known


def masks(before: Method) -> Method:
    """``create_masks_for_generate``: a ``PagedCache`` needs the padding of the new tokens only, of
    the same shape in every step; tokens that it stores already are padding too, and what follows
    the end of a row."""

    def make(self: Any, **given: Any) -> Any:
        mask: Tensor | None = given.get(_MASK)
        cache = given.get(_CACHE)
        if not isinstance(cache, PagedCache):
            from transformers.masking_utils import create_masks_for_generate

            own = getattr(type(self), "create_masks_for_generate", None)
            return before(self, **given) if own else create_masks_for_generate(**given)
        batch, length = given["inputs_embeds"].shape[:2]
        new = None
        if mask is not None:
            # in a conversation, tokens come twice
            stored = cache.seq_lens[: mask.shape[0], None].to(mask.device)
            new = mask * (mask.to(torch.int64).cumsum(1) > stored)
            # contiguous: strides that grow with the mask would be another graph
            new = new[:, mask.shape[1] - length :].contiguous()
        call = _CALL.get()
        if call is not None and call.padded is not None:
            new = torch.ones(batch, length, dtype=torch.int64) if new is None else new
            padded = call.padded.to(new.device)
            new = new * ~padded[:, None]
        return new

    return make


HOOKS = {
    "generate": generate,
    "_prepare_cache_for_generation": prepare_cache,
    "_get_stopping_criteria": stopping_criteria,
    "_prefill": prefill,
    "create_masks_for_generate": masks,
}
"""What ``patch`` replaces of ``generate``."""

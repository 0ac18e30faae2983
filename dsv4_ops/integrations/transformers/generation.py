"""Methods of Hugging Face's ``generate`` that make its cache and its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.integrations.transformers.cache import OutOfPages, PagedCache

Method = Callable[..., Any]

_OURS = (None, "static", "hybrid")
_CACHE = "past_key_values"


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
            made = PagedCache.for_model(self, max_batch=rows, max_len=max_cache_length + 1)
            model_kwargs[_CACHE] = made
            return None
        found = before(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if isinstance(cache, PagedCache):
            _make_room(cache, rows, max_cache_length)
        return found

    return prepare


def _make_room(cache: PagedCache, rows: int, length: int) -> None:
    """Requests and pages for all tokens that ``generate`` may store, or an error and no change."""
    checks = Checks("generate")
    checks.at_most("batch size", rows, "max_batch of the cache", cache.max_batch)
    checks.at_most("max_length", length, "max_len of the cache", cache.max_len)
    owners = {row: request for request, row in cache.requests.items()}
    vacant = [row for row in range(rows) if row not in owners]
    if owners and vacant:
        rule = f"have a request in each of its first {rows} rows, or none at all"
        advice = "Add requests, or free them all"
        raise refusal(
            ValueError, "generate", "past_key_values", rule, f"none in row {vacant[0]}", advice
        )
    lacking = sum(cache.lacking_pages(owners.get(row), length) for row in range(rows))
    if lacking > cache.num_free_pages:
        rule = f"need at most {cache.num_free_pages} more pages, of {cache.num_pages}"
        advice = "Free a request, or pass a smaller max_new_tokens"
        raise refusal(OutOfPages, "generate", "max_length", rule, lacking, advice)
    for row in range(rows):
        if not owners:
            cache.add(row)
        cache.reserve(owners.get(row, row), length)


def masks(before: Method) -> Method:
    """``create_masks_for_generate``: a ``PagedCache`` needs the padding of the new tokens only, of
    the same shape in every step; tokens that it stores already are padding too."""

    def make(self: Any, **given: Any) -> Any:
        mask: Tensor | None = given.get("attention_mask")
        if not isinstance(given.get(_CACHE), PagedCache):
            from transformers.masking_utils import create_masks_for_generate

            own = getattr(type(self), "create_masks_for_generate", None)
            return before(self, **given) if own else create_masks_for_generate(**given)
        if mask is None:
            return None
        # in a conversation, tokens come twice if all rows have columns of padding
        stored = given[_CACHE].seq_lens[: mask.shape[0], None]
        new = mask.to(torch.int64).cumsum(1) > stored
        length = given["inputs_embeds"].shape[1]
        # contiguous: strides that grow with the mask would be another graph
        return (mask * new)[:, mask.shape[1] - length :].contiguous()

    return make


HOOKS = {"_prepare_cache_for_generation": prepare_cache, "create_masks_for_generate": masks}
"""What ``patch`` replaces of ``generate``."""

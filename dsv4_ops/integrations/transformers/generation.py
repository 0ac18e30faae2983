"""Methods of Hugging Face's ``generate`` that make its cache and its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.integrations.transformers.cache import PagedCache

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
        searches = (generation_config.num_beams or 1) > 1
        wanted = generation_config.cache_implementation in _OURS and not searches
        if cache is None and wanted and generation_config.use_cache is not False:
            made = PagedCache.for_model(self, max_batch=rows, max_len=max_cache_length + 1)
            model_kwargs[_CACHE] = made
            return None
        if isinstance(cache, PagedCache):
            _make_room(cache, rows, max_cache_length)
        return before(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    return prepare


def _make_room(cache: PagedCache, rows: int, length: int) -> None:
    """Pages for all tokens that ``generate`` may store, or an error before any is."""
    checks = Checks("generate")
    checks.at_most("batch size", rows, "max_batch of the cache", cache.max_batch)
    checks.at_most("max_length", length, "max_len of the cache", cache.max_len)
    requests = cache.requests
    if not requests:
        for row in range(rows):
            cache.add(row)
        requests = cache.requests
    for request, row in requests.items():
        if row < rows:
            cache.reserve(request, length)


def masks(before: Method) -> Method:
    """``create_masks_for_generate``: a ``PagedCache`` needs the padding of the new tokens only, of
    the same shape in every step."""

    def make(self: Any, **given: Any) -> Any:
        mask: Tensor | None = given.get("attention_mask")
        if not isinstance(given.get(_CACHE), PagedCache):
            from transformers.masking_utils import create_masks_for_generate

            own = getattr(type(self), "create_masks_for_generate", None)
            return before(self, **given) if own else create_masks_for_generate(**given)
        length = given["inputs_embeds"].shape[1]
        return None if mask is None else mask[:, mask.shape[1] - length :]

    return make


HOOKS = {"_prepare_cache_for_generation": prepare_cache, "create_masks_for_generate": masks}
"""What ``patch`` replaces of ``generate``."""

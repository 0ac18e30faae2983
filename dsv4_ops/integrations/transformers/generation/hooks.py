"""Hooks into Hugging Face's ``generate``: its cache, masks and prefill chunks."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.cache.blocks import out_of_blocks
from dsv4_ops.integrations.transformers.cache.paged_cache import (
    DEFAULT_CHUNK,
    PagedCache,
    cache_argument,
)
from dsv4_ops.integrations.transformers.generation import decoding
from dsv4_ops.integrations.transformers.generation.draft_generation import DraftDecoding, check_call
from dsv4_ops.integrations.transformers.generation.kept import STEPS, KeptCache, KeptCaches
from dsv4_ops.integrations.transformers.generation.prompts import (
    CACHES,
    MASK,
    check_continues,
    check_kinds,
    check_prompts,
    check_ranks,
    first_column,
    inferred_mask,
    remember,
    setting,
    whole_mask,
)

Method = Callable[..., Any]

# Maximum tokens of a prefill step, and minimum tokens per row; the minimum takes precedence. Both
# set ``max_chunk``, and thus the memory of window rings.
_STEP_TOKENS, _MIN_CHUNK = 16384, 256


@dataclass
class _Call:
    """State of a ``generate`` call: the caches that it fills, and the rows that have ended."""

    caches: list[PagedCache] = field(default_factory=list)
    ended: Tensor | None = None
    padded: Tensor | None = None  # rows whose last token is padding
    mask: Tensor | None = None  # the prompts' mask
    num_drafts: int = 0
    may_keep: bool = False  # whether our loop may decode; later checks may refuse
    kept: KeptCache | None = None
    model: Any = None

    def step(self, ended: Tensor) -> None:
        """Add ``ended``, the rows that end with the newest token, to the rows that ended before."""
        before = torch.zeros_like(ended) if self.ended is None else self.ended
        self.end(before | ended, before)

    def end(self, ended: Tensor, padded: Tensor) -> None:
        """Record the rows that have ended; ``padded`` are the rows that ended before the newest
        token."""
        self.ended, self.padded = ended, padded


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)


def generates(model: Any) -> bool:
    """Whether the caller runs inside of a ``generate`` call of the model, such as in a streamer."""
    call = _CALL.get()
    return call is not None and call.model is model


def generate(before: Method) -> Method:
    """``generate``: check arguments, choose the decoding loop, and raise if tokens were dropped.

    The argument ``cache`` works in every version of transformers. With ``num_draft_tokens``, the
    model's draft layer proposes that many tokens per step.
    """

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(before).parameters.values()
    names = [each.name for each in parameters if each.kind is positional][1:]

    @functools.wraps(before)
    def run(self: Any, *args: Any, **arguments: Any) -> Any:
        arguments = dict(**dict(zip(names, args, strict=False)), **arguments)
        if setting(self, arguments, "use_mtp"):
            self.dsv4_ops_spec.draft_kinds("generate")
            raise argument_error(
                "generate",
                "use_mtp",
                must="be False with a patched model",
                got=True,
                do="Pass num_draft_tokens; load_mtp loads the draft layer of a checkpoint",
                kind=NotImplementedError,
            )
        call, num_drafts = _Call(model=self), arguments.pop("num_draft_tokens", None)
        if num_drafts is not None:
            check_call(self, num_drafts, arguments)
        check_kinds(self, arguments)
        check_prompts(arguments)
        check_ranks(self, arguments)
        streamer = arguments.get("streamer")
        if streamer is not None and self.dsv4_ops_spec.parallel is not None:
            arguments["streamer"] = streamer = _RankStreamer(streamer)
        if num_drafts is not None:
            call.num_drafts = num_drafts
            arguments["custom_generate"] = DraftDecoding(num_drafts)
        elif decoding.may_take(self, arguments):
            call.may_keep = True
            arguments["custom_generate"] = decoding.DeviceDecoding(
                call.end, streamer, lambda: call.kept
            )
        if "cache" in arguments:
            arguments[cache_argument()] = arguments.pop("cache")
        token = _CALL.set(call)
        try:
            out = before(self, *args[len(names) :], **arguments)
        except torch.OutOfMemoryError:
            kept_of(self).clear()
            raise
        finally:
            _CALL.reset(token)
        for cache in call.caches:
            cache.raise_if_dropped()
            if call.mask is not None and call.kept is None:
                sequences = out if isinstance(out, Tensor) else out.sequences
                remember(cache, sequences, call.mask, call.padded)
        if call.kept is not None:
            kept_of(self).give_back(call.kept)
        if isinstance(streamer, _RankStreamer):
            streamer.raise_error()
        return out

    return run


class _RankStreamer:
    """A streamer whose first error is raised at the end of the call, because the ranks that share
    the cache need this rank's steps."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._error: BaseException | None = None

    def put(self, tokens: Tensor) -> None:
        self._call(self._streamer.put, tokens)

    def end(self) -> None:
        self._call(self._streamer.end)

    def _call(self, method: Callable[..., Any], *args: Any) -> None:
        if self._error is None:
            try:
                method(*args)
            except (Exception, asyncio.CancelledError) as error:
                self._error = error

    def raise_error(self) -> None:
        """Raise the error, and hold no reference to it: its frames would hold the cache."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


def kept_of(model: Any) -> KeptCaches:
    """Return the caches that ``generate`` keeps on a patched model."""
    kept: KeptCaches = getattr(model, STEPS).kept
    return kept


def mask_of_prompts(before: Method) -> Method:
    """``_prepare_attention_mask_for_generation``: mask no token that the cache stores."""

    def mask(
        self: Any, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Any:
        inferred = before(self, inputs_tensor, generation_config, model_kwargs)
        cache = model_kwargs.get(cache_argument())
        if not isinstance(cache, PagedCache) or inputs_tensor.dim() != 2:
            return inferred
        return inferred_mask(inferred, inputs_tensor, cache)

    return mask


def prepare_cache(before: Method) -> Method:
    """``_prepare_cache_for_generation``: make a ``PagedCache``, unless the call has a cache or asks
    for another kind."""

    def make_cache(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        rows = batch_size * (generation_config.num_return_sequences or 1)
        cache = model_kwargs.get(cache_argument())
        ours = cache is None and generation_config.cache_implementation in CACHES
        # an assistant calls generate for every draft, and the assistant's cache outlives the call
        ours = ours and not generation_config.is_assistant
        searches = (generation_config.num_beams or 1) > 1
        static = generation_config.cache_implementation is not None
        call = _CALL.get()
        if searches and (isinstance(cache, PagedCache) or (ours and static)):
            raise argument_error(
                "generate",
                "num_beams",
                must="be 1 with a PagedCache",
                got=generation_config.num_beams,
                do="Pass cache_implementation='dynamic' instead",
                kind=NotImplementedError,
            )
        # the last step stores drafts after the end of the longest text
        assisted = generation_mode == "assisted_generation"
        looked_up = (assisted and generation_config.prompt_lookup_num_tokens) or 0
        if ours and not searches and generation_config.use_cache is not False:
            num_drafts = 0 if call is None else call.num_drafts
            longest = max_cache_length + 1 + max(num_drafts, looked_up)
            chunk = _chunk(generation_config, model_kwargs, rows, longest)
            if call is not None and call.may_keep and decoding.may_keep(self, generation_config):
                call.kept = kept_of(self).take(self, rows, longest, chunk)
                paged = call.kept.cache
            else:
                paged = PagedCache.for_model(
                    self,
                    max_batch_size=rows,
                    max_cache_len=longest,
                    # assisted decoding runs a prompt and its first drafts in one call
                    max_chunk=longest if assisted else max(chunk, 1 + num_drafts),
                    next_n=1 + num_drafts,
                )
            model_kwargs[cache_argument()] = cache = paged
            result = None
        else:
            result = before(
                self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            if isinstance(cache, PagedCache):
                cache.raise_if_dropped()
                asked = _asked(generation_config, max_cache_length + 1)
                prompt = _prompt_length(generation_config, model_kwargs, max_cache_length)
                _reserve_rows(cache, rows, prompt, max_cache_length, asked, looked_up)
        if call is not None and isinstance(cache, PagedCache):
            call.caches.append(cache)
            columns = getattr(generation_config, "_mask_length", 0)
            call.mask = model_kwargs.get(MASK)
            if call.mask is None and columns:
                call.mask = torch.ones(rows, columns, dtype=torch.int64, device=cache.device)
        return result

    return make_cache


def _chunk(
    generation_config: Any, model_kwargs: dict[str, Any], rows: int, max_cache_len: int
) -> int:
    """Return ``max_chunk`` of the cache: the length of the prompt, within bounds.

    The value is rounded up to a power of two, because each size of a cache needs its own graph.
    """
    prompt = _prompt_length(generation_config, model_kwargs, max_cache_len)
    most = min(prompt, generation_config.prefill_chunk_size or chunk_of(rows, max_cache_len))
    rounded: int = 1 << (most - 1).bit_length()
    return min(rounded, max_cache_len)


def _prompt_length(generation_config: Any, model_kwargs: dict[str, Any], longest: int) -> int:
    """Return the number of columns of the prompts, or ``longest`` if the number is unknown."""
    mask = model_kwargs.get(MASK)
    columns = longest if mask is None else mask.shape[1]
    length: int = getattr(generation_config, "_mask_length", columns)
    return length


def chunk_of(rows: int, max_cache_len: int) -> int:
    """Return the largest ``max_chunk`` of a cache that ``generate`` makes: a power of two, unless
    ``max_cache_len`` is less."""
    most = max(_STEP_TOKENS // rows, _MIN_CHUNK)
    return min(max_cache_len, DEFAULT_CHUNK, 1 << (most.bit_length() - 1))


def _asked(generation_config: Any, max_length: int | None = None) -> tuple[str, int]:
    """Return the name and the value of the setting that limits the length of texts. The
    argument ``max_length`` replaces the config's value, which Hugging Face reduces if prompts are
    embeddings."""
    if generation_config.max_new_tokens is not None:
        return "max_new_tokens", generation_config.max_new_tokens
    return "max_length", generation_config.max_length if max_length is None else max_length


def _reserve_rows(
    cache: PagedCache, rows: int, prompt: int, length: int, asked: tuple[str, int], drafts: int = 0
) -> None:
    """Add requests and blocks for all tokens of ``generate``, or raise and change nothing."""
    checks, (name, value) = Checks("generate"), asked
    length += drafts
    checks.at_most("batch size", rows, "max_batch_size of the cache", cache.max_batch_size)
    if length > cache.max_cache_len:
        if prompt > cache.max_cache_len - drafts:
            raise checks.error(
                "cache",
                must=f"store the {prompt} tokens of the prompt"
                + (f" and {drafts} drafts" if drafts else ""),
                got=f"max_cache_len = {cache.max_cache_len}",
                do="Make the cache with a larger max_cache_len, or pass a shorter prompt",
            )
        most = value + cache.max_cache_len - length
        stored = f"all tokens but the last{f', and {drafts} drafts' if drafts else ''}"
        raise checks.error(
            name,
            must=f"be at most {most} here: the prompt has {prompt} tokens, and the cache stores "
            f"{stored}, {cache.max_cache_len} in all",
            got=value,
            do=f"Pass a smaller {name}, or make the cache with a larger max_cache_len",
        )
    owners = {row: request for request, row in cache.requests.items()}
    vacant = [row for row in range(rows) if row not in owners]
    if owners and vacant:
        raise argument_error(
            "generate",
            "cache",
            must=f"have a request in each of its first {rows} rows, or none at all",
            got=f"none in row {vacant[0]}",
            do="Add requests, or free them all",
        )
    num_blocks = sum(cache.lacking_blocks(owners.get(row), length) for row in range(rows))
    if num_blocks > cache.num_free_blocks:
        advice = f"Free a request, or pass a smaller {name}"
        sizes = (cache.num_free_blocks, cache.num_blocks, num_blocks)
        raise out_of_blocks("generate", name, *sizes, advice)
    for row in range(rows):
        if not owners:
            cache.add(row)
        cache.reserve(owners.get(row, row), length)


def stopping_criteria(before: Method) -> Method:
    """``_get_stopping_criteria``: record rows that have ended, if Hugging Face pads ended rows."""
    from transformers import StoppingCriteriaList

    class Noted(StoppingCriteriaList):  # type: ignore[misc]  # transformers is partly untyped
        """Stopping criteria that record the rows of a ``generate`` call that have ended."""

        def __call__(self, input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
            ended: Tensor = super().__call__(input_ids, scores, **rest)
            call = _CALL.get()
            if call is not None:
                call.step(ended)
            return ended

    def get(self: Any, *args: Any, **arguments: Any) -> Any:
        criteria = before(self, *args, **arguments)
        # Hugging Face pads ended rows under this condition
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        return Noted(criteria) if pads else criteria

    return get


def prefill(before: Method) -> Method:
    """``_prefill``: compute only the columns that the cache lacks, in chunks of ``max_chunk``."""

    def run(
        self: Any,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> Any:
        cache = model_kwargs.get(cache_argument())
        if not isinstance(cache, PagedCache):
            return before(self, input_ids, generation_config, model_kwargs, is_first_iteration)
        embeddings = model_kwargs.get("inputs_embeds")
        inputs = input_ids if embeddings is None else embeddings
        mask = whole_mask(inputs, generation_config, model_kwargs, cache)
        start = first_column(mask, inputs.shape[1], cache)
        before_inputs = mask.shape[1] - inputs.shape[1]
        if embeddings is None and not before_inputs:
            check_continues(input_ids, mask, cache)
        if before_inputs:
            length, asked = generation_config.max_length, _asked(generation_config)
            rows, prompt = mask.shape
            _reserve_rows(cache, rows, prompt, length - 1 + before_inputs, asked)
        chunk_size, forward = generation_config.prefill_chunk_size, self.__call__
        if chunk_size and self._valid_auto_compile_criteria(model_kwargs, generation_config):
            forward = self.get_compiled_call(generation_config.compile_config)
        kept = None if (call := _CALL.get()) is None else call.kept
        longest = cache.max_chunk if kept is None else kept.chunk
        chunk, states = min(chunk_size or mask.shape[1], longest), []
        for begin in range(start, mask.shape[1], chunk):
            end = min(begin + chunk, mask.shape[1])
            kwargs, columns = dict(model_kwargs), slice(begin - before_inputs, end - before_inputs)
            for name in (MASK, "position_ids"):
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][..., :end]
            if embeddings is not None:
                kwargs["inputs_embeds"] = embeddings[:, columns]
            ids = input_ids if embeddings is not None else input_ids[:, columns]
            arguments = self.prepare_inputs_for_generation(
                ids, is_first_iteration=is_first_iteration, **kwargs
            )
            outputs = forward(**arguments, return_dict=True)
            states.append(outputs.hidden_states)
        # with a chunk size, Hugging Face returns the states of the last chunk only
        if states[-1] is not None and not chunk_size:
            layers = zip(*states, strict=True)
            outputs.hidden_states = tuple(torch.cat(parts, 1) for parts in layers)
        return outputs

    return run


def masks(before: Method) -> Method:
    """``create_masks_for_generate``: with a ``PagedCache``, return a mask of the new columns only.

    The mask is 0 for tokens that the cache stores already, and for tokens after the end of a row.
    """

    def make(self: Any, **arguments: Any) -> Any:
        mask: Tensor | None = arguments.get(MASK)
        cache = arguments.get(cache_argument())
        if not isinstance(cache, PagedCache):
            from transformers.masking_utils import create_masks_for_generate

            own = getattr(type(self), "create_masks_for_generate", None)
            return before(self, **arguments) if own else create_masks_for_generate(**arguments)
        batch, length = arguments["inputs_embeds"].shape[:2]
        new = None
        if mask is not None:
            # a later turn of a conversation passes stored tokens again
            lengths = cache.seq_lens[: mask.shape[0], None].to(mask.device)
            new = mask * (mask.to(torch.int64).cumsum(1) > lengths)
            # contiguous: strides that grow with the mask would cause recompilations
            new = new[:, mask.shape[1] - length :].contiguous()
        call = _CALL.get()
        if call is not None and call.padded is not None:
            if new is None:
                new = torch.ones(batch, length, dtype=torch.int64, device=cache.device)
            new = new * ~call.padded.to(new.device)[:, None]
        return new

    return make


HOOKS = {
    "generate": generate,
    "_prepare_attention_mask_for_generation": mask_of_prompts,
    "_prepare_cache_for_generation": prepare_cache,
    "_get_stopping_criteria": stopping_criteria,
    "_prefill": prefill,
    "create_masks_for_generate": masks,
}
"""Methods that ``patch`` replaces for ``generate``."""

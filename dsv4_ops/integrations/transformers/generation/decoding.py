"""Our decoding loop for ``generate``, which keeps the texts in tensors of fixed size.

Hugging Face prepares the inputs and makes the processors. Hugging Face also runs the prefill, if no
step that the model keeps from earlier calls can run the prefill (``prefilled``). For decodes,
Hugging Face's own loop would build new inputs for every token, and compile again for each batch
size. Our loop instead runs one step on the same tensors. On a GPU, our loop captures the step in a
CUDA graph, and checks only every ``CHECK_EVERY`` steps whether all texts have ended. If
``generate`` made the cache, later calls of ``generate`` use the graph again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache, cache_argument
from dsv4_ops.integrations.transformers.generation.kept import (
    STEPS,
    WARM_CALLS,
    KeptCache,
    KeptCaches,
    captured,
    keeps_on,
    rounded,
)
from dsv4_ops.integrations.transformers.generation.prefill import bucket, prefilled
from dsv4_ops.integrations.transformers.generation.prompts import setting
from dsv4_ops.integrations.transformers.modules.checks import uncalled
from dsv4_ops.integrations.transformers.modules.replacement import (
    has_global_hooks,
    is_library_function,
    is_library_method,
    is_split,
    own_forward,
)
from dsv4_ops.integrations.transformers.steps.compiled import CompiledStep, check_settings
from dsv4_ops.integrations.transformers.steps.dry_runs import DryRuns, padding
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch

Step = Callable[[StepBatch, CacheTensors], Tensor]
"""A decode step, which returns the logits of every token of a batch."""

CHECK_EVERY = 8
"""Number of steps between two checks of whether all texts have ended. Steps after the end store
nothing."""

PROCESSORS = (
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
"""Hugging Face's logits processors that our loop supports. These processors run on the device, and
read only the logits and the set of tokens of a text."""

CRITERIA = ("EosTokenCriteria", "MaxLengthCriteria")
"""Hugging Face's stopping criteria that our loop supports."""

DEVICES = ("cpu", "cuda")
"""Types of device on which our loop runs."""

_ARGUMENTS = ("custom_generate", "assistant_model", "tokenizer", "assistant_tokenizer")
"""Arguments that choose another decoding method, or that Hugging Face passes only to its own
methods."""

OTHER_METHODS = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "assistant_early_exit": None,
    "constraints": None,
    "dola_layers": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "stop_strings": None,
}
"""Settings that can choose another decoding method, with their neutral values."""

_OUTPUTS = ("return_dict_in_generate", "is_assistant")
_METHODS = (
    "forward",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_sample",
)
"""Methods of a model that our loop does not call after the prefill."""


@dataclass(frozen=True)
class DeviceDecoding:
    """Decoding method for ``generate``: our loop if ``takes`` is true, or else Hugging Face's loop.

    Args:
        on_end: Function to call with ``Texts.ended`` and ``Texts.padded`` at the end.
        streamer: The streamer of the call. Hugging Face passes a streamer only to its own methods.
        kept: Function that returns the kept cache that the call has taken, or None.
    """

    on_end: Callable[[Tensor, Tensor], None]
    streamer: Any
    kept: Callable[[], KeptCache | None]

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Any:
        """Return what Hugging Face's ``_sample`` would return."""
        call = Call(input_ids, logits_processor, stopping_criteria, generation_config, inputs)
        if not takes(model, call):
            return type(model)._sample(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=self.streamer,
                **inputs,
            )
        texts = decoded(model, call, self.streamer, self.kept())
        self.on_end(texts.ended, texts.padded)
        return texts.ids[:, : int(texts.length)].contiguous()


def may_take(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether ``DeviceDecoding`` may replace the decoding method that ``generate`` would choose for
    these arguments."""
    if any(arguments.get(name) is not None for name in _ARGUMENTS):
        return False
    shares_cache = model.dsv4_ops_spec.parallel is not None  # these ranks make the same calls
    if arguments.get("synced_gpus") or (_has_other_ranks() and not shares_cache):
        return False
    values = {name: setting(model, arguments, name) for name in OTHER_METHODS}
    return all(value is None or value == OTHER_METHODS[name] for name, value in values.items())


class Call(NamedTuple):
    """What Hugging Face passes to a decoding method.

    Args:
        prompts: Token ids, [batch, columns].
        processors: The ``LogitsProcessorList``.
        criteria: The ``StoppingCriteriaList``.
        config: The ``GenerationConfig``.
        inputs: Keyword arguments of the model, such as the cache and masks.
    """

    prompts: Tensor
    processors: Any
    criteria: Any
    config: Any
    inputs: dict[str, Any]

    @property
    def cache(self) -> Any:
        """The cache, or None."""
        return self.inputs.get(cache_argument())


def decoded(model: Any, call: Call, streamer: Any, kept: KeptCache | None = None) -> Texts:
    """Run the prefill and all steps of a call for which ``takes`` is true."""
    compiles = model._valid_auto_compile_criteria(call.inputs, call.config)
    step, captures = _eager(model), False
    if compiles:
        compiled, rows = _compiled(model, call, kept), len(call.prompts)
        captures = kept is None
        step = _whole(compiled) if kept is None else kept.step(compiled, rows)
    logits = None
    if compiles and kept is not None:
        logits = prefilled(model, call.prompts, call.config, call.inputs, kept)
    if logits is None:
        logits = model._prefill(call.prompts, call.config, call.inputs).logits[:, -1]
    getattr(model, STEPS).prefills.ran()
    texts = Texts(call)
    with _decoding(model):
        shares = model.dsv4_ops_spec.parallel is not None
        texts.extend(step, logits.float(), streamer, captures=captures, shares=shares)
    return texts


def may_keep(model: Any, config: Any) -> bool:
    """Whether our loop may decode a call from a kept cache: the call does not return the cache, and
    CUDA graphs can capture the steps."""
    return (
        keeps_on(model.device)
        and not config.disable_compile
        and not any(getattr(config, name, False) for name in _OUTPUTS)
        and _calls_only_ours(model)
    )


def _has_other_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def takes(model: Any, call: Call) -> bool:
    """Whether our loop decodes a call; otherwise Hugging Face's loop decodes the call.

    The call may use only ``PROCESSORS`` and ``CRITERIA``, and may return only sequences. The model
    must have Hugging Face's own methods.
    """
    cache, processors, criteria = call.cache, call.processors, call.criteria
    if not isinstance(cache, PagedCache):
        return False
    if any(getattr(call.config, name, False) for name in _OUTPUTS):
        return False
    if not _calls_only_ours(model):
        return False
    ends = any(hasattr(each, "eos_token_id") for each in criteria)
    if ends and call.config._pad_token_tensor is None:
        return False
    ignores = any(getattr(each, "prompt_ignore_length", None) is not None for each in processors)
    return (
        call.prompts.shape[1] > 0
        and call.prompts.device == cache.device
        and cache.device.type in DEVICES
        and criteria.max_length is not None
        and _are(criteria, CRITERIA, "stopping_criteria")
        and _are(processors, PROCESSORS, "logits_process")
        and not ignores
    )


def _calls_only_ours(model: Any) -> bool:
    """Whether a model has no user code that our loop would skip, or call with other shapes: methods
    of the model, hooks around the layers, or another head."""
    if uncalled(model) is not None or has_global_hooks():
        return False
    head, methods = model.lm_head, vars(model).keys() & set(_METHODS[1:])
    hooks, own = head._forward_hooks or head._forward_pre_hooks, own_forward(head)
    is_own = own is None or (is_split(head.weight) and is_library_function(own))
    if methods or hooks or not is_own or type(head) is not torch.nn.Linear:
        return False
    return all(is_library_method(type(model), name) for name in _METHODS)


def _are(instances: Any, names: tuple[str, ...], module: str) -> bool:
    """Whether the class of each instance is a Hugging Face class with one of these names, and not a
    subclass of such a class."""
    return all(
        type(each).__name__ in names
        and type(each).__module__ == f"transformers.generation.{module}"
        for each in instances
    )


class Texts:
    """The texts of a call, which are the prompts and their new tokens, on the device.

    Attributes:
        ids: [batch, max_length], int64. A column that no step has written holds the first token of
            its text, so that processors read no token that the text lacks.
        length: Number of written columns, [], int64; constant once all texts have ended.
        ended: Whether each text has ended, [batch], bool.
        padded: Whether the last token of each text is padding, [batch], bool.
        seq_lens: Number of tokens of each text that the cache stores, [batch], int32.
    """

    def __init__(self, call: Call) -> None:
        prompts, self.cache, self.processors = call.prompts, call.cache, call.processors
        batch, columns = prompts.shape
        self.is_sampled = bool(call.config.do_sample)
        lengths = [each.max_length for each in call.criteria if hasattr(each, "max_length")]
        self.max_new = min(lengths) - columns
        ends = [each.eos_token_id for each in call.criteria if hasattr(each, "eos_token_id")]
        device = prompts.device
        self.eos = torch.cat([each.flatten().to(device) for each in ends]) if ends else None
        pad = call.config._pad_token_tensor
        self.pad = None if pad is None else pad.to(device)
        first = prompts[:, :1].to(torch.int64)  # Hugging Face's loop converts int32 ids too
        self.ids = first.repeat(1, columns + max(self.max_new, 1))
        self.ids[:, :columns] = prompts
        self.length = torch.tensor(columns, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.padded = self.ended.clone()
        self.seq_lens = self.cache.seq_lens[:batch].clone()
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._rows = self._starts[:-1].clone()  # a view of ``_starts`` would need another graph

    def extend(
        self,
        step: Step,
        logits: Tensor,
        streamer: Any = None,
        *,
        captures: bool = False,
        shares: bool = False,
    ) -> None:
        """Choose the tokens after ``logits``, then run ``step`` until all texts have ended. Ranks
        that share the cache check for the end after every step. A rank with a streamer does so,
        and all ranks must run the same steps."""

        def decode() -> None:
            self._append(step(self._batch(), self.cache.tensors).float())

        self._append(logits)
        _stream(streamer, self)
        for count in range(1, self.max_new):
            checks = shares or streamer is not None or count % _check_every(self.ids.device) == 0
            if checks and self.eos is not None and bool(self.ended.all()):
                break
            if captures and self.ids.is_cuda and count == WARM_CALLS + 1:
                decode = captured(decode)
            decode()
            _stream(streamer, self)
        if streamer is not None:
            streamer.end()

    def _batch(self) -> StepBatch:
        """Return the step with the last token of every text.

        A text whose last token is padding becomes a padding request. After the end of all texts,
        every request is padding.
        """
        stored = ~self.padded & ~self.ended.all()
        self.seq_lens += stored.to(torch.int32)
        tokens = self.ids.index_select(1, (self.length - 1)[None]).flatten()
        lens = torch.where(stored, self.seq_lens, 0)
        return StepBatch(tokens, self._starts, lens, self._rows)

    def _append(self, logits: Tensor) -> None:
        """Choose the next token of each text, unless all texts have ended."""
        goes_on = ~self.ended.all()
        scores = self.processors(self.ids, logits)
        tokens = _sampled(torch.softmax(scores, -1)) if self.is_sampled else scores.argmax(-1)
        if self.eos is not None:
            assert self.pad is not None
            tokens = torch.where(self.ended, self.pad, tokens)
        at = self.length.clamp(max=self.ids.shape[1] - 1)[None]
        kept = self.ids.index_select(1, at)
        new = torch.where(goes_on, tokens[:, None].to(self.ids.dtype), kept)
        self.ids.index_copy_(1, at, new)
        self.length += goes_on
        self.padded.copy_(torch.where(goes_on, self.ended, self.padded))
        if self.eos is not None:
            self.ended |= torch.isin(tokens, self.eos)


def _check_every(device: torch.device) -> int:
    """Return the number of steps between two checks, which is 1 on a CPU, because a check takes no
    time there."""
    return 1 if device.type == "cpu" else CHECK_EVERY


def _sampled(probs: Tensor) -> Tensor:
    """Sample a token from each row, as ``torch.multinomial`` does. On a GPU, ``torch.multinomial``
    makes the host wait for a check of the probabilities."""
    if probs.device.type == "cpu":
        return torch.multinomial(probs, 1).squeeze(1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def _stream(streamer: Any, texts: Texts) -> None:
    if streamer is not None:
        streamer.put(texts.ids[:, int(texts.length) - 1].cpu())


class CompiledSteps(dict[Any, CompiledStep]):
    """The compiled steps of a model, by name and settings. A copy of the model starts without
    steps.

    Attributes:
        prefills: Dry runs that compile the kernels of eager prefills.
        kept: Caches that ``generate`` keeps for its next calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = KeptCaches()
        self.prefills = DryRuns(prefill_step)

    def __deepcopy__(self, memo: Any) -> CompiledSteps:
        return CompiledSteps()

    def __reduce__(self) -> Any:
        return CompiledSteps, ()


def compiled_step(
    model: Any,
    step: Callable[..., Any],
    config: Any,
    on_part: Callable[[str], None] | None = None,
    of_parts: Callable[..., Any] | None = None,
) -> CompiledStep:
    """Return a compiled step for any number of tokens and requests, and keep the step on the model.

    Args:
        model: A patched model.
        step: ``decode_step``, ``prefill_step``, or another step with ``of_parts``.
        config: A ``CompileConfig`` or None. Only the backend and the options are read.
        on_part: See ``compile_step``.
        of_parts: See ``CompiledStep``.
    """
    values = {name: getattr(config, name, None) for name in ("backend", "options")}
    settings = {name: value for name, value in values.items() if value is not None}
    steps, key = getattr(model, STEPS), repr((step.__name__, sorted(settings.items())))
    if key not in steps:
        settings["dynamic"] = True
        check_settings("compile_step", settings)
        steps[key] = CompiledStep(model, step, True, None, on_part, settings, of_parts)
    return steps[key]


def _compiled(model: Any, call: Call, kept: KeptCache | None) -> CompiledStep:
    """Return the compiled decode step for the ``CompileConfig`` of a call.

    Before the first compile, let workers begin to compile the kernels of the prefill.
    """
    cache, rows = call.cache, len(call.prompts)
    step = compiled_step(model, decode_step, call.config.compile_config)
    columns, most = call.prompts.shape[1], cache.max_chunk if kept is None else kept.chunk
    longest = min(columns, call.config.prefill_chunk_size or most, most)
    num_tokens = longest * rows
    if kept is not None:
        num_tokens, rows = bucket(num_tokens), min(rounded(rows, 1), cache.max_batch_size)
    skips = model.dsv4_ops_spec.skips_contexts(num_tokens, rows, longest)
    first = {"has_context": False} if skips else {}
    prefills: DryRuns = getattr(model, STEPS).prefills
    for rest in (first, {}) if columns > longest and skips else (first,):
        if not prefills.has_requested(rest):  # other sizes need few more kernels
            prefills.request_kernels(model, cache.tensors, num_tokens, rows, rest)
    if not step.parts and cache.device.type == "cuda":
        with _decoding(model):  # compiled layers depend on settings that ``_decoding`` changes
            _whole(step)(padding(rows, rows, cache.device), cache.tensors)
        prefills.request_others(model, cache.tensors, first)
    return step


def _whole(step: CompiledStep) -> Step:
    """Return a function that runs a step of one token per text, without state rings."""
    return lambda batch, cache: step(batch, cache, state_rings=False)


def _eager(model: Any) -> Step:
    return lambda batch, cache: decode_step(model, batch, cache, state_rings=False)


def _decoding(model: Any) -> AbstractContextManager[None]:
    """Prepare the kernels of a model's experts for decoding, as Hugging Face does."""
    prepare = getattr(model, "_optimize_model_for_decode", None)
    prepared: AbstractContextManager[None] = nullcontext() if prepare is None else prepare()
    return prepared

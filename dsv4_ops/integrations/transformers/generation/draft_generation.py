"""``generate(num_draft_tokens=)``: a draft layer proposes tokens, and the model verifies them.

Hugging Face prepares inputs, lengths and logits processors, and then calls ``DraftDecoding``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.integrations.transformers.architectures.base import draft_of
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache, cache_argument
from dsv4_ops.integrations.transformers.generation.decoding import compiled_step
from dsv4_ops.integrations.transformers.generation.kept import WARM_CALLS, captured, keeps_on
from dsv4_ops.integrations.transformers.generation.prefill import chunks
from dsv4_ops.integrations.transformers.generation.prompts import (
    CACHES,
    MASK,
    first_column,
    setting,
    whole_mask,
)
from dsv4_ops.integrations.transformers.generation.speculation import (
    SpeculativeStep,
    speculate,
    speculative_prefill,
    speculative_step,
)
from dsv4_ops.integrations.transformers.tensors import StepBatch

_OP = "generate"
MOST_DRAFTS = 64
"""Maximum number of drafts per step. Each draft needs a run of the draft layer, memory and time."""
_WARPERS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
)
"""Logits processors that we support with drafts. These processors read only the logits of a row,
not the text."""
_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
_SETTINGS = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "use_cache": True,
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "token_healing": False,
    "assistant_early_exit": None,
    "constraints": None,
    "dola_layers": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "stop_strings": None,
}
"""Generation settings for which we support only one value with drafts."""
_ARGUMENTS = (
    "inputs",
    "input_ids",
    MASK,
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "tokenizer",
)
"""Arguments that we support with drafts, besides generation settings."""


def check_call(model: Any, num_drafts: Any, arguments: dict[str, Any]) -> None:
    """Raise if a call of ``generate`` with these arguments cannot draft."""
    Checks(_OP).at_least(1, num_draft_tokens=num_drafts)
    if num_drafts > MOST_DRAFTS:
        raise argument_error(
            _OP,
            "num_draft_tokens",
            must=f"be at most {MOST_DRAFTS}",
            got=num_drafts,
            do="Pass 1 to 5: later drafts are hardly ever right",
        )
    if draft_of(model) is None:
        model.dsv4_ops_spec.draft_kinds(_OP)  # raises for a model that load_mtp would refuse
        raise argument_error(
            _OP,
            "num_draft_tokens",
            must="be None for a model without a draft layer",
            got=num_drafts,
            do="Call load_mtp(model, path) first, with the folder of its checkpoint",
        )
    for name, value in arguments.items():
        is_known = name in _ARGUMENTS or hasattr(model.generation_config, name)
        if not is_known and value is not None and value is not False:
            _refuse(name, "be None", value if value is True else kind_of(value))
    for name, only in _SETTINGS.items():
        value = setting(model, arguments, name)
        if value is not None and value != only and (only or value):
            _refuse(name, f"be {only}", value)
    cache = setting(model, arguments, "cache_implementation")
    if cache not in CACHES:
        _refuse("cache_implementation", "be None", cache)


def _refuse(name: str, rule: str, actual: object) -> None:
    raise argument_error(
        _OP,
        name,
        must=f"{rule} with num_draft_tokens",
        got=actual,
        do="Leave num_draft_tokens out",
        kind=NotImplementedError,
    )


@dataclass(frozen=True)
class DraftDecoding:
    """Decoding method for a ``generate`` call that drafts ``num_drafts`` tokens per step."""

    num_drafts: int

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: Any,  # holds the mask, which Hugging Face would pass twice as a named parameter
    ) -> Tensor:
        """Return prompts and new tokens, padded on the right, [batch, length]."""
        cache = rest.get(cache_argument())
        assert isinstance(cache, PagedCache)
        _check(logits_processor, stopping_criteria, generation_config)
        mask = whole_mask(input_ids, generation_config, rest, cache)
        first_column(mask, input_ids.shape[1], cache)
        most = generation_config.max_length - input_ids.shape[1]
        run = _Run(model, cache, self.num_drafts, generation_config, list(logits_processor))
        input_ids = input_ids.to(torch.int64)
        prompts = [ids[mask_row != 0] for ids, mask_row in zip(input_ids, mask, strict=True)]
        new = _texts(run, prompts, most, generation_config)
        width = max(map(len, new))
        pad = generation_config._pad_token_tensor
        out = input_ids.new_full((len(new), width), 0 if pad is None else int(pad))
        for row, tokens in zip(out, new, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=row.dtype, device=row.device)
        return torch.cat([input_ids, out], 1)


def _check(processors: Any, criteria: Any, config: Any) -> None:
    warpers = _WARPERS if config.do_sample else ()
    for name, kinds, instances in (
        ("logits_processor", warpers, processors),
        ("stopping_criteria", _CRITERIA, criteria),
    ):
        others = [type(one).__name__ for one in instances if type(one).__name__ not in kinds]
        if others:
            rule = "hold " + (" or ".join(kinds) if kinds else "nothing")
            _refuse(name, rule, others[0])


class _Run:
    """The steps of one call, and their sampling."""

    def __init__(
        self, model: Any, cache: PagedCache, num_drafts: int, config: Any, warpers: list[Any]
    ) -> None:
        self.model, self.cache, self.num_drafts = model, cache, num_drafts
        self.sampled, self.warpers = bool(config.do_sample), warpers
        self._step: Callable[..., SpeculativeStep] = partial(speculative_step, model)
        compiled = config.compile_config
        self._captures = keeps_on(model.device) and not config.disable_compile
        if compiled is not None or self._captures:
            self._step = compiled_step(model, speculative_step, compiled, of_parts=speculate)
        self._calls = 0
        self._held: list[Tensor] = []
        self._found: SpeculativeStep | None = None
        self._replay: Callable[[], None] | None = None

    def prefill(self, batch: StepBatch, following: Tensor) -> SpeculativeStep:
        """Run a chunk of the prompts."""
        return speculative_prefill(
            self.model,
            batch,
            self.cache.tensors,
            num_drafts=self.num_drafts,
            following=following,
            **self._sampling(self._uniforms(len(following), self.num_drafts + 1)),
        )

    def step(self, previous: SpeculativeStep) -> SpeculativeStep:
        """Run the step that follows ``previous``; a later replay overwrites the result."""
        batch, count = previous.batch, 2 * self.num_drafts + 1
        sampling = (previous.draft_probs, self._uniforms(len(previous.tokens), count))
        inputs = [each for each in (batch.tokens, batch.seq_lens, *sampling) if each is not None]
        if self._captures and self._calls == WARM_CALLS:
            self._held = [each.clone() for each in inputs]
            self._replay = captured(lambda: self._run(batch, *self._held))
        self._calls += 1
        if self._replay is None:
            self._run(batch, *inputs)
        else:
            for held, new in zip(self._held, inputs, strict=True):
                held.copy_(new)
            self._replay()
        assert self._found is not None
        return self._found

    def _run(
        self,
        batch: StepBatch,
        tokens: Tensor,
        lens: Tensor,
        probs: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> None:
        batch, sampling = replace(batch, tokens=tokens, seq_lens=lens), self._sampling(uniforms)
        self._found = self._step(batch, self.cache.tensors, draft_probs=probs, **sampling)

    def _uniforms(self, rows: int, columns: int) -> Tensor | None:
        if not self.sampled:
            return None
        return torch.rand(rows, columns, dtype=torch.float32, device=self.model.device)

    def _sampling(self, uniforms: Tensor | None) -> dict[str, Any]:
        if uniforms is None:
            return {}
        return {"uniforms": uniforms, "temperature": 1.0, "warp": self._warp}

    def _warp(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        for one in self.warpers:
            logits = one(None, logits)
        return logits


def _texts(run: _Run, prompts: list[Tensor], most: int, config: Any) -> list[list[int]]:
    """Return at most ``most`` new tokens per prompt. The last new token may end the text."""
    ends = config._eos_token_tensor
    stops = set() if ends is None else set(ends.flatten().tolist())
    step = _prefilled(run, prompts)
    texts: list[list[int]] = [[] for _ in prompts]
    live = [True] * len(prompts)
    while True:
        for row, tokens in enumerate(step.tokens.tolist()):
            for token in tokens:
                if live[row] and token >= 0:
                    texts[row].append(token)
                    live[row] = token not in stops and len(texts[row]) < most
        if not any(live):
            return texts
        batch = step.batch
        is_live = torch.tensor(live, device=batch.seq_lens.device)
        lens = torch.where(is_live, batch.seq_lens, torch.zeros_like(batch.seq_lens))
        batch = StepBatch(batch.tokens, batch.query_start_loc, lens, batch.rows)
        step = run.step(step._replace(batch=batch))


def _prefilled(run: _Run, prompts: list[Tensor]) -> SpeculativeStep:
    """Run the prompts in chunks; return the result of the last chunk."""
    device = run.cache.device
    for batch, stops in chunks(prompts, run.cache.max_chunk, device):
        next_ids = [
            int(prompt[stop]) if 0 < stop < len(prompt) else -1
            for prompt, stop in zip(prompts, stops, strict=True)
        ]
        step_result = run.prefill(batch, torch.tensor(next_ids, device=device))
    return step_result

"""Hooks into Hugging Face's ``generate_batch`` and ``init_continuous_batching``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.core.versions import release
from dsv4_ops.integrations.transformers.architectures.base import require_transformers

Method = Callable[..., Any]

OLDEST = (5, 19)
"""Oldest release of transformers whose continuous batching has the parts that we replace."""

CACHED = "_cached_continuous_batching_manager"
"""Attribute of a model in which Hugging Face keeps the manager for the next session."""


def init_continuous_batching(before: Method) -> Method:
    """``init_continuous_batching``: make a manager whose requests run from one ``PagedCache``."""

    @functools.wraps(before)
    def init(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        # check first: Hugging Face changes the model's attention, and an error does not undo this
        check_release("init_continuous_batching")
        _check_configs(
            "init_continuous_batching",
            generation_config,
            continuous_batching_config,
            workload_hints,
        )
        from dsv4_ops.integrations.transformers.batching import manager

        return manager.manager_of(
            self, generation_config, continuous_batching_config, workload_hints
        )

    return init


def generate_batch(before: Method) -> Method:
    """``generate_batch``: refuse invalid prompts, and settings that Hugging Face would ignore."""

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(before).parameters.values()
    names = [each.name for each in parameters if each.kind is positional][2:]

    @functools.wraps(before)
    def run(self: Any, inputs: Any, *args: Any, **arguments: Any) -> Any:
        op = "generate_batch"
        check_release(op)
        arguments = dict(**dict(zip(names, args, strict=False)), **arguments)
        _check_arguments(op, arguments, names)
        if not isinstance(inputs, list | tuple):
            raise argument_error(
                op,
                "inputs",
                must="be a list of prompts",
                got=kind_of(inputs),
                do="Pass a list of token ids for each prompt",
                kind=TypeError,
            )
        config = arguments.get("generation_config") or self.generation_config
        limit = None if arguments.get("max_new_tokens") else max_length(config)
        for index, prompt in enumerate(inputs):
            check_prompt(op, f"inputs[{index}]", prompt, self.config.vocab_size, limit)
        return before(self, inputs, *args[len(names) :], **arguments)

    return run


def max_length(generation_config: Any) -> int | None:
    """Return the maximum length of a prompt with its answer, or None.

    The result is None if ``max_new_tokens`` is set, because ``max_new_tokens`` replaces
    ``max_length``, as in ``generate``.
    """
    if generation_config.max_new_tokens is not None:
        return None
    length: int | None = generation_config.max_length
    return length


def _check_arguments(op: str, arguments: dict[str, Any], names: list[str]) -> None:
    """Raise for arguments that have a wrong type or that Hugging Face would ignore."""
    checks, config = Checks(op), arguments.get("generation_config")
    _check_configs(op, config, arguments.get("continuous_batching_config"))
    for name in ("record_timestamps", "progress_bar", "persistent_manager", "warmup"):
        checks.flag(name, arguments.get(name, False))
    max_new_tokens = arguments.get("max_new_tokens")
    if max_new_tokens is not None:
        checks.at_least(1, max_new_tokens=max_new_tokens)
    for name in arguments.keys() - {*names, "max_new_tokens", "input_ids"}:
        # generate(cache_implementation="paged") passes arguments and a config with equal values
        value, missing = arguments[name], object()
        if isinstance(value, Tensor):
            passes = name == "attention_mask" and bool(value.all())
        else:
            passes = value is None or getattr(config, name, missing) == value
        if not passes:
            raise checks.error(
                name,
                must="be a setting of generation_config",
                got="an argument",
                do="Pass generation_config=GenerationConfig(...), or call generate",
                kind=TypeError,
            )


def _check_configs(op: str, generation_config: Any, config: Any, hints: Any = None) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.continuous_api import WorkloadHints

    for name, value, kind in (
        ("generation_config", generation_config, GenerationConfig),
        ("continuous_batching_config", config, ContinuousBatchingConfig),
        ("workload_hints", hints, WorkloadHints),
    ):
        Checks(op).instance(name, value, kind)


def check_release(op: str) -> None:
    """Raise if transformers is too old for our continuous batching."""
    version = require_transformers(op).__version__
    if release(version) < OLDEST:
        raise argument_error(
            op,
            "transformers",
            must=f"be {OLDEST[0]}.{OLDEST[1]} or newer for continuous batching",
            got=version,
            do="Install a newer release, or call generate",
            kind=NotImplementedError,
        )


def check_prompt(
    op: str, name: str, prompt: Any, vocab_size: int, limit: int | None = None
) -> None:
    """Raise if a prompt is not a list of ids of the vocabulary, is empty, or has ``limit`` or more
    ids."""
    is_list = isinstance(prompt, list | tuple)
    if not is_list or not all(type(token) is int for token in prompt):
        raise argument_error(
            op,
            name,
            must="be a list of token ids",
            got=f"a list with {_other(prompt)}" if is_list else kind_of(prompt),
            do="Pass ids of the tokenizer, such as input_ids[0].tolist()",
            kind=TypeError,
        )
    unknown = [token for token in prompt if not 0 <= token < vocab_size]
    if unknown or not prompt:
        raise argument_error(
            op,
            name,
            must=f"have at least one token, and ids of the vocabulary, 0 to {vocab_size - 1}",
            got=unknown[0] if unknown else "no token",
            do="Encode the prompt with the tokenizer of the model",
        )
    if limit is not None and len(prompt) >= limit:
        raise argument_error(
            op,
            name,
            must=f"have fewer tokens than max_length of the generation config = {limit}",
            got=len(prompt),
            do="Pass max_new_tokens, or a larger max_length",
        )


def _other(prompt: Any) -> str:
    return kind_of(next(token for token in prompt if type(token) is not int))


HOOKS = {
    "init_continuous_batching": init_continuous_batching,
    "generate_batch": generate_batch,
}
"""Methods that ``patch`` replaces for continuous batching."""

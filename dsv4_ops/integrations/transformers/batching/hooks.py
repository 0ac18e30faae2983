"""Hooks into Hugging Face's ``generate_batch`` and ``init_continuous_batching``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.core.versions import release
from dsv4_ops.integrations.transformers.architectures.base import require_transformers

Method = Callable[..., Any]

OLDEST = (5, 19)
"""Oldest release of transformers whose continuous batching has the parts that we replace."""

CACHED = "_cached_continuous_batching_manager"
"""Attribute of a model with the manager that Hugging Face keeps for the next session."""


def init_continuous_batching(before: Method) -> Method:
    """``init_continuous_batching``: make a manager whose requests run from one ``PagedCache``."""

    @functools.wraps(before)
    def init(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        # before Hugging Face sets another attention, which it leaves set if it fails
        check_release("init_continuous_batching")
        from dsv4_ops.integrations.transformers.batching import manager

        return manager.manager_of(
            self, generation_config, continuous_batching_config, workload_hints
        )

    return init


def generate_batch(before: Method) -> Method:
    """``generate_batch``: refuse prompts that Hugging Face would log and leave out."""

    @functools.wraps(before)
    def run(self: Any, inputs: Any, *args: Any, **arguments: Any) -> Any:
        op = "generate_batch"
        check_release(op)
        if not isinstance(inputs, list | tuple):
            raise argument_error(
                op,
                "inputs",
                must="be a list of prompts",
                got=kind_of(inputs),
                do="Pass a list of token ids for each prompt",
                kind=TypeError,
            )
        for index, prompt in enumerate(inputs):
            check_prompt(op, f"inputs[{index}]", prompt, self.config.vocab_size)
        return before(self, inputs, *args, **arguments)

    return run


def check_release(op: str) -> None:
    """Raise if continuous batching of the installed transformers is not supported."""
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


def check_prompt(op: str, name: str, prompt: Any, vocab_size: int) -> None:
    """Raise if a prompt is not a list of at least one id of the vocabulary."""
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


def _other(prompt: Any) -> str:
    return kind_of(next(token for token in prompt if type(token) is not int))


HOOKS = {
    "init_continuous_batching": init_continuous_batching,
    "generate_batch": generate_batch,
}
"""Methods that ``patch`` replaces for continuous batching."""

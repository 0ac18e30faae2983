"""Hugging Face's unpatched model, with which the demo compares ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Stock:
    """Hugging Face's model with the ``DynamicCache`` that it makes itself.

    Args:
        model: The model, not patched.
        prompts: int64 [num_requests, length], on the device of the model.
    """

    def __init__(self, model: Any, prompts: Tensor) -> None:
        self.model, self.prompts = model, prompts
        self.cache: Any = None

        def step(tokens: Tensor, cache: Any) -> Tensor:
            # positional, because the argument's name depends on the release of transformers
            logits: Tensor = model(tokens, None, None, cache, use_cache=True).logits
            return logits[:, -1]

        self.step: Callable[..., Tensor] = step

    def start(self) -> Tensor:
        """Prefill the prompts into a new cache; return the logits of their last tokens."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        return self.step(self.prompts, self.cache)

    def arguments(self, tokens: Tensor) -> tuple[Any, ...]:
        """Return the arguments of ``step`` for the next tokens."""
        return tokens[:, None], self.cache


def generated(model: Any, prompts: Tensor, count: int, **settings: Any) -> list[list[int]]:
    """Return the first ``count`` greedy tokens of the model's own ``generate``."""
    ended = model.generate(
        prompts,
        max_new_tokens=count,
        do_sample=False,
        disable_compile=True,
        **settings,
    )
    tokens: list[list[int]] = ended[:, prompts.shape[1] :].tolist()
    return tokens


@torch.no_grad()
def export_step(side: Stock) -> Any:
    """Export a decode step and its cache in the form for an AOTInductor package.

    Raises:
        Exception: an error of ``torch.export``.
    """

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = side.model

        def forward(self, tokens: Tensor, cache: Any) -> Tensor:
            return side.step(tokens, cache)

    arguments = side.arguments(side.start().argmax(-1))
    return torch.export.export(Step(), arguments)

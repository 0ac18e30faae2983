"""Ask for the kernels of a step before it runs, so that workers compile them side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from dsv4_ops.core.torch_compat import FakeTensorMode
from dsv4_ops.integrations.transformers.modules.replacement import has_global_hooks, own_forward
from dsv4_ops.integrations.transformers.steps.step import (
    decode,
    decode_step,
    prefill,
    prefill_step,
    spec_of,
)
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch

_log = logging.getLogger(__name__)

PARTS = {decode_step: decode, prefill_step: prefill}
"""Steps as parts for a ``Runner``."""

BATCHES = (1, 2, 8, 16, 32)
"""Requests of the decode steps whose kernels are compiled after a first step: those between have
few others."""


class KernelRequests:
    """Requests for the kernels of a step whose ops choose them by the sizes of each call.

    Nothing runs: the step is called with fake tensors, once per kind of layer, and Inductor's
    workers compile what it would launch. A kernel that depends on more than sizes, such as the
    alignment of a view, is compiled when it is launched.

    Args:
        step: ``decode_step`` or ``prefill_step``.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self._asked: set[Any] = set()
        self._has_asked_batches = False

    def request(
        self, model: Any, cache: CacheTensors, num_tokens: int, num_reqs: int, rest: dict[str, Any]
    ) -> None:
        """Ask for the kernels of these sizes, unless sizes of the same class have asked."""
        sizes = (_class(num_tokens), _class(num_reqs), *rest.items())
        if cache.device.type != "cuda" or sizes in self._asked or not num_reqs:
            return
        self._asked.add(sizes)
        from dsv4_ops.lowering.workers import compile_workers

        submit = compile_workers()
        if submit is None or _calls_others(model):
            return
        from dsv4_ops.kernels.precompile import requests

        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), requests(submit):
                batch = padding(num_tokens, num_reqs, cache.device)
                PARTS[self.step](model, batch, cache, run=OncePerName(), **rest)
        except Exception as error:  # such as experts that read values: launches compile the rest
            _log.info("not all kernels of a step were requested: %s", error)

    def request_batches(self, model: Any, cache: CacheTensors, rest: dict[str, Any]) -> None:
        """Ask for the kernels of other decode steps, which workers compile while this one goes
        on."""
        if self.step is decode_step and not self._has_asked_batches:
            self._has_asked_batches = True
            for requests in BATCHES:
                self.request(model, cache, requests, requests, rest)


def _calls_others(model: Any) -> bool:
    """Whether a step calls other ranks, or hooks or forwards of a user, which may not take fake
    tensors."""
    if has_global_hooks() or spec_of("compile_step", model).parallel is not None:
        return True
    return any(
        module._forward_hooks or module._forward_pre_hooks or own_forward(module) is not None
        for module in model.modules()
    )


def _class(size: int) -> int:
    """Sizes of a class have the same kernels, but for a few: launchers choose tiles by powers of
    two."""
    return (size - 1).bit_length()


def padding(num_tokens: int, num_reqs: int, device: torch.device) -> StepBatch:
    """Return a batch of padding requests."""
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    starts, lens = (
        torch.zeros(num_reqs + more, dtype=torch.int32, device=device) for more in (1, 0)
    )
    return StepBatch(tokens, starts, lens, lens - 1)


class OncePerName:
    """A ``Runner`` that runs one part of each name, and returns its result for all others."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        if name not in self.results:
            self.results[name] = function(*args, **rest)
        return self.results[name]

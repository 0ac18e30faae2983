"""Run a step with fake tensors before the real run.

A dry run makes the checks of kinds, dtypes and devices, so Dynamo need not trace these checks. A
dry run also lets workers compile the kernels in parallel. A dry run computes nothing, and runs each
kind of layer once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4_ops.core.torch_compat import FakeTensorMode, unknown_sizes
from dsv4_ops.integrations.transformers.compile_cache.precompiled import versions
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

PARTS: dict[Callable[..., Any], Callable[..., Any]] = {decode_step: decode, prefill_step: prefill}
"""For each step, the function that runs the step in parts."""

OTHERS: dict[Callable[..., Any], tuple[int, ...]] = {
    decode_step: (1, 8, 16, 32),
    prefill_step: (1, 128, 512, 1024, 2048, 8192),
}
"""For each step, the numbers of tokens for which workers compile kernels during the first step.
Steps with other numbers of tokens need few more kernels."""


class DryRuns:
    """The dry runs of a step.

    A model with a user's forwards or hooks has no dry runs. Dry runs update no buffers, because the
    buffers would get fake values.

    Args:
        step: The step.
        parts: Function that runs the step in parts; ``PARTS[step]`` by default.

    Attributes:
        num_parts: Number of different parts of the step; None before the end of the first dry run.
    """

    def __init__(self, step: Callable[..., Any], parts: Callable[..., Any] | None = None) -> None:
        self.step, self._parts = step, parts or PARTS[step]
        self._asked: set[Any] = set()
        self._has_asked_others, self._has_jobs = False, False
        self._passed: set[Any] = set()
        self._fails: bool | None = None
        self._marks: list[Path] = []
        self.num_parts: int | None = None

    def forget_model(self) -> None:
        """Forget the results for the model, because the model changed."""
        self._passed.clear()
        self._fails = None

    def may_pass(self, model: Any) -> bool:
        """Whether ``passes`` can be true for a model. False if a step calls code of a user."""
        if self._fails is None:
            self._fails = calls_users(model)
        return not self._fails

    def note(self, cache: CacheTensors, rest: dict[str, Any]) -> None:
        """Record that the checks of this model pass for caches of this structure."""
        self._passed.add((structure_of(cache), *rest.items()))

    def passes(
        self, model: Any, cache: CacheTensors, num_tokens: int, num_reqs: int, rest: dict[str, Any]
    ) -> bool:
        """Whether the checks of a step pass for this model and a cache of this structure.

        Checks that pass for one size pass for every valid ``StepBatch``.

        Raises:
            ValueError, TypeError: a check failed, although the checks passed for another cache.
        """
        structure = (structure_of(cache), *rest.items())
        if structure not in self._passed and num_reqs and self.may_pass(model):
            try:
                self._run(model, cache, num_tokens, num_reqs, rest, nullcontext())
            except Exception as error:
                if self._passed:
                    raise
                self._fails = True
                _log.info("Dynamo traces the checks of a step: %s", error)
            else:
                self._passed.add(structure)
        return structure in self._passed

    def request_kernels(
        self,
        model: Any,
        cache: CacheTensors,
        num_tokens: int,
        num_reqs: int,
        rest: dict[str, Any],
        urgent: bool = True,
    ) -> None:
        """Let workers compile the kernels of these sizes, once per size class.

        A kernel that depends on more than sizes, such as the alignment of a view, is compiled when
        it is launched.
        """
        sizes = (_class(num_tokens), _class(num_reqs), *rest.items())
        asked = sizes[:2], tuple(rest.items())
        if cache.device.type != "cuda" or asked in self._asked or not num_reqs:
            return
        self._asked.add(asked)
        from dsv4_ops.lowering.workers import compile_workers

        submit = compile_workers()
        if submit is None or calls_users(model):
            return
        mark = self._mark(model, cache, sizes)
        if mark.is_file():
            return
        from dsv4_ops.kernels.precompile import requests

        def noted(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
            self._has_jobs = True
            return submit(function, *args, urgent=urgent)

        try:
            self._run(model, cache, num_tokens, num_reqs, rest, requests(noted))
        except Exception as error:  # launches compile the other kernels
            _log.info("not all kernels of a step were requested: %s", error)
        else:
            self._marks.append(mark)
            if self.may_pass(model):
                self.note(cache, rest)

    def has_requested(self, rest: dict[str, Any]) -> bool:
        """Whether the kernels of a step with these keyword arguments were requested, for any
        sizes."""
        return any(options == tuple(rest.items()) for _, options in self._asked)

    def ran(self) -> None:
        """Tell other processes that a step ran. Triton's folder then has all kernels of the step,
        because a launch compiles its kernel if the folder lacks the kernel."""
        for mark in self._marks:
            with suppress(OSError):
                mark.touch()
        self._marks.clear()

    def _mark(self, model: Any, cache: CacheTensors, sizes: Any) -> Path:
        """Return the file that says that Triton's folder has the kernels of these sizes."""
        from dsv4_ops.kernels.common.triton_compat import cache_folder

        weights = {(each.dtype, each.shape) for each in model.parameters()}
        spec = spec_of("compile_step", model)
        depends = [versions(), spec.fingerprint, spec.kv, spec.impl, self.step.__name__]
        depends += [structure_of(cache), sizes, sorted(map(repr, weights))]
        digest = hashlib.sha256(repr(depends).encode()).hexdigest()[:32]
        return Path(cache_folder()) / f"dsv4_ops-{digest}"

    def request_others(self, model: Any, cache: CacheTensors, rest: dict[str, Any]) -> None:
        """Let workers compile the kernels of steps of other sizes (``OTHERS``), while this process
        traces the first step. If the first step needs no new kernel, do nothing: an earlier process
        has then compiled the kernels of the other sizes too."""
        if self._has_jobs and not self._has_asked_others:
            self._has_asked_others = True
            marks = list(self._marks)
            for tokens in OTHERS[self.step]:
                requests = tokens if self.step is decode_step else 1
                self.request_kernels(model, cache, tokens, requests, rest, urgent=False)
            self._marks = marks  # no step of these sizes ran, so kernels may be missing

    def calls(
        self, model: Any, cache: CacheTensors, num_tokens: int, num_reqs: int, rest: dict[str, Any]
    ) -> dict[str, tuple[Any, ...]]:
        """Return the function, arguments and keyword arguments of the first call of each part of a
        step with symbolic sizes. The tensors that the step computes are fake."""
        return self._run(model, cache, num_tokens, num_reqs, rest, unknown_sizes())

    def _run(
        self,
        model: Any,
        cache: CacheTensors,
        num_tokens: int,
        num_reqs: int,
        rest: dict[str, Any],
        kernels: AbstractContextManager[None],
    ) -> dict[str, tuple[Any, ...]]:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), kernels:
            batch = padding(num_tokens, num_reqs, cache.device)
            once = OncePerName()
            self._parts(model, batch, cache, run=once, **rest)
            self.num_parts = len(once.calls)
        return once.calls


def structure_of(cache: CacheTensors) -> Any:
    """Return the properties of a cache's tensors that checks and traces read, except for the
    numbers of rows, blocks and positions."""
    tables = pytree.tree_leaves(cache.tables)
    lengths = [cache.seq_lens, cache.written]
    rows = [each.shape[0] == cache.num_rows for each in (*tables, *lengths)]
    others = pytree.tree_leaves((cache.rope, cache.layers, cache.draft))
    inner = [(each.shape[1:], each.stride()) for each in others]
    every = (*tables, *lengths, *others, cache.dropped)
    kinds = [(each.dtype, each.device, each.dim(), each.is_inference()) for each in every]
    return (
        tuple(rows),
        tuple((each.stride(-1), each.is_contiguous()) for each in tables),
        tuple(inner),
        tuple(kinds),
        _shared_memory(every),
    )


def _shared_memory(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return which tensors are the same object, and which are views of one storage."""
    first: dict[int, int] = {}
    of_storage: dict[int, set[int]] = {}
    for number, each in enumerate(tensors):
        same = first.setdefault(id(each), number)
        of_storage.setdefault(each.untyped_storage()._cdata, set()).add(same)
    views = [sorted(numbers) for numbers in of_storage.values() if len(numbers) > 1]
    parts = [
        [(n, tensors[n].storage_offset(), tensors[n].shape, tensors[n].stride()) for n in numbers]
        for numbers in views
    ]
    return tuple(first[id(each)] for each in tensors), repr(parts)


def calls_users(model: Any) -> bool:
    """Whether a step calls a user's hooks or forwards, which may fail with fake tensors."""
    return has_global_hooks() or any(
        module._forward_hooks or module._forward_pre_hooks or own_forward(module) is not None
        for module in model.modules()
    )


def _class(size: int) -> tuple[bool, bool, int, int]:
    """Return the size class of a number: four classes for each power of two. Steps of one class
    have the same kernels, with few exceptions: launchers choose tiles at a few sizes, and Triton
    compiles some kernels again for 1 and for multiples of 16."""
    bits = (size - 1).bit_length()
    return size == 1, size % 16 == 0, bits, (size - 1) >> max(bits - 3, 0)


def padding(num_tokens: int, num_reqs: int, device: torch.device) -> StepBatch:
    """Return a batch of padding requests."""
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    starts, lens = (
        torch.zeros(num_reqs + more, dtype=torch.int32, device=device) for more in (1, 0)
    )
    return StepBatch(tokens, starts, lens, lens - 1)


class OncePerName:
    """A ``Runner`` that runs a part once per name and shapes. Later parts of the same name and
    shapes get the same result.

    Attributes:
        calls: Function, arguments and keyword arguments of the first call of each part.
    """

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        key = name, *(each.shape for each in args if isinstance(each, Tensor))
        if key not in self.results:
            self.calls.setdefault(name, (function, args, rest))
            self.results[key] = function(*args, **rest)
        return self.results[key]

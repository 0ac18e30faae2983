"""The steps of continuous batching, from CUDA graphs, which hide the host time of launches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.integrations.transformers.batching.cache import BatchCache
from dsv4_ops.integrations.transformers.generation import kept
from dsv4_ops.integrations.transformers.generation.decoding import compiled_step
from dsv4_ops.integrations.transformers.generation.kept import KeptStep, KeptSteps
from dsv4_ops.integrations.transformers.generation.prefill import bucket
from dsv4_ops.integrations.transformers.steps.compiled import CompiledStep
from dsv4_ops.integrations.transformers.steps.dry_runs import DryRuns, padding
from dsv4_ops.integrations.transformers.steps.eager import EagerStep
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step
from dsv4_ops.integrations.transformers.tensors import StepBatch

_log = logging.getLogger(__name__)

MOST_GRAPHS = 32
"""Maximum number of graphs of a manager. A graph serves up to a power of two of decodes, or a
prefill of up to a ``bucket`` of tokens."""


class BatchSteps:
    """The steps of a manager.

    On a GPU, a step is padded to a size that can have a CUDA graph. The third call with this size
    captures the graph, as in ``generate``. A step runs without a graph if it has more than
    ``kept.MOST_TOKENS`` tokens, if the model calls hooks or forwards of a user, or after a capture
    failed. Users may change the model while no request runs.

    Args:
        model: The patched model.
        cache: The cache of all requests.
        compile_config: The ``CompileConfig`` of the steps, or None.
        captures: Whether CUDA graphs may capture the steps.
    """

    def __init__(self, model: Any, cache: BatchCache, compile_config: Any, captures: bool) -> None:
        def of(step: Any) -> CompiledStep | EagerStep:
            if compile_config is None:
                return EagerStep(model, step)
            return compiled_step(model, step, compile_config)

        self._model, self._cache, self._paged = model, cache, cache.paged
        self._decode, self._prefill = of(decode_step), of(prefill_step)
        eager = [each for each in (self._decode, self._prefill) if isinstance(each, EagerStep)]
        self._watches = eager or [EagerStep(model, decode_step)]
        self._dry_runs: dict[Any, DryRuns] = {each: DryRuns(each.step) for each in eager}
        self._kept = KeptSteps(self._paged, MOST_GRAPHS, any_rows=True)
        self._fit, self._are_valid = captures, False

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs may capture steps."""
        return self._fit

    def capture(self, max_batch_tokens: int, on_progress: Callable[[str], None]) -> None:
        """Capture steps of all sizes up to ``max_batch_tokens``. Call this while no request
        runs."""
        rows, tokens = self._paged.max_batch_size, min(max_batch_tokens, kept.MOST_TOKENS)
        decodes = {self._rows(count) for count in range(1, rows + 1)}
        prefills = {bucket(count) for count in range(2, tokens + 1)}
        # the largest first, because later graphs reuse its memory
        for sizes, what in ((prefills, "a prefill of up to {} tokens"), (decodes, "{} decodes")):
            for size in sorted(sizes, reverse=True):
                on_progress("capturing " + what.format(size))
                requests = size if sizes is decodes else rows
                for _ in range(kept.WARM_CALLS + 1):
                    batch = padding(size, requests, self._paged.device)
                    self(batch, decodes=sizes is decodes)
                if not self._fit:
                    on_progress("steps run without CUDA graphs, because a capture failed")
                    return
        if self._paged.device.type == "cuda":  # requests run on another stream
            torch.cuda.synchronize(self._paged.device)

    def __call__(self, batch: StepBatch, decodes: bool) -> Tensor:
        """Run a step; return the logits of each request's last token. The next step overwrites
        these logits. With ``decodes`` every request has one token."""
        if self._cache.was_empty:
            self._cache.was_empty = False
            self._begin()
        num_tokens, step = len(batch.tokens), self._decode if decodes else self._prefill
        if self._fit and self._are_valid and num_tokens <= kept.MOST_TOKENS:
            found = self._step(step, len(batch.rows), None if decodes else bucket(num_tokens))
            try:
                logits = found(batch, self._paged.tensors)
            except kept.NoGraph as error:
                _log.warning("steps run without CUDA graphs: %s", error)
                del found
                self._drop_graphs()
            except torch.OutOfMemoryError:
                del found
                self._drop_graphs()
                raise
            else:
                if step in self._dry_runs:
                    self._dry_runs[step].ran()
                return logits
        options = {"state_rings": False} if decodes else {}
        return step(batch, self._paged.tensors, **options)

    def _drop_graphs(self) -> None:
        self._fit = False
        self._kept.clear()

    def _begin(self) -> None:
        """Prepare for the next requests, and for changes of the model."""
        if self._fit:
            valid = [each.can_be_captured() for each in self._watches]
            self._are_valid = all(valid)
        self._kept.begin()

    def _step(
        self, step: CompiledStep | EagerStep, num_reqs: int, num_tokens: int | None
    ) -> KeptStep:
        """Return the step of at least these sizes; ``num_tokens`` is None for a decode."""
        rows = self._paged.max_batch_size if num_tokens is not None else self._rows(num_reqs)
        self._request_kernels(step, num_tokens or rows, rows)
        return self._kept.of(step, rows, num_tokens)

    def _rows(self, num_reqs: int) -> int:
        """Round up to a power of two, so that a server captures few sizes before it listens."""
        return min(1 << (num_reqs - 1).bit_length(), self._paged.max_batch_size)

    def _request_kernels(
        self, step: CompiledStep | EagerStep, num_tokens: int, num_reqs: int
    ) -> None:
        """Let workers compile the kernels of an eager step, once per class of sizes; a compiled
        step does this itself."""
        dry_runs, tensors = self._dry_runs.get(step), self._paged.tensors
        if dry_runs is not None:
            rest = {"state_rings": False} if step is self._decode else {}
            dry_runs.request_kernels(self._model, tensors, num_tokens, num_reqs, rest)
            dry_runs.request_others(self._model, tensors, rest)

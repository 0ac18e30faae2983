"""The steps of continuous batching, from CUDA graphs, which hide the host time of launches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsv4_ops.integrations.transformers.batching.cache import BatchCache
from dsv4_ops.integrations.transformers.generation import kept
from dsv4_ops.integrations.transformers.generation.decoding import compiled_step
from dsv4_ops.integrations.transformers.generation.kept import KeptStep
from dsv4_ops.integrations.transformers.generation.prefill import bucket
from dsv4_ops.integrations.transformers.steps.compiled import CompiledStep
from dsv4_ops.integrations.transformers.steps.dry_runs import DryRuns
from dsv4_ops.integrations.transformers.steps.eager import EagerStep
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step
from dsv4_ops.integrations.transformers.tensors import StepBatch

MOST_GRAPHS = 32
"""Maximum number of graphs of a manager. A graph is for up to a power of two of decodes, or for a
``bucket`` of tokens."""


class BatchSteps:
    """The steps of a manager.

    On a GPU, a step is padded to a size for which there can be a CUDA graph, and the third call of
    a size captures the step, as in ``generate``. A step runs without a graph if it has more than
    ``kept.MOST_TOKENS`` tokens, if the model calls hooks or forwards of a user, or if graphs do not
    fit into memory. Users may change the model while no request runs.

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
        self._steps: dict[Any, KeptStep] = {}
        self._pools: dict[bool, Any] = {}
        self._fit, self._are_valid = captures, False

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs may capture steps."""
        return self._fit

    def sizes(self, max_batch_tokens: int) -> tuple[list[int], list[int]]:
        """Return the maximum numbers of decodes, and of prefill tokens, of the graphs."""
        rows, tokens = self._paged.max_batch_size, min(max_batch_tokens, kept.MOST_TOKENS)
        decodes = {self._rows(count) for count in range(1, rows + 1)}
        return sorted(decodes), sorted({bucket(count) for count in range(1, tokens + 1)})

    def __call__(self, batch: StepBatch, decodes: bool) -> Tensor:
        """Run a step; return the logits of each request's last token. The next step overwrites
        these logits."""
        if self._cache.was_empty:
            self._cache.was_empty = False
            self._begin()
        tensors, step = self._paged.tensors, self._decode if decodes else self._prefill
        num_tokens = len(batch.tokens)
        if self._fit and self._are_valid and num_tokens <= kept.MOST_TOKENS:
            found = self._step(step, len(batch.rows), None if decodes else bucket(num_tokens))
            try:
                return found(batch, tensors)
            except kept.NoGraphMemory:
                self._fit = False
                del found
                self._steps.clear()
                self._pools.clear()
        return step(batch, tensors, **({"state_rings": False} if decodes else {}))

    def _begin(self) -> None:
        """Prepare for other requests, and perhaps a changed model."""
        if self._fit:
            valid = [each.can_be_captured() for each in self._watches]
            self._are_valid = all(valid)
        for each in self._steps.values():
            each.begin()

    def _step(
        self, step: CompiledStep | EagerStep, num_reqs: int, num_tokens: int | None
    ) -> KeptStep:
        """Return the step of at least these sizes; ``num_tokens`` is None for a decode."""
        decodes = num_tokens is None
        rows = self._rows(num_reqs) if decodes else self._paged.max_batch_size
        key = rows, num_tokens
        found = self._steps.pop(key, None)
        if found is None:
            if decodes not in self._pools:  # graphs share a pool, as only one graph runs at a time
                self._pools[decodes] = kept.pool_of(self._paged.device)
            pool, tensors = self._pools[decodes], self._paged.tensors
            found = KeptStep(step, tensors, rows, num_tokens, pool, any_rows=True)
            self._request_kernels(step, num_tokens or rows, rows)
        self._steps[key] = found
        if len(self._steps) > MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]
        return found

    def _rows(self, num_reqs: int) -> int:
        return min(1 << (num_reqs - 1).bit_length(), self._paged.max_batch_size)

    def _request_kernels(
        self, step: CompiledStep | EagerStep, num_tokens: int, num_reqs: int
    ) -> None:
        """Let workers compile the kernels of an eager step; a compiled step does this itself."""
        dry_runs, tensors = self._dry_runs.get(step), self._paged.tensors
        if dry_runs is not None:
            rest = {"state_rings": False} if step is self._decode else {}
            dry_runs.request_kernels(self._model, tensors, num_tokens, num_reqs, rest)
            dry_runs.request_others(self._model, tensors, rest)

"""An eager step that CUDA graphs can capture. Prefills use this step, because a prefill takes too
long to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsv4_ops.core.torch_compat import has_function_modes
from dsv4_ops.integrations.transformers.compile_cache.precompiled import (
    Undescribed,
    Watch,
    described,
    state,
)
from dsv4_ops.integrations.transformers.modules.replacement import has_global_hooks, local
from dsv4_ops.integrations.transformers.steps.dry_runs import calls_users
from dsv4_ops.integrations.transformers.steps.step import checked, spec_of
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch


class EagerStep:
    """A step of a patched model that is not compiled.

    Args:
        model: The model.
        step: ``decode_step`` or ``prefill_step``.
    """

    def __init__(self, model: Any, step: Callable[..., Tensor]) -> None:
        self.model, self.step = model, step
        self._watch: Watch | None = None
        self._tensors: list[Tensor] = []
        self._checked: Any = None

    def __call__(self, batch: StepBatch, cache: CacheTensors, **rest: Any) -> Tensor:
        """Run the step."""
        return self.step(self.model, batch, cache, **rest)

    def can_be_captured(self) -> bool:
        """Whether a CUDA graph may capture the step.

        The step may not call hooks or forwards of a user, because a replay would not call them. A
        later call must be able to tell whether the modules have changed.
        """
        if has_global_hooks() or has_function_modes():
            return False
        if self._watch is None or not self._watch.unchanged():
            self._watch = self._watched()
        return self._watch is not None

    def form(self, batch: StepBatch, cache: CacheTensors, **_: Any) -> Any:
        """Return what a CUDA graph of this step depends on, as ``CompiledStep.form`` does, or None.

        Call ``can_be_captured`` first.
        """
        op, model = self.step.__name__, self.model
        spec, found = spec_of(op, model), (self._watch, self._addresses())
        if found == self._checked:
            spec.refresh(op, model.model, copies_only=True)
        else:
            checked(op, model, batch, cache)  # may replace buffers of the model
            if not self.can_be_captured():
                return None
            found = self._checked = self._watch, self._addresses()
        return state(cache.device), spec, found

    def _addresses(self) -> list[int]:
        return [local(each).data_ptr() for each in self._tensors]

    def _watched(self) -> Watch | None:
        """Watch everything that the step reads of the model. Return None if no graph may capture
        the step."""
        watch = Watch()
        watch.add(self.model._modules)
        try:
            described([self.model.model, self.model.lm_head], watch)
        except Undescribed:
            return None
        self._tensors = [*self.model.parameters(), *self.model.buffers()]
        return None if calls_users(self.model) else watch

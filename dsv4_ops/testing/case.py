"""Test cases of an op, and the comparison of its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.testing.strategies.draw import Draw, strategy_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Case:
    """One call of an op, with its hand-computed result if there is one.

    ``tensors`` are all positional arguments; optional ones may be None. Arguments that the op
    writes to count as results.
    """

    name: str
    tensors: tuple[Tensor | None, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    expected: tuple[Any, ...] | None = None

    def on(self, device: str | torch.device) -> Case:
        """Return the same call with its tensors on ``device``."""
        moved = tuple(None if tensor is None else tensor.to(device) for tensor in self.tensors)
        return Case(self.name, moved, self.settings, self.expected)

    def copy(self, layout: Callable[[Tensor], Tensor] = torch.clone) -> Case:
        """Return the same call with a copy of each tensor, made by ``layout``."""
        copies = tuple(None if tensor is None else layout(tensor) for tensor in self.tensors)
        return Case(self.name, copies, self.settings, self.expected)

    def run(self, op: Callable[..., Any], mutated: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Call ``op`` with clones of the tensors; return its results, then the mutated
        arguments."""
        tensors = self.copy().tensors
        result = op(*tensors, **self.settings)
        return results(result, *(tensors[index] for index in mutated))


Make = Callable[[Draw, dict[str, Any], int], Case]
"""The function that samples a call: ``OpTesting.make``."""


def tensor_names(reference: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of an op's tensor arguments, in order: those before its settings."""
    parameters = inspect.signature(reference).parameters.values()
    return tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)


class Exact(NamedTuple):
    """A float64 result, and the scale of its rounding errors.

    Args:
        value: The result, float64.
        magnitude: Scale of the rounded intermediates, float64, broadcastable to ``value``: the sum
            of absolute terms of a sum, the norm of a rotated pair, the amax of a normalised row.
        unit: Relative error of one rounding; None for that of the result's dtype.
    """

    value: Tensor
    magnitude: Tensor
    unit: float | None = None


@dataclass(frozen=True)
class OpTesting:
    """The cases, configurations and sampler of an op's tests.

    Args:
        cases: Named cases; at least one with a hand-computed result.
        settings: Configurations (keyword arguments) worth testing; the first one is compiled.
        make: (draw, settings, min_size) -> Case: one sampled call for a configuration. ``draw`` is
            a ``Draw``, hypothesis' ``draw`` with short forms of common draws. ``min_size`` 2 avoids
            sizes that torch.compile specialises on.
        precise: (*tensors, **settings) -> for each result, then each mutated argument, its float64
            value, or None if every implementation must match the reference bit for bit. Errors
            may be 1.5 times those of the reference or of one rounding. None: all results are exact.
        decode: (case, outcome) -> the outcome as tensors that ``precise`` describes, for bytes
            that encode floats, such as the codes of a quantised row.
        determined: Whether a call has a unique outcome, for ops whose reads and writes may overlap;
            by default every call has one. Sampled calls must have a unique outcome.
    """

    cases: Callable[[], list[Case]]
    settings: tuple[dict[str, Any], ...]
    make: Make
    precise: Callable[..., tuple[Exact | None, ...]] | None = None
    decode: Callable[[Case, Sequence[Tensor]], Sequence[Tensor]] = lambda case, outcome: outcome
    determined: Callable[[Case], bool] = lambda case: True

    def strategy(
        self, *, settings: dict[str, Any] | None = None, min_size: int = 0
    ) -> SearchStrategy[Case]:
        """Return a strategy of calls over batch structure, for one configuration or all of them."""

        def call(draw: Draw) -> Case:
            chosen = settings if settings is not None else draw.one_of(*self.settings)
            return self.make(draw, chosen, min_size)

        return strategy_of(call)


def results(result: Any, *written: Tensor | None) -> tuple[Tensor, ...]:
    """Return the results of a call as a tuple, followed by its mutated arguments."""
    returned = () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)
    return (*returned, *(tensor for tensor in written if tensor is not None))


def i32(values: Any) -> Tensor:
    """Make an int32 tensor from a list."""
    return torch.tensor(values, dtype=torch.int32)


def i64(values: Any) -> Tensor:
    """Make an int64 tensor from a list."""
    return torch.tensor(values, dtype=torch.int64)

"""Test cases of an op, and the data that its tests need."""

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

    ``tensors`` has all positional arguments; an optional argument may be None. An argument that the
    op mutates counts as a result.
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
"""Type of ``OpTesting.make``, a function that samples a call."""


def tensor_names(reference: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of an op's tensor arguments in order: its positional arguments."""
    parameters = inspect.signature(reference).parameters.values()
    return tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)


class Exact(NamedTuple):
    """A float64 result, and the scale of its rounding errors.

    Args:
        value: The result, float64.
        magnitude: Scale of the rounded intermediates, float64, broadcastable to ``value``: for a
            sum, the sum of the terms' absolute values; for a rotated pair, its norm; for a
            normalised row, its amax.
        unit: Relative error of one rounding; None for the rounding error of the result's dtype.
    """

    value: Tensor
    magnitude: Tensor
    unit: float | None = None


@dataclass(frozen=True)
class OpTesting:
    """The cases, configurations and sampler of an op's tests.

    Args:
        cases: Named cases; at least one with a hand-computed result.
        settings: Configurations (keyword arguments) to test. Tests compile the first configuration.
        make: Function (draw, settings, min_size) -> Case, which samples a call for a configuration.
            ``draw`` is a ``Draw``. No size is below ``min_size``; with a ``min_size`` of 2 or more,
            torch.compile specialises no size.
        precise: Function (*tensors, **settings) -> tuple, which has an ``Exact`` for each result
            and then for each mutated argument. An entry is None if every implementation must match
            the reference bit for bit. The error of a result may be 1.5 times the larger of one
            rounding and the reference's error in the same row. If ``precise`` is None, all results
            must match bit for bit.
        decode: Function (case, outcome) -> tensors, which decodes results whose bytes encode
            floats, such as quantised rows, so that ``precise`` can describe them.
        determined: Function that says whether a call has a unique outcome, for ops whose reads and
            writes may overlap; by default, every call has a unique outcome. Sampled calls must have
            a unique outcome.
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
        """Return a strategy that samples calls, of one configuration or of all configurations."""

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

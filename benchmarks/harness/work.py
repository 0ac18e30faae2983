"""A benchmark's case as calls over rotating inputs, and the comparison of the calls' results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.timing import Call
from benchmarks.run import WrongResult

Args = tuple[Any, ...]
Difference = Callable[[Args, Sequence[Tensor], Sequence[Tensor]], "str | None"]
"""A function (input set, results of a call, expected results) -> difference in words, or None."""

_POISON = 0x5A


def same_bytes(_: Args, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """The ``Difference`` for results that must be equal."""
    wrong = differing_bytes(actual, expected)
    total = sum(tensor.nbytes for tensor in expected)
    return f"{wrong} of {total} bytes differ from the reference" if wrong else None


@dataclass(frozen=True)
class Work:
    """The inputs and calls of a case, on one device."""

    call: Callable[..., Any]  # the op on an input set; on a CPU, the op is the reference
    sets: Sequence[Args]  # input sets of equal shapes; calls rotate through them
    moved_bytes: int  # bytes that a call must read and write
    written: tuple[int, ...] = ()  # places of mutated arguments; empty if a call returns results
    baseline: Callable[[Any], Callable[..., Any]] | None = None  # makes the baseline from modules
    baseline_sets: Sequence[Args] = ()  # the baseline's arguments, if different from ``sets``
    baseline_note: str | None = None  # work that the baseline leaves out
    eager: bool = True  # whether the time without a compiler is meaningful
    flop: int = 0  # FLOP of a call's products
    reference: Callable[..., Any] | None = None  # gets copies of inputs; None: ``call`` on a CPU
    difference: Difference = same_bytes
    details: Any = None  # other properties of the case, for its benchmark

    def results(self, call: Callable[..., Any], args: Args) -> list[Tensor]:
        """Return the outcome of ``call``: its results, or the arguments that it mutates."""
        returned = call(*args)
        return [args[place] for place in self.written] or tensors(returned)

    def expected(self, place: int = 0) -> list[Tensor]:
        """Return the reference's outcome for an input set."""
        device = "cpu" if self.reference is None else None
        copies = tuple(
            arg.to(device or arg.device, copy=True) if isinstance(arg, Tensor) else arg
            for arg in self.sets[place]
        )
        return self.results(self.reference or self.call, copies)

    def of_baseline(self) -> Work:
        """Return the same case with the baseline's arguments."""
        return dataclasses.replace(self, sets=self.baseline_sets or self.sets)


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    case: str
    shape: str
    build: Callable[[torch.device], Work]  # samples the inputs of the case
    rows: int
    requests: int = 1
    variant: str = ""
    timed: bool = True  # False: the case is only checked
    labels: Mapping[str, Any] = field(default_factory=dict)  # more fields of the row

    def __str__(self) -> str:
        return ", ".join(part for part in (self.case, self.shape, self.variant) if part)


class Written:
    """The tensors that the calls of a case mutate, and their initial contents.

    An entry of ``groups`` is for one input set, or for all sets that mutate the same tensors.
    """

    def __init__(self, work: Work) -> None:
        chosen = [[args[place] for place in work.written] for args in work.sets]
        by_id = {tuple(id(tensor) for tensor in group): group for group in chosen if group}
        self.groups: list[list[Tensor]] = list(by_id.values())
        self._first = self.copies()

    def copies(self) -> list[list[Tensor]]:
        """Return copies of the tensors' present contents."""
        return [[tensor.clone() for tensor in group] for group in self.groups]

    def reset(self) -> None:
        """Restore the initial contents."""
        for group, contents in zip(self.groups, self._first, strict=True):
            for tensor, first in zip(group, contents, strict=True):
                tensor.copy_(first)


def tensors(returned: Any) -> list[Tensor]:
    """Return the tensors that an op returned."""
    if returned is None:
        return []
    return [returned] if isinstance(returned, Tensor) else list(returned)


def poison(results: Sequence[Tensor]) -> None:
    """Overwrite results, so that a comparison shows memory that the next call does not write."""
    for result in results:
        result.view(torch.uint8).fill_(_POISON)


def checked(work: Work, written: Written, call: Call) -> list[Tensor]:
    """Reset what ``call`` writes (or poison its results); return its outcome for the first set."""
    written.reset()
    if not work.written:
        # free the results at once, so that the next call gets the same memory
        poison(work.results(call, work.sets[0]))
    return work.results(call, work.sets[0])


def differing_bytes(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Count differing bytes; raise WrongResult if the count, shapes or dtypes of results differ."""
    kinds = [
        [(tensor.dtype, list(tensor.shape)) for tensor in result] for result in (actual, expected)
    ]
    if kinds[0] != kinds[1]:
        raise WrongResult(f"result is {kinds[0]}, the reference has {kinds[1]}")
    wrong = 0
    for got, want in zip(actual, expected, strict=True):
        ours = got.contiguous().view(torch.uint8)
        other = want.contiguous().view(torch.uint8).to(ours.device)
        if not torch.equal(ours, other):
            wrong += int((ours != other).sum())
    return wrong


def check(
    name: str,
    work: Work,
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    case: object,
    place: int = 0,
) -> None:
    """Raise WrongResult if an outcome differs from the reference's; then nothing is timed."""
    try:
        difference = work.difference(work.sets[place], actual, expected)
    except WrongResult as error:
        difference = str(error)
    if difference:
        raise WrongResult(f"{name} ({case}): {difference}. The case was not timed.")


def ours_on(tensor: Tensor) -> str:
    """Return the ``impl`` of our own kernels, which are timed even if libraries are loaded."""
    return "triton" if tensor.is_cuda else "auto"

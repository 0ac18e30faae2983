"""A case of a benchmark as calls over rotating inputs, and exact comparison of what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.bench import WrongResult
from dsv4_ops.bench.timing import Call

Args = tuple[Any, ...]

_POISON = 0x5A


@dataclass(frozen=True)
class Work:
    """Inputs of a case, on their device.

    Args:
        call: The op as a function of one input set, on any device; on a CPU it is the reference.
        sets: Input sets of equal shapes to rotate through.
        moved_bytes: Bytes that a call must read and write.
        written: Which argument a call writes to; None if it returns its results.
        anchor: vLLM's function of the same arguments, from its modules.
        eager: Whether the time without a compiler means something.
    """

    call: Callable[..., Any]
    sets: Sequence[Args]
    moved_bytes: int
    written: int | None = None
    anchor: Callable[[Any], Callable[..., Any]] | None = None
    eager: bool = True

    def results(self, call: Callable[..., Any], args: Args) -> list[Tensor]:
        """What ``call`` leaves: its results, or the argument that it writes to."""
        returned = call(*args)
        return tensors(returned) if self.written is None else [args[self.written]]

    def expected(self) -> list[Tensor]:
        """What the reference leaves for the first input set."""
        copies = tuple(
            arg.to("cpu", copy=True) if isinstance(arg, Tensor) else arg for arg in self.sets[0]
        )
        return self.results(self.call, copies)


@dataclass(frozen=True)
class Case:
    """One row to measure. ``build`` draws its inputs; a case that is not ``timed`` is only
    checked."""

    case: str
    shape: str
    build: Callable[[torch.device], Work]
    rows: int
    requests: int = 1
    variant: str = ""
    timed: bool = True
    plotted: bool = False

    def __str__(self) -> str:
        return ", ".join(part for part in (self.case, self.shape, self.variant) if part)


class Written:
    """The tensors that the calls of a case write to, and what they held at first."""

    def __init__(self, work: Work) -> None:
        place = work.written
        chosen = [] if place is None else [args[place] for args in work.sets]
        self.tensors: list[Tensor] = list({id(tensor): tensor for tensor in chosen}.values())
        self._first = [tensor.clone() for tensor in self.tensors]

    def reset(self) -> None:
        """Give them their first contents."""
        for tensor, first in zip(self.tensors, self._first, strict=True):
            tensor.copy_(first)


def tensors(returned: Any) -> list[Tensor]:
    """The tensors that an op returned."""
    if returned is None:
        return []
    return [returned] if isinstance(returned, Tensor) else list(returned)


def poison(results: Sequence[Tensor]) -> None:
    """Overwrite results, so that memory that the next call leaves unwritten shows."""
    for result in results:
        result.view(torch.uint8).fill_(_POISON)


def checked(work: Work, written: Written, call: Call) -> list[Tensor]:
    """What ``call`` leaves for the first input set, from the first contents or over poison."""
    written.reset()
    if work.written is None:
        poison(work.results(call, work.sets[0]))  # freed at once: the next call gets this memory
    return work.results(call, work.sets[0])


def differing_bytes(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """How many bytes of two lists of tensors differ.

    Raises:
        WrongResult: they differ in number, shape or dtype.
    """
    kinds = [
        [(tensor.dtype, list(tensor.shape)) for tensor in result] for result in (actual, expected)
    ]
    if kinds[0] != kinds[1]:
        raise WrongResult(f"result is {kinds[0]}, the reference has {kinds[1]}")
    wrong = 0
    for got, want in zip(actual, expected, strict=True):
        ours, theirs = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
        theirs = theirs.to(ours.device)
        if not torch.equal(ours, theirs):
            wrong += int((ours != theirs).sum())
    return wrong


def check(name: str, actual: Sequence[Tensor], expected: Sequence[Tensor], case: object) -> None:
    """Every byte equals the reference, or nothing is timed.

    Raises:
        WrongResult: one does not.
    """
    try:
        wrong = differing_bytes(actual, expected)
    except WrongResult as error:
        raise WrongResult(f"{name} ({case}): {error}. The case was not timed.") from None
    if wrong:
        total = sum(tensor.nbytes for tensor in expected)
        raise WrongResult(
            f"{name} ({case}): {wrong} of {total} bytes differ from the reference. "
            "The case was not timed."
        )

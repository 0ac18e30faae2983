"""Check ops whose tokens are independent: ours against float64, a baseline within a tolerance.

The check compares tokens in chunks, to bound memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.work import Args, Work, differing_bytes, tensors
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import assert_agrees

_KEYS = 2**17  # keys per chunk; a key has 512 values in float64


@dataclass(frozen=True)
class ByToken:
    """Checks the calls of one op."""

    op: str
    settings: dict[str, Any]
    places: tuple[int, ...]  # arguments with a row per token
    keys: Callable[[Args], int]  # number of keys that a token of an input set sees

    def work(
        self, call: Callable[..., Any], sets: Sequence[Args], cost: tuple[int, int], **more: Any
    ) -> Work:
        """Build a case with this check; ``cost`` is the bytes and FLOP of a call."""
        check: dict[str, Any] = {"reference": self.reference, "difference": self.differences}
        return Work(call, sets, cost[0], flop=cost[1], **check, **more)

    def reference(self, *args: Any) -> list[Tensor]:
        """Run the reference on a call, on the device of its tensors."""
        function = OPS[self.op].reference
        results = [tensors(function(*part, **self.settings)) for _, part in self._parts(args)]
        return [torch.cat(parts) for parts in zip(*results, strict=True)]

    def differences(
        self, args: Args, actual: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> str | None:
        """Describe results outside of the reference's error budget, or return None."""
        if not differing_bytes(actual, expected):
            return None
        op_testing = OPS[self.op].implementation("testing")
        for tokens, part in self._parts(args):
            pair = [[result[tokens] for result in results] for results in (actual, expected)]
            try:
                assert_agrees(self.op, op_testing, Case("bench", part, self.settings), *pair)
            except AssertionError as error:
                return f"tokens from {tokens.start}: {str(error).partition(chr(10))[0]}"
        return None

    def _parts(self, args: Args) -> Iterator[tuple[slice, Args]]:
        """Yield slices of tokens, and the arguments of the call for each slice."""
        step = max(1, _KEYS // max(self.keys(args), 1))
        for start in range(0, args[0].shape[0], step):
            tokens = slice(start, start + step)
            yield (
                tokens,
                tuple(
                    arg[tokens] if place in self.places and arg is not None else arg
                    for place, arg in enumerate(args)
                ),
            )


@dataclass(frozen=True)
class Tolerance:
    """Limits of a difference. Each element must be within the absolute or the relative limit.
    ``cosine`` limits 1 - 2 ab / (aa + bb), with products summed over all elements."""

    absolute: float
    relative: float
    cosine: float | None = None


def outside(name: str, baseline: Tensor, ours: Tensor, tolerance: Tolerance) -> str | None:
    """Describe the difference of two results if it exceeds ``tolerance``, else return None."""
    if baseline.shape != ours.shape:
        return f"{name} is {list(baseline.shape)}, not {list(ours.shape)}"
    left, right = baseline.double(), ours.double()
    error = (left - right).abs()
    fails = ~((error <= tolerance.absolute) | (error <= tolerance.relative * right.abs()))
    fails &= left != right  # equal infinities agree; NaN agrees with nothing
    if bool(fails.any()):
        worst = float(error[fails].nan_to_num(torch.inf).max())
        return f"{name}: {int(fails.sum())} of {fails.numel()} differ, by up to {worst:.2g}"
    if tolerance.cosine is not None and error.numel():
        both = (left * left + right * right).sum()
        cosine = float(1 - 2 * (left * right).sum() / both) if float(both) else 0.0
        if cosine > tolerance.cosine:
            return f"{name}: cosine difference {cosine:.2g}"
    return None

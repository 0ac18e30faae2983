"""Rows of products whose limit is the bytes of their weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from benchmarks.run import WrongResult

MOST_ERROR = 4e-3
"""Maximum error relative to the norm of the result: two roundings to bf16."""


@dataclass
class Row:
    """Times in microseconds, medians of replays of a CUDA graph over rotating inputs."""

    case: str
    tokens: int
    weight_bytes: float = 0.0  # that a call reads, scales included
    us: float | None = None  # our op, with ``impl="auto"``
    impl: str = ""  # what "auto" selects
    pct_of_copy: float | None = None  # weight_bytes over us, relative to the rate of copies
    baseline_us: float | None = None  # torch with bf16 weights: ``F.linear``, or grouped products
    scaled_mm_us: float | None = None  # torch's product of FP8 activations, with their quantisation
    humming_us: float | None = None  # Humming's experts (``baselines/humming.py``)
    humming_error: float | None = None  # relative to the reference
    relative_error: float | None = None  # relative to float32
    error: str | None = None

    def compare(self, bytes_per_us: float) -> None:
        """Compare the time with a copy's."""
        assert self.us is not None
        self.pct_of_copy = 100 * self.weight_bytes / self.us / bytes_per_us

    def check(self, found: Tensor, expected: Tensor) -> None:
        self.relative_error = relative_error(found, expected)
        if not self.relative_error < MOST_ERROR:
            raise WrongResult(f"error {self.relative_error:.2g}")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the error, relative to that of the expected result."""
    difference = found.float() - expected.float()
    return float(difference.norm() / expected.float().norm())

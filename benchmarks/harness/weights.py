"""Rows of GEMMs whose roofline is the bytes of their weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from benchmarks.run import WrongResult

MOST_ERROR = 4e-3
"""Maximum error relative to the norm of the result, for two roundings to bf16."""


@dataclass
class Row:
    """Times in microseconds: medians of CUDA graph replays over rotating inputs."""

    case: str
    tokens: int
    weight_bytes: float = 0.0  # bytes of weights and scales that a call reads
    us: float | None = None  # our op, with ``impl="auto"``
    impl: str = ""  # what "auto" selects
    pct_of_copy: float | None = None  # rate of weight_bytes, in percent of a copy's rate
    baseline_us: float | None = None  # torch with bf16 weights: ``F.linear`` or grouped GEMMs
    scaled_mm_us: float | None = None  # torch's FP8 GEMM, with quantisation of the activations
    humming_us: float | None = None  # Humming's experts (``baselines/humming.py``)
    humming_error: float | None = None  # relative to the reference
    relative_error: float | None = None  # relative to float32
    error: str | None = None

    def compare(self, bytes_per_us: float) -> None:
        """Set ``pct_of_copy`` from the rate of a copy."""
        assert self.us is not None
        self.pct_of_copy = 100 * self.weight_bytes / self.us / bytes_per_us

    def check(self, found: Tensor, expected: Tensor) -> None:
        self.relative_error = relative_error(found, expected)
        if not self.relative_error < MOST_ERROR:
            raise WrongResult(f"error {self.relative_error:.2g}")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the error, relative to the norm of the expected result."""
    difference = found.float() - expected.float()
    return float(difference.norm() / expected.float().norm())

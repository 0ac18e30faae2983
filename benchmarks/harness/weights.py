"""Rows and the run of benchmarks of products whose limit is the bytes of their weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness.memory import ColdCache, Copies
from benchmarks.harness.options import chosen_device
from benchmarks.harness.report import Report, one_line
from benchmarks.harness.timing import Call, Capture, alternating_us
from benchmarks.run import BenchError

MOST_ERROR = 4e-3
"""Maximum error relative to the norm of the result: two roundings to bf16."""


@dataclass
class Row:
    """Times in microseconds, medians of replays of a CUDA graph over rotating inputs.

    Args:
        case, tokens: The product.
        weight_bytes: Bytes of the weights that a call reads, with their scales.
        us: Our op, with ``impl="auto"``.
        impl: The implementation that "auto" selects.
        pct_of_copy: ``weight_bytes`` over ``us``, in percent of the rate of this GPU's copies.
        baseline_us: torch with bf16 weights: ``F.linear``, or grouped products.
        scaled_mm_us: torch's block-scaled product of FP8 activations, with their quantisation.
        humming_us: Humming's experts (``baselines/humming.py``).
        humming_error: Error of Humming's experts relative to the reference.
        error: Error relative to float32.
        failed: The error, if the case failed.
    """

    case: str
    tokens: int
    weight_bytes: float = 0.0
    us: float | None = None
    impl: str = ""
    pct_of_copy: float | None = None
    baseline_us: float | None = None
    scaled_mm_us: float | None = None
    humming_us: float | None = None
    humming_error: float | None = None
    error: float | None = None
    failed: str | None = None


def time_forms(row: Row, forms: Mapping[str, Sequence[Call]]) -> None:
    """Fill in fields of a row: time per call of each form in a CUDA graph, with samples in turn."""
    timings = alternating_us([Capture(calls) for calls in forms.values()])
    for field, timing in zip(forms, timings, strict=True):
        setattr(row, field, timing.median)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the error, relative to that of the expected result."""
    difference = found.float() - expected.float()
    return float(difference.norm() / expected.float().norm())


def run(
    options: argparse.Namespace, cases: Iterable[tuple[Row, Callable[[Row, torch.device], None]]]
) -> None:
    """Fill in every row and write the rows and their table to ``options.out``."""
    device = chosen_device(options)
    if device.type != "cuda":
        raise BenchError(f"{options.bench}: it times kernels, which run on CUDA only")
    copies = Copies(device, ColdCache(device)).bytes_per_us
    output = Report(options, device, copy_tbs=copies / 1e6)
    failed = []
    for row, measure in cases:
        try:
            measure(row, device)
            if row.us is not None:
                row.pct_of_copy = 100 * row.weight_bytes / row.us / copies
            if row.error is not None and not row.error < MOST_ERROR:
                row.failed = f"error {row.error:.2g}"
        except Exception as error:
            row.failed = one_line(error)
        output.add(row)
        failed += [row.failed] if row.failed else []
    output.finish(f"{options.bench}, microseconds")
    if failed:
        raise BenchError(f"{len(failed)} cases failed, {failed[0]}")

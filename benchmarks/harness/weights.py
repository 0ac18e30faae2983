"""Rows and the run of benchmarks of products that are bound by the bytes of their weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import report
from benchmarks.harness.memory import ColdCache, Copies
from benchmarks.harness.options import chosen_device
from benchmarks.harness.report import Report
from benchmarks.harness.timing import Call, Capture, alternating_us
from benchmarks.run import BenchError

MOST_ERROR = 4e-3
"""Largest error over the size of the result: two roundings to bf16."""


@dataclass
class Row:
    """Times in microseconds, medians of replays of a CUDA graph over rotating inputs.

    Args:
        case, tokens: What was multiplied.
        weight_bytes: Bytes of the weights that a call reads, with their scales.
        us: Ours, with ``impl="auto"``.
        impl: What that took.
        tbs: ``weight_bytes`` over ``us``, TB/s.
        pct_of_copy: Of the rate of this GPU's copies.
        baseline_us: The same of torch with bf16 weights: ``F.linear``, or grouped products.
        ratio: Of it to ours.
        scaled_mm_us: torch's block-wise product of FP8 activations, their quantisation included.
        humming_us: Of Humming's experts (``baselines/humming.py``).
        humming_ratio: Of it to ours.
        humming_error: Of it, against the reference.
        error: Relative, against float32.
        failed: What went wrong.
    """

    case: str
    tokens: int
    weight_bytes: float = 0.0
    us: float | None = None
    impl: str = ""
    tbs: float | None = None
    pct_of_copy: float | None = None
    baseline_us: float | None = None
    ratio: float | None = None
    scaled_mm_us: float | None = None
    humming_us: float | None = None
    humming_ratio: float | None = None
    humming_error: float | None = None
    error: float | None = None
    failed: str | None = None

    def finish(self, bytes_per_us: float) -> None:
        """Fill in what follows from the times."""
        if self.us is None:
            return
        self.tbs = self.weight_bytes / self.us / 1e6
        self.pct_of_copy = 100 * self.weight_bytes / self.us / bytes_per_us
        if self.baseline_us is not None:
            self.ratio = self.baseline_us / self.us
        if self.humming_us is not None:
            self.humming_ratio = self.humming_us / self.us


_COLUMNS = (
    *("case", "tokens", "us", "tbs", "pct_of_copy", "baseline_us", "ratio", "scaled_mm_us"),
    *("humming_us", "humming_ratio", "humming_error", "error", "impl", "failed"),
)


def time_forms(row: Row, forms: Mapping[str, Sequence[Call]]) -> None:
    """Fill in fields of a row: per call, those of a form in one CUDA graph, samples in turn."""
    timings = alternating_us([Capture(calls) for calls in forms.values()])
    for field, timing in zip(forms, timings, strict=True):
        setattr(row, field, timing.median)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a result, over the size of what it should be."""
    difference = found.float() - expected.float()
    return float(difference.norm() / expected.float().norm())


def run(
    name: str,
    options: argparse.Namespace,
    cases: Iterable[tuple[Row, Callable[[Row, torch.device], None]]],
) -> None:
    """Fill in every row and write the rows and their table to ``options.out``."""
    device = chosen_device(options)
    if device.type != "cuda":
        raise BenchError(f"{name}: it times kernels, which run on CUDA only")
    copies = Copies(device, ColdCache(device)).bytes_per_us
    stamp: dict[str, Any] = report.stamp(device, options.command)
    output: Report[Row] = Report(options.out, name, {**stamp, "copy_tbs": copies / 1e6})
    for row, measure in cases:
        try:
            measure(row, device)
            row.finish(copies)
            if row.error is not None and not row.error < MOST_ERROR:
                row.failed = f"error {row.error:.2g}"
        except Exception as error:
            row.failed = report.one_line(error)
        output.add(row)
    table = report.table(output.rows, _COLUMNS)
    output.write_text(report.text(f"{name}, microseconds", output, table))
    failed = [row for row in output.rows if row.failed]
    if failed:
        raise BenchError(f"{len(failed)} cases failed, {failed[0].failed}")

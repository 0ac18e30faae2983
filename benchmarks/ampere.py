"""Compare the times of A100 code and of Hopper code on a Hopper card.

The times show the cost of sm_80's instructions, not the speed of an A100.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from benchmarks import mla
from benchmarks.cases.attention_cases import decode_cases, paged_cases
from benchmarks.cases.cache_cases import insert_cases
from benchmarks.cases.indexer_cases import indexer_cases
from benchmarks.harness.ampere import as_an_a100
from benchmarks.harness.batches import captured_calls
from benchmarks.harness.memory import ColdCache
from benchmarks.harness.options import chosen_device
from benchmarks.harness.report import Report, progress
from benchmarks.harness.timing import Call, Capture
from benchmarks.harness.work import Case, Written, check, checked
from benchmarks.run import BenchError
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.kernels.launch_plans import PLANS

MOST = 2.0
"""Maximum time of sm_80 code, relative to Triton's code for the card."""

_BATCHES, _HEADS, _CONTEXT = (1, 8, 64), 64, 32768


@dataclass
class Row:
    """Device time per call, in microseconds."""

    case: str
    rows: int
    hopper_us: float | None = None  # our code for the card, with Gluon kernels
    triton_us: float | None = None  # Triton's code for the card, without Gluon kernels
    sm_80_us: float | None = None  # Triton's code for an A100
    times_triton: float | None = None  # sm_80_us over triton_us
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.case}, rows {self.rows}"


@contextlib.contextmanager
def without_gluon(folder: Path) -> Iterator[None]:
    """Disable our Gluon kernels for Hopper, so that Triton's kernels run."""
    PLANS.plans.clear()
    with mock.patch.object(support, "runs", return_value=False):
        yield
    PLANS.plans.clear()


CODES: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "hopper_us": lambda folder: contextlib.nullcontext(),
    "triton_us": without_gluon,
    "sm_80_us": as_an_a100,
}

Calls = Callable[[], Sequence[Call]]
"""A function that checks a case and returns the calls to time."""


def _case_calls(case: Case, device: torch.device) -> Calls:
    work = case.build(device)
    written, expected = Written(work), work.expected()

    def calls() -> Sequence[Call]:
        check("eager", work, checked(work, written, work.call), expected, case)
        return [functools.partial(work.call, *args) for args in work.sets]

    return calls


def _dense_calls(layout: str, batch: int, device: torch.device) -> Calls:
    row = mla.Row(layout, 16, batch, 4096)
    blocks = batch * (row.context // mla.BLOCK)
    inputs = mla.Inputs(row, mla.pool_of(layout, blocks, device), device)
    expected = inputs.ours()[0]().out.float()

    def calls() -> Sequence[Call]:
        found = inputs.ours()
        difference = float((found[0]().out.float() - expected).abs().max())
        if difference > 1e-2:
            raise BenchError(f"{layout}: the output differs by {difference:.2g}")
        return found

    return calls


def cases_of(device: torch.device, *, smoke: bool = False) -> list[tuple[Row, Callable[[], Calls]]]:
    """Return rows, each with a function that makes the row's calls."""
    made = [
        *insert_cases(_BATCHES, smoke=smoke),
        *decode_cases(_BATCHES, (_HEADS,), (512,)),
        *paged_cases(_BATCHES, _HEADS, 1024, (1024,)),
        *(
            each
            for group in ("logits", "select")
            for each in indexer_cases(group, _BATCHES, (_CONTEXT,), smoke=smoke)
        ),
    ]
    cases: list[tuple[Row, Callable[[], Calls]]] = [
        (Row(str(case), case.rows), functools.partial(_case_calls, case, device))
        for case in made
        if case.timed
    ]
    for layout in (mla.CASES["fp8"], mla.CASES["ds_fp8"]):
        for batch in _BATCHES:
            row = Row(f"mla_decode, {layout}, 16 heads, 4096 rows", batch)
            cases.append((row, functools.partial(_dense_calls, layout, batch, device)))
    return cases


def measure(row: Row, make: Callable[[], Calls], cold: ColdCache) -> None:
    """Check and time a case with Hopper's code, Triton's code and sm_80 code."""
    calls = make()
    for name, code in CODES.items():
        with tempfile.TemporaryDirectory() as folder, code(Path(folder)):
            setattr(row, name, Capture(captured_calls(calls())).device_us(cold).median)
    if row.sm_80_us and row.triton_us:
        row.times_triton = row.sm_80_us / row.triton_us


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    device = chosen_device(options)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        raise BenchError("ampere: it runs code for an A100 on a Hopper card only")
    output, cold = Report(options, device), ColdCache(device)
    rows, makers = zip(*cases_of(device), strict=True)
    for row, make in zip(progress(rows, options.bench), makers, strict=True):
        with output.measured(row):
            measure(row, make, cold)
    slow = [row for row in output.rows if (row["times_triton"] or 0) > MOST]
    output.finish(
        "sm_80 code on a Hopper card, microseconds",
        f"{len(slow)} of {len(output.rows)} cases take more than {MOST} times as long as Triton's "
        "code for the card.",
    )
    output.raise_failures()

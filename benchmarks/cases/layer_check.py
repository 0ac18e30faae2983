"""Compare the caches that a baseline's stages write with ours: equal bytes, or within one code."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.harness.work import differing_bytes
from dsv4_ops.core.layout import Layout, QuantizedLayout, StateLayout
from dsv4_ops.reference.pages import Columns, gather_rows, row_columns, scatter_rows
from dsv4_ops.testing.cases.compressor import row_values

CODE_STEP, ROPE_STEP = 2.0**-3, 2.0**-7
"""Maximum relative step between neighbouring codes, in e4m3 and in bf16."""

_NEAR_ZERO = 2.0**-16  # part of a row's amax by which float32 sums that cancel may differ
_SPOILED = 0x5A


@dataclass
class Found:
    """Differences between two results: beyond rounding in ``wrong``, others in ``notes``."""

    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, different: int, total: int, wrong: str | None) -> None:
        """Record that ``different`` of ``total`` bytes differ."""
        if wrong:
            self.wrong.append(f"{name}: {wrong}")
        elif different:
            self.notes.append(
                f"{name}: {different} of {total} bytes differ, no value by more than a step"
            )


@dataclass(frozen=True)
class Rows:
    """The rows of a cache that a stage writes, in the baseline's copy and in ours."""

    name: str
    layout: Layout
    baseline: Tensor
    ours: Tensor
    slots: Tensor

    def spoil(self) -> None:
        """Overwrite the baseline's rows, so that a comparison shows a missing write."""
        if isinstance(self.layout, StateLayout):
            slots, size = self.slots, self.layout.block_size
            self.layout.rows(self.baseline)[slots // size, slots % size] = torch.nan
            return
        for columns in self._columns():
            rows = self.baseline.new_full((self.slots.shape[0], columns.width), _SPOILED)
            self.baseline.copy_(scatter_rows(self.baseline, rows, self.slots, columns))

    def compare(self, found: Found) -> None:
        """Compare the bytes of the rows, then their values."""
        if isinstance(self.layout, StateLayout):
            wrong = differing_bytes([self.baseline], [self.ours])
            text = f"{wrong} of {self.ours.nbytes} bytes differ" if wrong else None
            found.add(self.name, wrong, self.ours.nbytes, text)
            return
        assert isinstance(self.layout, QuantizedLayout)
        baseline, ours = self._bytes(self.baseline), self._bytes(self.ours)
        different, total = differing_bytes(baseline, ours), sum(part.nbytes for part in ours)
        wrong_values = None
        if different:
            (codes, rope), (other_codes, other_rope) = (
                row_values(self.layout, *each) for each in (ours, baseline)
            )
            wrong_values = steps_apart("codes", codes, other_codes, CODE_STEP)
            wrong_values = wrong_values or steps_apart("rope", rope, other_rope, ROPE_STEP)
        found.add(self.name, different, total, wrong_values)

    def _columns(self) -> tuple[Columns, Columns]:
        layout = self.layout
        assert isinstance(layout, QuantizedLayout)
        data = row_columns(layout, 0, layout.data_bytes)
        return data, row_columns(layout, layout.data_bytes, layout.scale_bytes)

    def _bytes(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        pages, rows = self.slots // self.layout.block_size, self.slots % self.layout.block_size
        data, scales = (gather_rows(cache, pages, rows, part) for part in self._columns())
        return data, scales


def compare_codes(
    name: str, baseline: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor], found: Found
) -> None:
    """Compare e4m3 codes [..., n] that have one factor [...] per row."""
    different, total = differing_bytes(baseline, ours), sum(part.nbytes for part in ours)
    wrong = None
    if different:
        left, right = (codes.float() * factor[..., None] for codes, factor in (ours, baseline))
        wrong = steps_apart("codes", left.flatten(0, -2), right.flatten(0, -2), CODE_STEP)
    found.add(name, different, total, wrong)


def steps_apart(name: str, ours: Tensor, baseline: Tensor, step: float) -> str | None:
    """Say how many rows have values that differ by over a step of their code, or return None."""
    size = torch.maximum(ours.abs(), baseline.abs()).float()
    allowed = step * size + _NEAR_ZERO * size.amax(-1, keepdim=True)
    wrong = ~((ours.float() - baseline.float()).abs() <= allowed)
    return f"{name} of {int(wrong.any(-1).sum())} rows are over a step off" if wrong.any() else None

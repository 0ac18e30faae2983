"""Stored result rows, and the format of their numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DEVICES = {
    "precision": "cpu",
    "quality": "h100",
    "quality_text": "h100",
    "context_parallel": "h100",
}
"""Folder of the files that are not of the H200."""

_POINT = (
    "case", "shape", "variant", "batch", "requests", "next_n", "context", "heads", "keys", "rows",
    "tokens", "layout", "model", "runs", "weights", "kv", "precision", "activations", "cache",
    "selection", "group", "ranks",
)  # fmt: skip
"""What says which point a row is of."""


class Stored:
    """The rows below a folder, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: Callable[[str], list[Row]] = lru_cache(None)(self._of_file)

    def path(self, file: str) -> Path:
        """The JSONL file of that name."""
        return self.folder / DEVICES.get(file, "h200") / f"{file}.jsonl"

    def runs(self, file: str) -> list[Row]:
        """All rows of a benchmark, of every run."""
        return self._read(file)

    def rows(self, file: str) -> list[Row]:
        """The newest row of every point, in the order in which the points first came. Which of two
        runs looks better plays no part."""
        newest: dict[tuple[Any, ...], Row] = {}
        for row in self._read(file):
            point = tuple(row.get(name) for name in _POINT)
            if point not in newest or row["date"] >= newest[point]["date"]:
                newest[point] = row
        return list(newest.values())

    def _of_file(self, file: str) -> list[Row]:
        path = self.path(file)
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines]


def number(value: float | None) -> str:
    """Three digits; a dash for nothing."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share, as it is measured."""
    return "-" if value is None else f"{number(value)} %" if value < 10 else f"{value:.0f} %"

"""Output of a benchmark: JSONL rows with their provenance, an aligned table, and progress."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dsv4_ops._version import __version__
from dsv4_ops.core.fingerprint import source_hash

Item = TypeVar("Item")
AnyRow = TypeVar("AnyRow")  # a dataclass of rows.py

BENCH_EXTRA = "pip install 'dsv4_ops[bench]'"


def stamp(device: torch.device, command: str) -> dict[str, Any]:
    """Where, when and with what a row was measured."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "dsv4_ops": __version__,
        "commit": _commit(),
        "sources": source_hash(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Commit of our checkout, ``-dirty`` if tracked files differ; None outside of one."""
    package = Path(__file__).resolve().parents[1]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=package, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


class Report(Generic[AnyRow]):
    """Writes each row as it comes, so that an interrupted run keeps what it has."""

    def __init__(self, folder: Path, name: str, stamped: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.stamp = folder, name, stamped
        self.rows: list[AnyRow] = []
        self.path(".jsonl").write_text("")

    def path(self, suffix: str) -> Path:
        """File of this benchmark with the given ending."""
        return self.folder / f"{self.name}{suffix}"

    def add(self, row: AnyRow) -> None:
        """Keep a row and append it to the JSONL file."""
        self.rows.append(row)
        with self.path(".jsonl").open("a") as file:
            file.write(json.dumps({**vars(row), **self.stamp}) + "\n")

    def write_text(self, text: str) -> None:
        """Print the final report and keep it."""
        self.path(".txt").write_text(text + "\n")
        print(text)


def text(title: str, output: Report[AnyRow], *parts: str) -> str:
    """The final report of a run: title, stamp, then tables and notes."""
    stamped = " ".join(f"{key}={value}" for key, value in output.stamp.items())
    return "\n\n".join([title, stamped, *parts])


def table(rows: Sequence[object], columns: Sequence[str]) -> str:
    """Rows as aligned text, without the columns that hold nothing."""
    used = [name for name in columns if any(getattr(row, name) is not None for row in rows)]
    cells = [used, *([_cell(getattr(row, name)) for name in used] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(used))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def progress(items: Sequence[Item], title: str) -> Iterator[Item]:
    """Yield ``items`` under a progress bar; one line each without a terminal or tqdm."""
    bar = _progress_bar() if sys.stderr.isatty() else None
    if bar is not None:
        yield from bar(items, desc=title, dynamic_ncols=True)
        return
    for number, item in enumerate(items, 1):
        print(f"{title} {number}/{len(items)}: {item}", file=sys.stderr, flush=True)
        yield item


def _progress_bar() -> Any | None:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore] # stubs are optional
    except ImportError:
        return None
    return tqdm


def one_line(error: Exception) -> str:
    """Type of an error and the first line of its message; the next too where that only announces
    it."""
    first, _, rest = str(error).strip().partition("\n")
    if first.endswith(":"):
        first = f"{first} {rest.strip().partition(chr(10))[0]}"
    return f"{type(error).__name__}: {first}"[:200]

"""What a benchmark leaves behind: stamped JSONL rows and an aligned table; and its progress."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from dsv4_ops._version import __version__
from dsv4_ops.core.fingerprint import source_hash

Item = TypeVar("Item")

BENCH_EXTRA = "pip install 'dsv4_ops[bench]'"


@dataclass(kw_only=True)
class Row:
    """One measured batch; times in microseconds, None where the device has no such number.

    ``kernels`` counts everything one graph replay runs on the device: kernels, copies, fills.
    ``device_us`` is device time per step; ``host_us`` the host's share with a plain CUDA graph
    replay, ``call_us`` and ``call_kernels`` with a call of the function compiled for
    ``reduce-overhead`` (on a CPU: the compiled call). ``speedup`` compares host + device with the
    anchors', ``call_speedup`` the same with ``call_us``. ``*_range`` are the 20th and 80th
    percentile; ``*activities`` name what ran on the device, and its time under the profiler.
    """

    kind: str
    requests: int
    next_n: int
    context: str
    tokens: int
    kernels: int | None = None
    device_us: float | None = None
    host_us: float | None = None
    call_us: float | None = None
    eager_us: float | None = None
    eager_speedup: float | None = None
    floor_us: float | None = None
    pct_of_floor: float | None = None
    anchor_kernels: int | None = None
    anchor_device_us: float | None = None
    anchor_host_us: float | None = None
    anchor_exact: bool | None = None
    anchor_error: str | None = None
    anchor_note: str | None = None
    speedup: float | None = None
    call_speedup: float | None = None
    call_kernels: int | None = None
    input_sets: int = 1
    device_us_range: list[float] = field(default_factory=list)
    host_us_range: list[float] = field(default_factory=list)
    call_us_range: list[float] = field(default_factory=list)
    activities: list[list[Any]] = field(default_factory=list)
    anchor_activities: list[list[Any]] = field(default_factory=list)


_BATCH = ("context", "requests", "next_n", "tokens")
_GRAPH = ("kernels", "device_us", "host_us", "floor_us", "pct_of_floor")
_CALL = ("call_kernels", "call_us", "eager_us")
_ANCHOR = ("anchor_kernels", "anchor_device_us", "anchor_host_us", "speedup", "anchor_error")
CUDA_COLUMNS = (*_BATCH, *_GRAPH, *_CALL, *_ANCHOR)
CPU_COLUMNS = (*_BATCH, "call_us", "eager_us", "eager_speedup", "anchor_exact", "anchor_error")


def stamp(device: torch.device, command: str) -> dict[str, Any]:
    """Where, when and with what a row was measured."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
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


class Report:
    """Writes each row as it comes, so that an interrupted run keeps what it has."""

    def __init__(self, folder: Path, name: str, stamped: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.stamp = folder, name, stamped
        self.rows: list[Row] = []
        self.path(".jsonl").write_text("")

    def path(self, suffix: str) -> Path:
        """File of this benchmark with the given ending."""
        return self.folder / f"{self.name}{suffix}"

    def add(self, row: Row) -> None:
        """Keep a row and append it to the JSONL file."""
        self.rows.append(row)
        with self.path(".jsonl").open("a") as file:
            file.write(json.dumps({**dataclasses.asdict(row), **self.stamp}) + "\n")

    def write_text(self, text: str) -> None:
        """Print the final report and keep it."""
        self.path(".txt").write_text(text + "\n")
        print(text)


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
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

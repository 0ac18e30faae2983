"""Write the rows of a benchmark as JSONL with their provenance, and show them as a Markdown table.

``python -m benchmarks report FILE`` prints the table of a stored file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.run import BenchError, WrongResult
from dsv4_ops._version import __version__
from dsv4_ops.core.fingerprint import source_hash

Item = TypeVar("Item")
Row = Mapping[str, Any]

_POINT = (
    "case", "shape", "variant", "group", "part", "start", "phase", "batch", "requests", "next_n",
    "context", "heads", "keys", "rows", "tokens", "layout", "model", "runs", "weights", "kv",
    "precision", "activations", "cache", "selection", "ranks", "layers", "topk",
)  # fmt: skip
"""Fields that identify the point that a row measures."""

_NOT_SHOWN = {
    "device", "threads", "torch", "triton", "transformers", "python", "dsv4_ops", "commit",
    "sources", "date", "command", "copy_tbs", "plotted", "moved_bytes", "flop", "input_sets",
    "bandwidth_gbs", "weight_bytes", "weights_gb", "text",
}  # fmt: skip
"""Provenance, and fields from which other columns are computed; shown only on request."""

_OURS = ("compiled_us", "us", "device_us", "step_ms")
_BASELINES = ("baseline_whole_us", "baseline_us", "baseline_device_us", "flash_mla_us", "stock_ms")


def stamp(device: torch.device, command: str) -> dict[str, Any]:
    """Return the provenance of a row: commit, date, device and versions."""
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
        "sources": source_hash(""),
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
    """Return the commit of our checkout, with ``-dirty`` if tracked files differ, or None."""
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
    """Writes each row at once, so that an interrupted run keeps its rows."""

    def __init__(self, options: argparse.Namespace, device: torch.device, **more: Any) -> None:
        folder, name = Path(options.out), options.bench
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.jsonl"
        given = {name: value for name, value in more.items() if value is not None}
        self.stamp = {**stamp(device, options.command), **given}
        self.rows: list[dict[str, Any]] = []
        self.path.write_text("")

    def add(self, row: Any) -> None:
        """Append a dataclass to the JSONL file. Items in ``row.more`` become fields."""
        self.rows.append({**vars(row), **vars(row).get("more", {})})
        self.rows[-1].pop("more", None)
        with self.path.open("a") as file:
            file.write(json.dumps({**self.rows[-1], **self.stamp}) + "\n")

    def read(self) -> None:
        """Read the rows that other processes have appended to the file."""
        lines = self.path.read_text().splitlines()
        self.rows = [
            {name: value for name, value in json.loads(line).items() if name not in self.stamp}
            for line in lines
        ]

    def finish(self, title: str, *notes: str) -> None:
        """Print a title, a table of all rows and notes, and write the same to a Markdown file."""
        stamped = " ".join(f"{key}={value}" for key, value in self.stamp.items())
        text = "\n\n".join([title, stamped, markdown(self.rows), *_texts(self.rows), *notes])
        self.path.with_suffix(".md").write_text(text + "\n")
        print(text)

    @contextlib.contextmanager
    def measured(self, row: Any) -> Iterator[None]:
        """Append a row after its measurement; an exception becomes the row's ``error``."""
        try:
            yield
        except Exception as error:
            row.error = one_line(error)
        self.add(row)

    def raise_failures(self) -> None:
        """Raise if a row has an error: ``WrongResult`` if any result is wrong, else BenchError."""
        failed = [row["error"] for row in self.rows if row["error"]]
        wrong = [text for text in failed if text.startswith(WrongResult.__name__)]
        if failed:
            kind = WrongResult if wrong else BenchError
            raise kind(f"{len(failed)} cases failed, {[*wrong, *failed][0]}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m benchmarks report``."""
    parser.add_argument("file", type=Path, metavar="FILE", help="rows, as JSONL")
    parser.add_argument("--columns", metavar="A,B,..", help="fields; default: all with a value")
    parser.add_argument("--match", metavar="REGEX", help="only lines in which this is found")
    parser.add_argument("--all", action="store_true", help="every run, not the newest of a point")


def run(options: argparse.Namespace) -> None:
    """Print a table of the rows of a file."""
    rows = [json.loads(line) for line in options.file.read_text().splitlines()]
    rows = rows if options.all else newest(rows)
    print(markdown(rows, (options.columns or "").split(","), options.match or ""))


def newest(rows: Sequence[Row]) -> list[Row]:
    """Return the newest row of every point, fast or slow; points stay in order."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        point = tuple(row.get(name) for name in _POINT)
        if point not in found or row["date"] >= found[point]["date"]:
            found[point] = row
    return list(found.values())


def markdown(rows: Sequence[Row], columns: Sequence[str] = (), match: str = "") -> str:
    """Format a table of ``columns``, by default of all fields with a value in any row. Rows with
    the necessary times get ``times_faster`` and ``pct_of_roofline``."""
    complete = [{**row, **_derived(row)} for row in rows]
    names = [name for name in columns if name]
    if not names:
        every = dict.fromkeys([*_POINT, *(name for row in complete for name in row)])
        names = [name for name in every if name not in _NOT_SHOWN and _has(complete, name)]
    lines = [" | ".join(_cell(name, row.get(name)) for name in names) for row in complete]
    shown = [line for line in lines if re.search(match, line)]
    head = [" | ".join(names), " | ".join("---" for _ in names)]
    return "\n".join(f"| {line} |" for line in [*head, *shown])


def _texts(rows: Sequence[Row]) -> list[str]:
    """Return the errors and notes of rows, each with the points that have it."""
    points: dict[str, list[str]] = {}
    for row in rows:
        where = " ".join(str(row[name]) for name in _POINT if row.get(name) not in (None, ""))
        for name, value in row.items():
            if _is_text(name) and isinstance(value, str):
                points.setdefault(f"{name}: {value}", []).append(where)
    return [f"{text} ({'; '.join(where)})" for text, where in points.items()]


def _is_text(name: str) -> bool:
    return name.endswith(("note", "error", "failed"))


def _has(rows: Sequence[Row], name: str) -> bool:
    """Return whether a table cell can show the field."""
    found = [row[name] for row in rows if row.get(name) not in (None, "")]
    words = str if _is_text(name) else ()
    return bool(found) and not any(isinstance(value, (list, dict, words)) for value in found)


def _derived(row: Row) -> Row:
    """Return the baseline's time over ours, and the roofline's time in percent of ours."""
    ours = _first(row, _OURS)
    if not ours:
        return {}
    baseline, roofline = _first(row, _BASELINES), _first(row, ("roofline_us", "roofline_ms"))
    found = {} if baseline is None else {"times_faster": baseline / ours}
    return found if roofline is None else {**found, "pct_of_roofline": 100 * roofline / ours}


def _first(row: Row, names: Sequence[str]) -> float | None:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _cell(name: str, value: object) -> str:
    """Format a number with three digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    if "pct" in name:
        return f"{value:.{digits if digits == 2 else 0}f} %"
    return f"{value:.{digits}f}"


def progress(items: Sequence[Item], title: str) -> Iterator[Item]:
    """Yield ``items``, and print a line for each."""
    for number, item in enumerate(items, 1):
        print(f"{title} {number}/{len(items)}: {item}", file=sys.stderr, flush=True)
        yield item


def one_line(error: Exception) -> str:
    """Return an error's type and first line, and its second line if the first ends in a colon."""
    first, _, rest = str(error).strip().partition("\n")
    if first.endswith(":"):
        first = f"{first} {rest.strip().partition(chr(10))[0]}"
    return f"{type(error).__name__}: {first}"[:200]

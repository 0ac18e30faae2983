"""Figures of ``README.md`` and of pages of ``docs/``, written from the stored rows:

    python -m benchmarks.page [--check]

replaces what is between ``<!-- table: NAME -->`` and ``<!-- /table -->`` and between
``<!-- = NAME -->`` and ``<!-- / -->`` (``figures.py``), leaves the text around, and draws every
plot whose rows are others than those it shows. ``<!-- table: NAME; PATTERN -->`` takes the lines
that the pattern finds, and does not name their runs. ``--check`` writes nothing, names what it
would write, and exits with 1 if there is any.

A file may have rows of several runs: the newest of each point is shown, whatever it says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from benchmarks.harness import plot
from benchmarks.harness.figures import FIGURES
from benchmarks.harness.stored import Row, Stored
from benchmarks.harness.tables import TABLES, Table

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/performance.md", "docs/limits.md")
_FIGURE = re.compile(r"(<!-- = (\w+) -->)(.*?)(<!-- / -->)", re.S)
_MARKED = re.compile(r"(<!-- table: (\w+)(?:; ([^\n]+))? -->\n)(.*?)(<!-- /table -->)", re.S)


_RENAMED = (("python -m dsv4_ops bench", "python -m benchmarks"), ("--anchor ", "--baseline "))
"""What stored commands were called, and are now."""

_CALL, _STEP = "microseconds per call", "microseconds per step"
PLOTS: dict[str, tuple[Callable[..., list[plot.Panel]], str, str]] = {
    "metadata": (plot.metadata_panels, "Metadata of a decode step", _STEP),
    "kv_cache": (plot.cache_panels, "FP8 cache: inserts and gathers", _CALL),
    "sparse_mla": (plot.mla_panels, "Sparse MLA, decode from an FP8 cache", _CALL),
    "compressor": (plot.compressor_panels, "KV compressor, one step", _STEP),
    "indexer": (plot.indexer_panels, "Lightning indexer, decode, top 512", _CALL),
    "layer": (plot.layer_panels, "Decode step of a layer between its projections", _STEP),
    "model": (
        plot.model_panels, "Decode step of 4 layers of DeepSeek-V4-Flash's sizes", "ms per step",
    ),
}  # fmt: skip
"""Panels, title and axis of the plot of each file of rows."""


@dataclass(frozen=True)
class Plot:
    """What a plot shows."""

    panels: Sequence[plot.Panel]
    title: str
    ylabel: str

    @property
    def digest(self) -> str:
        """A hash of it."""
        return plot.digest_of(self.panels, title=self.title, ylabel=self.ylabel)


def plots(stored: Stored) -> dict[str, Plot]:
    """Every plot, from the rows that measured something, by its name."""
    found = {}
    for file, (panels, title, ylabel) in PLOTS.items():
        rows = stored.rows(file)
        measured = [SimpleNamespace(**row) for row in rows if row.get("error") is None]
        devices = ", ".join(dict.fromkeys(str(row["device"]) for row in rows))
        only = {} if file == "model" else {"cuda": True}
        found[file] = Plot(panels(measured, **only), f"{title} · {devices}", ylabel)
    return found


def markdown(table: Table, rows: Iterable[Row], pattern: str | None = None) -> str:
    """The table, or the lines that ``pattern`` finds. Below a whole table stand its runs."""
    kept = table.kept(rows)
    if pattern is not None:
        kept = [
            row
            for row in kept
            if re.search(pattern, " | ".join(cell(row) for _, cell in table.columns))
        ]
    if not kept:
        raise ValueError(
            f"page: rows must hold some of {table.file}, got none. Run its benchmark, or drop the "
            "table from the page."
        )
    measured = [each for row in kept for each in row.get("of", [row])]
    with_runs = table.origins and pattern is None
    shown = [(name, [cell(row) for row in kept]) for name, cell in table.columns]
    shown = [(name, cells) for name, cells in shown if set(cells) != {"-"}]  # what none measured
    lines = ["| " + " | ".join(name for name, _ in shown) + " |"]
    lines.append("| --- " * len(shown) + "|")
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*(c for _, c in shown), strict=True)]
    return "\n".join([*lines, *(["", *_origins(measured)] if with_runs else []), ""])


def _today(command: str) -> str:
    """The command of a row with the names of today."""
    for before, now in _RENAMED:
        command = command.replace(before, now)
    return command


def _origins(rows: Sequence[Row]) -> list[str]:
    """A line per run: rows of several runs are not to be compared as if they were of one."""
    found: dict[tuple[str, ...], int] = {}
    for row in rows:
        versions = f"{row['device']}, torch {row['torch']}, triton {row['triton']}"
        if row.get("transformers"):
            versions += f", transformers {row['transformers']}"
        key = (versions, row["date"][:10], row["sources"], _today(row["command"]))
        found[key] = found.get(key, 0) + 1
    return [
        f"{count} rows: {versions}, {date}, sources `{sources}`: `{command}`  "
        for (versions, date, sources, command), count in found.items()
    ]


def page(text: str, stored: Stored) -> str:
    """``text`` with its tables and figures written anew from the stored rows. A table that shows
    nothing yet may stay so until it has rows."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(
                f"page: table must be one of {', '.join(TABLES)}, got {found[2]!r}. "
                "Correct the name in the page."
            )
        chosen, opened, pattern, shown, closed = TABLES[found[2]], *found.group(1, 3, 4, 5)
        rows = stored.rows(chosen.file)
        if not chosen.kept(rows) and not shown:
            return opened + closed
        return opened + markdown(chosen, rows, pattern) + closed

    def figure(found: re.Match[str]) -> str:
        if found[2] not in FIGURES:
            raise ValueError(
                f"page: figure must be one of {', '.join(FIGURES)}, got {found[2]!r}. "
                "Correct the name in the page."
            )
        return found[1] + FIGURES[found[2]](stored) + found[4]

    return _FIGURE.sub(figure, _MARKED.sub(table, text))


def stale(root: Path = ROOT) -> list[Path]:
    """Pages and plots that do not show the stored rows."""
    stored = Stored(root / "benchmarks/results")
    pages = [root / name for name in PAGES]
    found = [path for path in pages if page(path.read_text(), stored) != path.read_text()]
    shown = plots(stored).items()
    plotted = {stored.path(file).with_suffix(".png"): each for file, each in shown}
    return found + [path for path, shown in plotted.items() if plot.shown_by(path) != shown.digest]


def write(root: Path = ROOT) -> list[Path]:
    """Write and draw what is stale, and return it.

    Raises:
        ImportError: A plot is stale and matplotlib is missing.
    """
    stored, found = Stored(root / "benchmarks/results"), stale(root)
    shown = plots(stored)
    for path in found:
        if path.suffix == ".md":
            path.write_text(page(path.read_text(), stored))
        else:
            plotted = shown[path.stem]
            plot.plot(plotted.panels, path, title=plotted.title, ylabel=plotted.ylabel)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Write what is stale, or name it and exit with 1 (``--check``)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would")
    check = parser.parse_args(argv).check
    for path in (found := stale() if check else write()):
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())

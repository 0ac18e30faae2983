"""Tables of ``docs/performance.md``, written from the rows of a GPU:

    python -m dsv4_ops.bench.page docs/performance.md benchmarks/h200

replaces what is between ``<!-- table: NAME -->`` and ``<!-- /table -->``, leaves the text around,
and draws the plots beside the rows, but for that of the model, which ``bench model`` draws.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsv4_ops.bench import plot

Row = dict[str, Any]
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- /table -->)", re.S)


@dataclass(frozen=True)
class Table:
    """What a table shows.

    Args:
        file: Name of the JSONL file, without its suffix.
        columns: Heading and cell of each column.
        cases: Cases that belong to it; empty for all.
        chosen: Whether a row of these cases does.
    """

    file: str
    columns: Sequence[tuple[str, Callable[[Row], str]]]
    cases: tuple[str, ...] = ()
    chosen: Callable[[Row], bool] = bool

    def kept(self, rows: Iterable[Row]) -> list[Row]:
        """The rows that belong to it."""
        return [
            row
            for row in rows
            if (not self.cases or row["case"] in self.cases) and self.chosen(row)
        ]


def number(value: float | None) -> str:
    """Three digits; a dash for nothing."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share, as it is measured."""
    return "-" if value is None else f"{number(value)} %" if value < 10 else f"{value:.0f} %"


def _of_theirs(row: Row) -> str:
    theirs = row["anchor_us"]
    return percent(100 * row["compiled_us"] / theirs if theirs else None)


def us(field: str) -> Callable[[Row], str]:
    """A column of microseconds."""
    return lambda row: number(row.get(field))


def share(field: str) -> Callable[[Row], str]:
    """A column of percentages."""
    return lambda row: percent(row.get(field))


def _label(row: Row) -> str:
    return f"{row['shape']}, {row['variant']}" if row.get("variant") else str(row["shape"])


def _tried(row: Row) -> str:
    return f"{row['case']}: {_label(row)}"


def _times(row: Row) -> str:
    """How many times the floor."""
    return number(row["compiled_us"] / row["floor_us"]) if row.get("floor_us") else "-"


def _shape(row: Row) -> str:
    return f"{row['batch']} x {row['context'] // 1024}k"


def _theirs(row: Row) -> str:
    if row.get("stock_ms") is None:
        return "out of memory"
    return f"{number(row['stock_ms'])}, {number(row['stock_busy_ms'])}, {row['stock_kernels']}"


def _gathered(row: Row) -> str:
    if row.get("gathered_rows") is None:
        return "-"
    return f"{row['context']}, {row['gathered_rows']}"


def _long_prefill(row: Row) -> bool:
    """Of a step that is mostly prefill, behind the longest prefix."""
    return int(row["rows"]) >= 512 and "behind" not in (row.get("variant") or "")


_ATTENTION = (
    ("tokens x heads, keys", _label),
    ("ours, us", us("eager_us")),
    ("compiled for any size", us("compiled_us")),
    ("FlashMLA", us("anchor_us")),
    ("of the floor", share("pct_of_floor")),
)
_PREFILL = (
    *_ATTENTION[:4],
    ("our kernel over its rows", us("gathered_us")),
    ("vLLM's gather", us("anchor_gather_us")),
    ("its indices", us("anchor_combine_us")),
    ("gather, indices and FlashMLA", us("anchor_whole_us")),
    ("that over ours", us("whole_times_faster")),
    ("with our gather in place of vLLM's", us("anchor_our_gather_us")),
    ("ours with FlashMLA", us("flash_mla_us")),
    ("vLLM's sequence over that", us("whole_times_flash_mla")),
    ("context, rows gathered", _gathered),
    _ATTENTION[4],
)
_WAYS = (
    ("tokens x heads, keys", _label),
    ("ours, by size, us", us("compiled_us")),
    ("from the pages", us("pages_us")),
    ("by a copy", us("copied_us")),
    ("FlashMLA alone", us("anchor_us")),
    ("gather, indices and FlashMLA", us("anchor_whole_us")),
    ("that over ours", us("whole_times_faster")),
)
_BESIDE_ONE = (
    ("that over ours", us("times_faster")),
    ("of the floor", share("pct_of_floor")),
)
_CACHE = (
    ("rows", _tried),
    ("ours, us", us("compiled_us")),
    ("vLLM", us("anchor_us")),
    ("copy of as many bytes", us("copy_us")),
    ("of that copy", share("pct_of_copy")),
    ("of a copy of 256 MiB", share("pct_of_bandwidth")),
)
TABLES = {
    "metadata": Table(
        "metadata",
        (
            ("requests x tokens, context", lambda row: f"{row['requests']} x {row['next_n']}, "
             f"{row['context']}"),
            ("ours on the device, us", us("device_us")),
            ("on the host", us("host_us")),
            ("vLLM on the device", us("anchor_device_us")),
            ("on the host", us("anchor_host_us")),
        ),
    ),
    "caches": Table(
        "kv_cache",
        _CACHE,
        ("insert", "gather", "gather_all", "indexer_insert", "indexer_gather", "plain_insert"),
    ),
    "indices": Table("kv_cache", _CACHE[:3], ("combine", "mixed", "fused")),
    "decode": Table("sparse_mla", _ATTENTION, ("decode",)),
    "other_decode": Table(
        "sparse_mla",
        (("kind: tokens x heads, keys", _tried), *_ATTENTION[1:]),
        ("window", "mtp", "paged", "ragged"),
    ),
    "prefill": Table("sparse_mla", _PREFILL, ("prefill",), _long_prefill),
    "ways": Table("sparse_mla", _WAYS, ("prefill",)),
    "gathered": Table(
        "sparse_mla",
        (
            ("tokens x heads, keys", _label),
            ("ours, us", us("compiled_us")),
            ("FlashMLA", us("anchor_us")),
            *_BESIDE_ONE,
        ),
        ("gathered",),
    ),
    "packages": Table(
        "sparse_mla",
        (
            ("form", lambda row: str(row["variant"])),
            ("tokens x heads, keys", lambda row: str(row["shape"])),
            ("package, us", us("package_us")),
            ("compiled for any size", us("compiled_us")),
            ("eager", us("eager_us")),
            ("FlashMLA", us("anchor_us")),
        ),
        ("packages",),
    ),
    "compressor": Table(
        "compressor",
        (
            ("kind: step", _tried),
            ("us", us("compiled_us")),
            ("times the floor", _times),
            ("copy of as many bytes", us("copy_us")),
        ),
        chosen=lambda row: row["rows"] >= 128,
    ),
    "indexer": Table(
        "indexer",
        (
            ("requests x context", _label),
            ("ours, us", us("compiled_us")),
            ("DeepGEMM's logits and `torch.topk`", us("anchor_us")),
            ("of the floor", share("pct_of_floor")),
        ),
        ("select",),
    ),
    "logits": Table(
        "indexer",
        (
            ("requests x context", _label),
            ("ours, us", us("compiled_us")),
            ("DeepGEMM", us("anchor_us")),
            *_BESIDE_ONE,
        ),
        ("logits",),
    ),
    "layer": Table(
        "layer",
        (
            ("kind: model, requests x context", _tried),
            ("ours, us", us("compiled_us")),
            ("peers", us("anchor_us")),
            ("ours of theirs", _of_theirs),
            ("kernels", lambda row: str(row["kernels"])),
        ),
    ),
    "model": Table(
        "model",
        (
            ("requests x context", _shape),
            ("theirs: ms, busy, kernels", _theirs),
            ("theirs, compiled", us("stock_compiled_ms")),
            ("patched, eager", us("eager_ms")),
            ("one CUDA graph: ms, busy", lambda row: f"{number(row['step_ms'])}, "
             f"{number(row['busy_ms'])}"),
            ("times faster", us("times_faster")),
            ("kernels per layer", lambda row: f"{row['kernels_per_layer']:.0f}"),
            ("metadata", share("metadata_pct")),
            ("of the floor", share("pct_of_floor")),
        ),
    ),
}  # fmt: skip
"""Every table by the name that the page calls it."""


_CALL, _STEP = "microseconds per call", "microseconds per step"
PLOTS: dict[str, tuple[Callable[..., list[plot.Panel]], str, str]] = {
    "metadata": (plot.metadata_panels, "Decode metadata of one step", _STEP),
    "kv_cache": (plot.cache_panels, "Cache ops", _CALL),
    "sparse_mla": (plot.mla_panels, "Sparse MLA", _CALL),
    "compressor": (plot.compressor_panels, "KV compressor", _STEP),
    "indexer": (plot.indexer_panels, "Lightning indexer", _CALL),
    "layer": (plot.layer_panels, "An attention layer between its projections", _STEP),
}
"""Panels, title and axis of the plot of each file of rows."""


def rows_of(folder: Path, file: str) -> list[Row]:
    """The rows of a benchmark."""
    return [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]


def draw(folder: Path) -> None:
    """Every plot, from the rows that measured something."""
    for file, (panels, title, axis) in PLOTS.items():
        rows = rows_of(folder, file)
        measured = [SimpleNamespace(**row) for row in rows if row.get("error") is None]
        drawn, named = panels(measured, cuda=True), f"{title} · {rows[0]['device']}"
        plot.try_plot(drawn, folder / f"{file}.png", title=named, ylabel=axis)


def markdown(table: Table, rows: Iterable[Row]) -> str:
    """The table, and under it what its rows were measured on and with."""
    kept = table.kept(rows)
    if not kept:
        raise ValueError(
            f"page: rows must hold some of {table.file}, got none. Run its benchmark, or drop the "
            "table from the page."
        )
    shown = [(name, [cell(row) for row in kept]) for name, cell in table.columns]
    shown = [(name, cells) for name, cells in shown if set(cells) != {"-"}]  # what none measured
    lines = ["| " + " | ".join(name for name, _ in shown) + " |"]
    lines.append("| --- " * len(shown) + "|")
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*(c for _, c in shown), strict=True)]
    return "\n".join([*lines, "", *_origins(kept), ""])


def _origins(rows: Sequence[Row]) -> list[str]:
    """A line per run: rows of several runs are not to be compared as if they were of one."""
    found: dict[tuple[str, ...], int] = {}
    for row in rows:
        versions = f"{row['device']}, torch {row['torch']}, triton {row['triton']}"
        key = (versions, row["date"][:10], row["sources"], row["command"])
        found[key] = found.get(key, 0) + 1
    return [
        f"{count} rows: {versions}, {date}, sources `{sources}`: `{command}`  "
        for (versions, date, sources, command), count in found.items()
    ]


def page(text: str, folder: Path) -> str:
    """``text`` with its tables written anew from the rows in ``folder``. One that shows nothing yet
    may stay so until it has rows."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(
                f"page: table must be one of {', '.join(TABLES)}, got {found[2]!r}. "
                "Correct the name in the page."
            )
        chosen, opened, shown, closed = TABLES[found[2]], found[1], found[3], found[4]
        kept = chosen.kept(rows_of(folder, chosen.file))
        return opened + (markdown(chosen, kept) if kept or shown else "") + closed

    return _MARKED.sub(table, text)


if __name__ == "__main__":
    target, rows = map(Path, sys.argv[1:3])
    target.write_text(page(target.read_text(), rows))
    draw(rows)

"""Pictures of a run: microseconds against a size, a panel per kind of case, both axes log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_ops.bench.report import BENCH_EXTRA
from dsv4_ops.bench.rows import CacheRow, IndexerRow, LayerRow, MetadataRow, SparseMlaRow

_OURS, _THEIRS, _LIMIT = "#0b6e99", "#c8553d", "#7a7a7a"
_METADATA_CUDA = (
    ("ours, host + device", _OURS, "-", ("host_us", "device_us")),
    ("ours, device", _OURS, "--", ("device_us",)),
    ("vLLM 0.22.1, host + device", _THEIRS, "-", ("anchor_host_us", "anchor_device_us")),
    ("vLLM 0.22.1, device", _THEIRS, "--", ("anchor_device_us",)),
)
_METADATA_CPU = (
    ("compiled", _OURS, "-", ("call_us",)),
    ("eager reference", _THEIRS, "-", ("eager_us",)),
)
_CACHE_CUDA = (
    ("ours, compiled", _OURS, "-", ("compiled_us",)),
    ("vLLM 0.22.1", _THEIRS, "-", ("anchor_us",)),
    ("copy of the same bytes", _LIMIT, "--", ("copy_us",)),
)
_MLA_CUDA = (
    ("ours, compiled", _OURS, "-", ("compiled_us",)),
    ("FlashMLA of vLLM 0.22.1", _THEIRS, "-", ("anchor_us",)),
    ("floor", _LIMIT, "--", ("floor_us",)),
)
_INDEXER_CUDA = (
    ("ours, selected rows", _OURS, "-", ("compiled_us",)),
    ("DeepGEMM of vLLM 0.22.1, and torch.topk", _THEIRS, "-", ("anchor_us",)),
    ("floor", _LIMIT, "--", ("floor_us",)),
)
_LAYER_CUDA = (
    ("ours, the whole layer", _OURS, "-", ("compiled_us",)),
    ("kernels of vLLM 0.22.1, FlashMLA and DeepGEMM", _THEIRS, "-", ("anchor_us",)),
    ("floor", _LIMIT, "--", ("floor_us",)),
)
_CPU = (
    ("compiled", _OURS, "-", ("compiled_us",)),
    ("eager reference", _THEIRS, "-", ("eager_us",)),
)


@dataclass(frozen=True)
class Series:
    """A line: label, color, style and points."""

    label: str
    color: str
    line: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Lines over one axis."""

    title: str
    xlabel: str
    series: Sequence[Series]


def metadata_panels(rows: Sequence[MetadataRow], *, cuda: bool) -> list[Panel]:
    """A step against requests, a panel per next_n."""
    lines = _METADATA_CUDA if cuda else _METADATA_CPU
    panels = []
    for next_n in sorted({row.next_n for row in rows}):
        chosen = [row for row in rows if row.next_n == next_n]
        title = f"{next_n} token{'s' if next_n > 1 else ''} per request"
        panels.append(Panel(title, "requests", _series(chosen, lines, lambda row: row.requests)))
    return panels


def cache_panels(rows: Sequence[CacheRow], *, cuda: bool) -> list[Panel]:
    """Inserts against tokens; gathers against the rows of a request, a panel per request count."""
    lines = _CACHE_CUDA if cuda else _CPU
    panels = []
    for case in ("insert", "gather"):
        chosen = [row for row in rows if row.case == case and row.plotted]
        unit = "tokens" if case == "insert" else "rows per request"
        for requests in sorted({row.requests for row in chosen}):
            group = sorted(
                (row for row in chosen if row.requests == requests), key=lambda row: row.rows
            )
            suffix = "" if case == "insert" else f", {requests} request{'s' * (requests > 1)}"
            panels.append(Panel(case + suffix, unit, _series(group, lines, lambda row: row.rows)))
    return panels


def compressor_panels(rows: Sequence[CacheRow], *, cuda: bool) -> list[Panel]:
    """Steps in which every request finishes a window, and prefill, against tokens; a panel per
    kind."""
    lines = _CACHE_CUDA if cuda else _CPU
    panels = []
    for kind in dict.fromkeys(row.case for row in rows):
        chosen = sorted(
            (row for row in rows if row.case == kind and row.plotted), key=lambda row: row.rows
        )
        panels.append(Panel(kind, "tokens", _series(chosen, lines, lambda row: row.rows)))
    return panels


def mla_panels(rows: Sequence[SparseMlaRow], *, cuda: bool) -> list[Panel]:
    """A decode step against its requests, a panel per number of heads and of keys."""
    lines, plotted = _MLA_CUDA if cuda else _CPU, [row for row in rows if row.plotted]
    panels = []
    for heads, _, keys in sorted({(row.heads, len(row.keys), row.keys) for row in plotted}):
        chosen = [row for row in plotted if (row.heads, row.keys) == (heads, keys)]
        chosen.sort(key=lambda row: row.requests)
        series = _series(chosen, lines, lambda row: row.requests)
        panels.append(Panel(f"{heads} heads, {keys} keys", "requests", series))
    return panels


def indexer_panels(rows: Sequence[IndexerRow], *, cuda: bool) -> list[Panel]:
    """A selection against the context, a panel per number of requests."""
    lines, chosen = _INDEXER_CUDA if cuda else _CPU, [row for row in rows if row.case == "select"]
    panels = []
    for requests in sorted({row.requests for row in chosen}):
        group = sorted(
            (row for row in chosen if row.requests == requests), key=lambda row: row.context
        )
        title = f"{requests} request{'s' * (requests > 1)}"
        panels.append(Panel(title, "context", _series(group, lines, lambda row: row.context)))
    return panels


def layer_panels(rows: Sequence[LayerRow], *, cuda: bool) -> list[Panel]:
    """A decode step against its requests, a panel per kind of layer and number of heads."""
    lines, plotted = _LAYER_CUDA if cuda else _CPU, [row for row in rows if row.plotted]
    panels = []
    for kind, heads in dict.fromkeys((row.case, row.heads) for row in plotted):
        chosen = [row for row in plotted if (row.case, row.heads) == (kind, heads)]
        chosen.sort(key=lambda row: row.requests)
        series = _series(chosen, lines, lambda row: row.requests)
        panels.append(Panel(f"{kind}, {heads} heads", "requests", series))
    return panels


def _series(
    rows: Sequence[Any],
    lines: Iterable[tuple[str, str, str, Sequence[str]]],
    size: Callable[[Any], int],
) -> list[Series]:
    series = []
    for label, color, line, fields in lines:
        points = [(float(size(row)), _total(row, fields)) for row in rows]
        known = [(x, y) for x, y in points if y is not None]
        if known:
            series.append(Series(label, color, line, known))
    return series


def _total(row: object, fields: Sequence[str]) -> float | None:
    values = [getattr(row, name) for name in fields]
    return None if None in values else float(sum(values))


def try_plot(panels: Sequence[Panel], path: Path, *, title: str, ylabel: str) -> None:
    """Write the PNG, or say on stderr what it takes."""
    if not panels:
        return
    try:
        plot(panels, path, title=title, ylabel=ylabel)
    except ImportError:
        print(f"no plot: {BENCH_EXTRA}", file=sys.stderr)


def plot(panels: Sequence[Panel], path: Path, *, title: str, ylabel: str) -> None:
    """Write the PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1.2 + 4.0 * len(panels), 4.6), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, panel in zip(axes[0], panels, strict=True):
        _draw(axis, panel)
    axes[0][0].set_ylabel(ylabel)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = 2 if len(panels) == 1 else 4
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    for series in panel.series:
        xs, ys = zip(*series.points, strict=True)
        axis.plot(
            xs, ys, series.line, color=series.color, label=series.label, marker="o", markersize=4
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted({x for series in panel.series for x, _ in series.points}))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(panel.xlabel)
    axis.set_title(panel.title, fontsize=10)
    axis.grid(which="major", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)

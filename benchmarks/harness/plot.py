"""Pictures of a run against a size, a panel per kind of case: times over those of a baseline, or
microseconds on a log axis where there is no baseline or the baseline takes many times as long."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.report import BENCH_EXTRA
from benchmarks.harness.rows import (
    CacheRow,
    IndexerRow,
    LayerRow,
    MetadataRow,
    ModelRow,
    SparseMlaRow,
)

_OURS, _BASELINE, _LIMIT = "#0b6e99", "#c8553d", "#7a7a7a"
_METADATA_CUDA = (
    ("ours, host + device", _OURS, "-", ("host_us", "device_us")),
    ("ours, device", _OURS, "--", ("device_us",)),
    ("vLLM 0.22.1, host + device", _BASELINE, "-", ("baseline_host_us", "baseline_device_us")),
    ("vLLM 0.22.1, device", _BASELINE, "--", ("baseline_device_us",)),
)
_METADATA_CPU = (
    ("compiled", _OURS, "-", ("call_us",)),
    ("eager reference", _BASELINE, "-", ("eager_us",)),
)
_CACHE_CUDA = (
    ("ours, compiled", _OURS, "-", ("compiled_us",)),
    ("vLLM 0.22.1", _BASELINE, "-", ("baseline_us",)),
)
_MLA_CUDA = (
    ("ours, compiled", _OURS, "-", ("compiled_us",)),
    ("roofline: the bytes at copy bandwidth, or the FLOP", _LIMIT, "--", ("roofline_us",)),
)
_INDEXER_CUDA = (
    ("ours, indexer_select", _OURS, "-", ("compiled_us",)),
    ("roofline: the bytes at copy bandwidth, or the FLOP", _LIMIT, "--", ("roofline_us",)),
)
_LAYER_CUDA = (
    ("ours, the whole layer", _OURS, "-", ("compiled_us",)),
    ("roofline: the bytes at copy bandwidth, or the FLOP", _LIMIT, "--", ("roofline_us",)),
)
_MODEL = (
    ("ours: patched, compiled, one CUDA graph", _OURS, "-", ("step_ms",)),
    ("ours: patched, eager", _OURS, ":", ("eager_ms",)),
    ("Hugging Face, eager", _BASELINE, "-", ("stock_ms",)),
    ("Hugging Face, torch.compile", _BASELINE, "--", ("stock_compiled_ms",)),
    ("reading all weights once", _LIMIT, "--", ("roofline_ms",)),
)
_CPU = (
    ("compiled", _OURS, "-", ("compiled_us",)),
    ("eager reference", _BASELINE, "-", ("eager_us",)),
)
_COPY = ("a copy of as many bytes", "copy_us")
_FLASH_MLA = ("FlashMLA of vLLM 0.22.1", "baseline_us")
_DEEP_GEMM = ("DeepGEMM's logits of vLLM 0.22.1 and torch.topk", "baseline_us")
_BASELINES = ("the kernels of vLLM 0.22.1, FlashMLA and DeepGEMM", "baseline_us")
_NAMES = {
    "window": "sliding window",
    "c4": "C4 (4 tokens a row)",
    "c4_indexer": "C4 indexer (4 tokens a row)",
    "c128": "C128 (128 tokens a row)",
}
"""What titles call the kinds of layers and compressors."""


@dataclass(frozen=True)
class Series:
    """A line: label, color, style and points."""

    label: str
    color: str
    line: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Lines over one axis. With a ``baseline`` the values are times over that, which is 1 on a
    linear axis; what is above ``top`` is written at its edge."""

    title: str
    xlabel: str
    series: Sequence[Series]
    baseline: str | None = None
    top: float | None = None


def metadata_panels(rows: Sequence[MetadataRow], *, cuda: bool) -> list[Panel]:
    """A step of requests of mixed contexts against their number, a panel per next_n."""
    lines = _METADATA_CUDA if cuda else _METADATA_CPU
    rows = [row for row in rows if row.context == "mixed"] or rows
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
            panels.append(
                _panel(case + suffix, unit, group, lines, lambda row: row.rows, _COPY, top=8.5)
            )
    return panels


def compressor_panels(rows: Sequence[CacheRow], *, cuda: bool) -> list[Panel]:
    """Steps in which every request finishes a window, and prefills, against tokens; a panel per
    kind."""
    lines = _CACHE_CUDA if cuda else _CPU
    panels = []
    for kind in dict.fromkeys(row.case for row in rows):
        chosen = sorted(
            (row for row in rows if row.case == kind and row.plotted), key=lambda row: row.rows
        )
        title = _NAMES.get(kind, kind)
        panels.append(
            _panel(title, "tokens of the step", chosen, lines, lambda row: row.rows, _COPY)
        )
    return panels


def mla_panels(rows: Sequence[SparseMlaRow], *, cuda: bool) -> list[Panel]:
    """A decode step against its requests, a panel per number of heads and of keys."""
    lines, plotted = _MLA_CUDA if cuda else _CPU, [row for row in rows if row.plotted]
    panels = []
    for heads, _, keys in sorted({(row.heads, len(row.keys), row.keys) for row in plotted}):
        chosen = [row for row in plotted if (row.heads, row.keys) == (heads, keys)]
        chosen.sort(key=lambda row: row.requests)
        title = f"{heads} heads, {keys} keys"
        panels.append(
            _panel(title, "requests", chosen, lines, lambda row: row.requests, _FLASH_MLA)
        )
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
        panels.append(
            _panel(title, "tokens of context", group, lines, lambda row: row.context, _DEEP_GEMM)
        )
    return panels


def layer_panels(rows: Sequence[LayerRow], *, cuda: bool) -> list[Panel]:
    """A decode step against its requests, a panel per kind of layer and number of heads."""
    lines, plotted = _LAYER_CUDA if cuda else _CPU, [row for row in rows if row.plotted]
    panels = []
    for kind, heads in dict.fromkeys((row.case, row.heads) for row in plotted):
        chosen = [row for row in plotted if (row.case, row.heads) == (kind, heads)]
        chosen.sort(key=lambda row: row.requests)
        title = f"{_NAMES.get(kind, kind)}, {heads} heads"
        panels.append(
            _panel(title, "requests", chosen, lines, lambda row: row.requests, _BASELINES)
        )
    return panels


def model_panels(rows: Sequence[ModelRow]) -> list[Panel]:
    """Steps against requests, a panel per context."""
    panels = []
    for context in sorted({row.context for row in rows}):
        chosen = sorted((row for row in rows if row.context == context), key=lambda row: row.batch)
        series = _series(chosen, _MODEL, lambda row: row.batch)
        panels.append(Panel(f"{context // 1024}k tokens of context", "requests", series))
    return panels


def _panel(
    title: str,
    xlabel: str,
    rows: Sequence[Any],
    lines: Sequence[tuple[str, str, str, Sequence[str]]],
    size: Callable[[Any], int],
    baseline: tuple[str, str],
    top: float | None = None,
) -> Panel:
    """Lines over a baseline, of the rows that have it; their microseconds if none does."""
    name, field = baseline
    measured = [row for row in rows if getattr(row, field, None)]
    if not measured:
        return Panel(title, xlabel, _series(rows, lines, size))
    rows = measured
    over = [
        Series(
            series.label,
            series.color,
            series.line,
            [(x, us / of) for (x, us), of in zip(series.points, baseline, strict=True)],
        )
        for series, baseline in _with_baseline(rows, lines, size, field)
    ]
    return Panel(title, xlabel, over, baseline=name, top=top)


def _with_baseline(
    rows: Sequence[Any],
    lines: Sequence[tuple[str, str, str, Sequence[str]]],
    size: Callable[[Any], int],
    field: str,
) -> Iterable[tuple[Series, list[float]]]:
    for line in lines:
        kept = [row for row in rows if _total(row, line[3]) is not None]
        for series in _series(kept, [line], size):
            yield series, [float(getattr(row, field)) for row in kept]


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
    """Write the PNG, and in it a digest of what it shows (``shown_by``).

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1.2 + min(4.0, 18.0 / len(panels)) * len(panels), 4.6),
        sharey=len({panel.baseline for panel in panels}) == 1, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    relative = [panel for panel in panels if panel.baseline]
    points = [y for panel in relative for series in panel.series for _, y in series.points]
    for axis, panel in zip(axes[0], panels, strict=True):
        _draw(axis, panel)
        if panel.baseline:
            axis.set_ylim(0.0, panel.top or 1.08 * max(1.0, *points))
    axes[0][0].set_ylabel("relative time, less is faster" if panels[0].baseline else ylabel)
    found = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    columns = 2 if len(panels) == 1 else 5
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False
    )
    figure.suptitle(title, fontsize=12)
    digest = digest_of(panels, title=title, ylabel=ylabel)
    figure.savefig(path, dpi=150, metadata={_KEYWORD: digest})
    pyplot.close(figure)


_KEYWORD = "Source"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def digest_of(panels: Sequence[Panel], *, title: str, ylabel: str) -> str:
    """A hash of all that a plot shows, the same under every version of matplotlib."""
    shown = json.dumps([title, ylabel, [asdict(panel) for panel in panels]], sort_keys=True)
    return "sha256 of the plotted values: " + hashlib.sha256(shown.encode()).hexdigest()


def shown_by(path: Path) -> str | None:
    """The digest that ``plot`` left in a PNG; None in another, or without the file."""
    data = path.read_bytes() if path.is_file() else b""
    place = len(_SIGNATURE)
    while data.startswith(_SIGNATURE) and place + 8 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        kind, chunk = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        keyword, _, value = chunk.partition(b"\0")
        if kind == b"tEXt" and keyword == _KEYWORD.encode():
            return value.decode("latin-1")
        place += size + 12
    return None


def _draw(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    if panel.baseline:
        axis.axhline(1.0, color=_BASELINE if "copy" not in panel.baseline else _LIMIT,
                     label=f"1 = {panel.baseline}")  # fmt: skip
    for series in panel.series:
        xs, ys = zip(*series.points, strict=True)
        axis.plot(
            xs, ys, series.line, color=series.color, label=series.label, marker="o", markersize=4
        )
    axis.set_xscale("log", base=2)
    if panel.baseline is None:
        axis.set_yscale("log")
    else:
        _name_what_is_above(axis, panel)
    axis.set_xticks(sorted({x for series in panel.series for x, _ in series.points}))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(_size))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(panel.xlabel)
    axis.set_title(panel.title, fontsize=10)
    axis.grid(which="major", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _size(value: float, _: object = None) -> str:
    """A size on the axis: thousands of 1024 as they are called."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _name_what_is_above(axis: Any, panel: Panel) -> None:
    for series in panel.series:
        for x, y in series.points:
            if panel.top is not None and y > panel.top:
                axis.annotate(f"{y:.0f}", (x, panel.top), xytext=(0, -2), ha="center", va="top",
                              textcoords="offset points", color=series.color)  # fmt: skip

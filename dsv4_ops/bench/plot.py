"""The picture of a metadata run: microseconds of a step against requests, a panel per next_n."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4_ops.bench.report import Row

_OURS, _THEIRS = "#0b6e99", "#c8553d"
_CUDA_SERIES = (
    ("ours, host + device", _OURS, "-", ("host_us", "device_us")),
    ("ours, device", _OURS, "--", ("device_us",)),
    ("vLLM 0.22.1, host + device", _THEIRS, "-", ("anchor_host_us", "anchor_device_us")),
    ("vLLM 0.22.1, device", _THEIRS, "--", ("anchor_device_us",)),
)
_CPU_SERIES = (
    ("compiled", _OURS, "-", ("call_us",)),
    ("eager reference", _THEIRS, "-", ("eager_us",)),
)


def plot(rows: Sequence[Row], path: Path, *, device: str, cuda: bool) -> None:
    """Write the PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({row.next_n for row in rows})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1.2 + 4.0 * len(panels), 4.6), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, next_n in zip(axes[0], panels, strict=True):
        _panel(panel, [row for row in rows if row.next_n == next_n], next_n, cuda)
    axes[0][0].set_ylabel("microseconds per step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = 2 if len(panels) == 1 else 4
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(f"Decode metadata of one step · {device}", fontsize=12)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(panel: Any, rows: Sequence[Row], next_n: int, cuda: bool) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    for label, color, line, fields in _CUDA_SERIES if cuda else _CPU_SERIES:
        points = [(row.requests, _total(row, fields)) for row in rows]
        known = [(x, y) for x, y in points if y is not None]
        if known:
            xs, ys = zip(*known, strict=True)
            panel.plot(xs, ys, line, color=color, label=label, marker="o", markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sorted({row.requests for row in rows}))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("requests")
    panel.set_title(f"{next_n} token{'s' if next_n > 1 else ''} per request", fontsize=10)
    panel.grid(which="major", color="#dddddd", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _total(row: Row, fields: Sequence[str]) -> float | None:
    values = [getattr(row, name) for name in fields]
    return None if None in values else float(sum(values))

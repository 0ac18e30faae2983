"""The rows of a measured op and of a model's step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class OpRow:
    """One measured op; times in microseconds, None if the device has no such time.

    ``compiled_us`` is device time per call of the op in a function compiled with dynamic sizes,
    ``eager_us`` that of the op called without a compiler, both inside a CUDA graph; on a CPU, wall
    time. ``baseline_us`` is the other implementation on the same inputs. ``baseline_agrees`` is
    whether its results equal ours, byte for byte or within the tolerance of its own tests;
    ``baseline_max_diff`` is the largest difference of an element. ``moved_bytes`` is the minimum
    that any implementation reads and writes, ``flop`` the operations of its products.
    ``roofline_us`` is the longer of the bytes at the bandwidth of a copy of 256 MiB and the FLOP at
    the rate of the matrix units. ``copy_us`` is a copy of the same number of bytes. ``kernels``
    counts the kernels of one compiled call, ``activities`` has the time of each. ``host_us`` and
    ``baseline_host_us`` are Python time per call outside of a graph. ``*_range`` are the 20th and
    80th percentile. ``more`` has fields that only some benchmarks have.
    """

    case: str
    shape: str
    variant: str
    requests: int
    rows: int
    moved_bytes: int | None = None
    flop: int | None = None
    input_sets: int = 1
    compiled_us: float | None = None
    eager_us: float | None = None
    baseline_us: float | None = None
    roofline_us: float | None = None
    copy_us: float | None = None
    bandwidth_gbs: float | None = None
    kernels: int | None = None
    host_us: float | None = None
    baseline_host_us: float | None = None
    baseline_agrees: bool | None = None
    baseline_max_diff: float | None = None
    baseline_note: str | None = None
    baseline_error: str | None = None
    note: str | None = None
    error: str | None = None
    seconds: float | None = None
    compiled_us_range: list[float] = field(default_factory=list)
    eager_us_range: list[float] = field(default_factory=list)
    baseline_us_range: list[float] = field(default_factory=list)
    activities: list[list[Any]] = field(default_factory=list)
    baseline_activities: list[list[Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def say(self, name: str, text: str | None) -> None:
        """Append a text to a field of texts."""
        texts = (getattr(self, name), text)
        setattr(self, name, "; ".join(each for each in texts if each) or None)


@dataclass(kw_only=True)
class ModelRow:
    """A step of a model.

    ``*_ms`` are times between two calls of a device that is never idle by design, ``busy_ms`` is
    the sum of all kernels' times. ``roofline_ms`` is the time to read all weights but the
    embeddings. ``metadata_us`` is the time of the metadata that all layers share, in a graph of its
    own. ``stages`` are microseconds of the parts of a step.
    """

    batch: int
    context: int
    layers: int
    weights_gb: float
    stock_ms: float | None = None
    stock_busy_ms: float | None = None
    stock_kernels: int | None = None
    stock_error: str | None = None
    stock_compiled_ms: float | None = None
    eager_ms: float | None = None
    step_ms: float | None = None
    busy_ms: float | None = None
    kernels: int | None = None
    kernels_per_layer: float | None = None
    metadata_us: float | None = None
    metadata_pct: float | None = None
    roofline_ms: float | None = None
    compile_s: float | None = None
    max_diff: float | None = None
    error: str | None = None
    stages: dict[str, float] = field(default_factory=dict)
    activities: list[list[Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.batch} x {self.context} tokens"

"""Result rows: one dataclass per benchmark, and the columns of its table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class MetadataRow:
    """One measured batch; times in microseconds, None where the device has no such number.

    ``kernels`` counts everything one graph replay runs on the device: kernels, copies, fills.
    ``device_us`` is device time per step; ``host_us`` the host's share with a plain CUDA graph
    replay, ``call_us`` and ``call_kernels`` with a call of the function compiled for
    ``reduce-overhead`` (on a CPU: the compiled call). ``speedup`` compares host + device with the
    baselines', ``call_speedup`` the same with ``call_us``. ``*_range`` are the 20th and 80th
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
    roofline_us: float | None = None
    pct_of_roofline: float | None = None
    baseline_kernels: int | None = None
    baseline_device_us: float | None = None
    baseline_host_us: float | None = None
    baseline_exact: bool | None = None
    baseline_error: str | None = None
    baseline_note: str | None = None
    speedup: float | None = None
    call_speedup: float | None = None
    call_kernels: int | None = None
    input_sets: int = 1
    device_us_range: list[float] = field(default_factory=list)
    host_us_range: list[float] = field(default_factory=list)
    call_us_range: list[float] = field(default_factory=list)
    activities: list[list[Any]] = field(default_factory=list)
    baseline_activities: list[list[Any]] = field(default_factory=list)


_BATCH = ("context", "requests", "next_n", "tokens")
_GRAPH = ("kernels", "device_us", "host_us", "roofline_us", "pct_of_roofline")
_CALL = ("call_kernels", "call_us", "eager_us")
_BASELINE = (
    "baseline_kernels",
    "baseline_device_us",
    "baseline_host_us",
    "speedup",
    "baseline_error",
)
METADATA_CUDA_COLUMNS = (*_BATCH, *_GRAPH, *_CALL, *_BASELINE)
METADATA_CPU_COLUMNS = (
    *_BATCH,
    "call_us",
    "eager_us",
    "eager_speedup",
    "baseline_exact",
    "baseline_error",
)


@dataclass(kw_only=True)
class OpRow:
    """One measured op; times in microseconds, None where the device has no such number.

    ``compiled_us`` is device time per call of the op in a function compiled with dynamic sizes,
    ``eager_us`` of the op called without a compiler, both inside a CUDA graph; on a CPU, wall
    time. ``baseline_us`` is the other implementation on the same inputs, ``times_faster`` that over
    ``compiled_us``. ``moved_bytes`` is what any implementation must read and write, ``roofline_us``
    the least time of the work. ``kernels`` counts what one compiled call runs on the device.
    ``host_us`` and ``baseline_host_us`` are Python time per call outside of a graph. ``*_range``
    are the 20th and 80th percentile.
    """

    case: str
    shape: str
    variant: str
    requests: int
    rows: int
    plotted: bool
    moved_bytes: int | None = None
    input_sets: int = 1
    compiled_us: float | None = None
    eager_us: float | None = None
    speedup: float | None = None
    baseline_us: float | None = None
    times_faster: float | None = None
    roofline_us: float | None = None
    bandwidth_gbs: float | None = None
    kernels: int | None = None
    host_us: float | None = None
    baseline_host_us: float | None = None
    baseline_note: str | None = None
    baseline_error: str | None = None
    error: str | None = None
    seconds: float | None = None
    compiled_us_range: list[float] = field(default_factory=list)
    eager_us_range: list[float] = field(default_factory=list)
    baseline_us_range: list[float] = field(default_factory=list)
    activities: list[list[Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class CacheRow(OpRow):
    """An op that only moves bytes: ``copy_us`` is a copy of as many on the device, ``roofline_us``
    their time at the bandwidth of a copy of 256 MiB; the two ``pct_of_*`` are these over
    ``compiled_us``."""

    copy_us: float | None = None
    pct_of_copy: float | None = None
    pct_of_bandwidth: float | None = None
    baseline_exact: bool | None = None


@dataclass(kw_only=True)
class ComputeRow(OpRow):
    """An op that also multiplies.

    ``roofline_us`` is the longer of ``moved_bytes`` at the bandwidth of a copy of 256 MiB and
    ``flop`` at the rate of the matrix units, ``pct_of_roofline`` that over ``compiled_us``.
    ``baseline_agrees`` is whether the baseline's results are ours within the tolerance of its own
    tests, and ``baseline_max_diff`` the largest difference of a result.
    """

    flop: int | None = None
    pct_of_roofline: float | None = None
    baseline_agrees: bool | None = None
    baseline_max_diff: float | None = None


@dataclass(kw_only=True)
class SparseMlaRow(ComputeRow):
    """Sparse MLA over ``keys`` rows per token, "window+selected".

    Of a prefill of one request of ``context`` tokens, ``baseline_us`` is FlashMLA alone, over rows
    gathered before; ``baseline_whole_us`` is vLLM's gather of ``gathered_rows`` from FP8 blocks,
    its combined indices and FlashMLA in one graph, ``baseline_gather_us`` and
    ``baseline_combine_us`` are the first two in graphs of their own. ``whole_times_faster`` is the
    whole over ``compiled_us``. ``baseline_our_gather_us`` is the whole with our gather in place of
    vLLM's. ``flash_mla_us`` is our op with ``impl="flash_mla"`` from the same blocks, called
    without a compiler as for ``eager_us``; ``whole_times_flash_mla`` is the whole over that.
    ``gathered_us`` is ``sparse_mla_gathered``, ours, where ``baseline_us`` is FlashMLA.
    ``pages_us`` and ``copied_us`` are the two variants of our op on Hopper, from the FP8 blocks and
    by way of a copy of the rows in bf16, at sizes for which ``compiled_us`` may have the other;
    ``note`` says why one is missing.

    ``package_us`` is an AOTInductor package for any number of tokens, timed as ``compiled_us``;
    ``package_error`` says what stood in the way of building or running it.
    """

    heads: int
    keys: str
    context: int | None = None
    gathered_rows: int | None = None
    baseline_gather_us: float | None = None
    baseline_combine_us: float | None = None
    baseline_whole_us: float | None = None
    whole_times_faster: float | None = None
    baseline_our_gather_us: float | None = None
    flash_mla_us: float | None = None
    whole_times_flash_mla: float | None = None
    gathered_us: float | None = None
    pages_us: float | None = None
    copied_us: float | None = None
    note: str | None = None
    package_us: float | None = None
    package_error: str | None = None
    package_us_range: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class IndexerRow(ComputeRow):
    """The lightning indexer for requests of ``context`` tokens."""

    context: int


@dataclass(kw_only=True)
class LayerRow(ComputeRow):
    """A decode step of an attention layer of ``heads`` heads, for requests of ``context`` tokens,
    ragged ones of up to as many. ``stages`` and ``baseline_stages`` are device times of its stages,
    each in a graph of its own; ``baseline_us`` is that of all the baseline's stages, in one
    graph."""

    context: int
    heads: int
    stages: dict[str, float] = field(default_factory=dict)
    baseline_stages: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelRow:
    """A decode step of one token per request. ``*_ms`` are times between a call and the next with
    the device never idle on purpose, ``busy_ms`` the sum of what ran on the device. ``roofline_ms``
    is the time to read all weights but the embeddings. ``metadata_us`` is what all layers share of
    a step, in a graph of its own; ``times_faster`` compares with ``stock_ms``."""

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
    times_faster: float | None = None
    metadata_us: float | None = None
    metadata_pct: float | None = None
    roofline_ms: float | None = None
    pct_of_roofline: float | None = None
    compile_s: float | None = None
    max_diff: float | None = None
    error: str | None = None
    stages: dict[str, float] = field(default_factory=dict)
    activities: list[list[Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.batch} x {self.context} tokens"


_CASE = ("case", "shape", "variant")
_TIMES = ("compiled_us", "eager_us", "baseline_us", "times_faster")
_HOST = ("kernels", "host_us", "baseline_host_us")
_CACHE_LIMITS = ("pct_of_bandwidth", "pct_of_copy", "copy_us", "roofline_us")
CACHE_CUDA_COLUMNS = (*_CASE, *_TIMES, *_CACHE_LIMITS, *_HOST, "baseline_exact")
CACHE_CPU_COLUMNS = (*_CASE, "compiled_us", "eager_us", "speedup", "baseline_exact")
COMPUTE_CUDA_COLUMNS = (
    *_CASE,
    *_TIMES,
    "roofline_us",
    "pct_of_roofline",
    *_HOST,
    "baseline_agrees",
)
SPARSE_MLA_CUDA_COLUMNS = (
    *_CASE,
    *_TIMES,
    "package_us",
    "pages_us",
    "copied_us",
    "baseline_gather_us",
    "baseline_combine_us",
    "baseline_whole_us",
    "whole_times_faster",
    "baseline_our_gather_us",
    "flash_mla_us",
    "whole_times_flash_mla",
    "gathered_us",
    "context",
    "gathered_rows",
    "roofline_us",
    "pct_of_roofline",
    *_HOST,
    "baseline_agrees",
)
COMPUTE_CPU_COLUMNS = (*_CASE, "compiled_us", "eager_us", "speedup", "baseline_agrees")
SPARSE_MLA_CPU_COLUMNS = (*COMPUTE_CPU_COLUMNS[:-1], "package_us", COMPUTE_CPU_COLUMNS[-1])

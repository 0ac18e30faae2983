"""Measure the device time of CUDA graphs, and the host time and the kernels of calls."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]

_SAMPLE_MS = 3.0
_SAMPLES = 11
_COLD_SAMPLES = 21
_CALLS_PER_ROUND = 20
_ROUNDS = 15


class Timing(NamedTuple):
    """Microseconds: median, 20th and 80th percentile."""

    median: float
    low: float
    high: float


def summary(samples: Sequence[float]) -> Timing:
    """Return median and spread of samples in microseconds."""
    ranked = sorted(samples)
    last = len(ranked) - 1
    return Timing(statistics.median(ranked), ranked[round(0.2 * last)], ranked[round(0.8 * last)])


class Capture:
    """A CUDA graph of successive ``calls``. It keeps all ``outputs``, so that none share memory."""

    def __init__(self, calls: Sequence[Call], before: Call | None = None) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls[0]()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        if before is not None:
            before()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = [call() for call in calls]

    def device_us(self, before: Call | None = None) -> Timing:
        """Return device time per call, launches inside the graph included.

        ``before``, such as ``memory.ColdCache``, runs untimed before every sample, and keeps the
        device busy until the graph is launched. A sample is then one replay.
        """
        replays = self._replays()
        if before is None:
            return summary([self._sample_us(replays) for _ in range(_SAMPLES)])
        self._sample_us(replays)  # raises the clocks
        calls = len(self.outputs)
        return summary([event_us(self.graph.replay, before) / calls for _ in range(_COLD_SAMPLES)])

    def _replays(self) -> int:
        """Return the number of replays per sample."""
        self.graph.replay()
        return max(1, math.ceil(_SAMPLE_MS * 1e3 / max(event_us(self.graph.replay), 1.0)))

    def _sample_us(self, replays: int) -> float:
        def sample() -> None:
            for _ in range(replays):
                self.graph.replay()

        return event_us(sample) / (replays * len(self.outputs))


def alternating_us(captures: Sequence[Capture]) -> list[Timing]:
    """Return each graph's device time per call; the samples of the graphs alternate.

    A card at its power limit lowers its clocks as it gets warmer. If one kernel were timed after
    the other, the second would look up to a tenth slower.
    """
    replays = [capture._replays() for capture in captures]
    rounds = [
        [capture._sample_us(count) for capture, count in zip(captures, replays, strict=True)]
        for _ in range(_SAMPLES)
    ]
    return [summary(samples) for samples in zip(*rounds, strict=True)]


def event_us(call: Call, before: Call | None = None) -> float:
    """Return the device time of ``call``, after an untimed ``before``."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if before is not None:
        before()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def host_us(call: Call) -> Timing:
    """Return the Python time of a call, as in a server, which never waits for results.

    A round is much shorter than the launch queue. The stream is empty before a round, because some
    copies of the baselines wait for the stream, and this wait would count as the baseline's time.
    """
    samples: list[float] = []
    for _ in range(_ROUNDS + 1):  # the first round only fills the allocator's caches
        torch.cuda.synchronize()
        samples.append(_round_us(call, _CALLS_PER_ROUND))
    torch.cuda.synchronize()
    return summary(samples[1:])


def wall_us(call: Call, device: torch.device, *, budget_s: float) -> Timing:
    """Return the wall time of a call, up to the end of its work on the device."""

    def finished() -> None:
        call()
        wait(device)

    finished()
    samples: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(samples) < 3 or time.perf_counter() < stop:
        samples.append(_round_us(finished, 1))
    return summary(samples)


def _round_us(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def step_ms(call: Call, device: torch.device, steps: int) -> float:
    """Return milliseconds per call. On a GPU, the host does not wait between calls."""
    call()
    samples, steps = [], steps if device.type == "cuda" else 1
    for _ in range(3):
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            call()
        wait(device)
        samples.append((time.perf_counter() - start) / steps * 1e3)
    return float(statistics.median(samples))


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Activity(NamedTuple):
    """A kernel, copy or fill that ran on the device."""

    name: str
    us: float


def device_activities(call: Call) -> list[Activity]:
    """Return the kernels, copies and fills of one call, in order."""
    activities: list[Activity] = []
    for _ in range(2):  # a process's first profile may miss the first kernels
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        events = [
            event
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        ]
        events.sort(key=lambda event: event.time_range.start)
        activities = [Activity(event.name, event.time_range.elapsed_us()) for event in events]
    return activities

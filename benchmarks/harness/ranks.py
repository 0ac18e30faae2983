"""Processes with a GPU each, or on a CPU; rank 0 prints and writes their rows."""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from benchmarks.harness.report import Report, one_line
from benchmarks.harness.timing import event_us
from benchmarks.run import BenchError

_TIMEOUT = timedelta(seconds=570)
"""How long ranks wait while another rank compiles."""
_SAMPLES = 7


@dataclass
class Ranks:
    """The measurements in one process; rank 0 writes the rows."""

    title: ClassVar[str]
    notes: ClassVar[tuple[str, ...]] = ()
    least: ClassVar[int] = 1

    rank: int
    world: int
    device: torch.device
    folder: str  # a folder that all ranks share
    options: argparse.Namespace
    output: Report
    began: float = field(default_factory=time.perf_counter)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def run(self) -> None:
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Print on rank 0, with the seconds since the process began."""
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    def keep(self, row: Any) -> None:
        """Print and write a row on rank 0."""
        shown = {name: value for name, value in vars(row).items() if value is not None}
        self.say(" ".join(f"{name}={_short(value)}" for name, value in shown.items()))
        if self.rank == 0:
            self.output.add(row)

    @contextmanager
    def measured(self, row: Any) -> Iterator[None]:
        """Print and write a row, even if the measurement fails."""
        try:
            yield
        except Exception as error:
            row.error = one_line(error)
        self.keep(row)


def run_ranks(
    kind: type[Ranks], options: argparse.Namespace, device: torch.device, world: int | None
) -> None:
    """Measure in ``world`` processes: by default one per GPU, or two on a CPU."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    world = world or gpus or 2
    if world < kind.least or (gpus is not None and world > gpus):
        text = f"it takes {kind.least} ranks or more with a GPU each, got {world}"
        raise BenchError(f"{options.bench}: {text}")
    output, is_complete = Report(options, device), True
    output.stamp["device"] = f"{world} x {output.stamp['device']}"
    start: Any = importlib.import_module("torch.multiprocessing").spawn
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # for the weights of models
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        try:
            start(_process, (world, device.type, folder, kind, options, output), nprocs=world)
        except Exception as error:  # the table still shows earlier rows
            print(error, file=sys.stderr, flush=True)
            is_complete = False
    output.read()
    output.finish(kind.title, *kind.notes)
    output.raise_failures()
    if not is_complete:
        raise BenchError(f"{options.bench}: a process failed; its output is above")


def _process(
    rank: int, world: int, device_type: str, folder: str, kind: type[Ranks], *settings: Any
) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(number) for name, number in ranks.items()})
    device, backend = torch.device(device_type), "gloo"
    if device.type == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(rank)
    threads = settings[0].threads
    if threads or device.type == "cpu":
        torch.set_num_threads(threads or 1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=_TIMEOUT
    )
    with torch.no_grad():
        kind(rank, world, device, folder, *settings).run()
    dist.barrier()
    os._exit(0)  # no teardown, because a captured collective may outlive its group


def replays_us(graph: Any, replays: int) -> float:
    """Time a replay, with equal numbers of replays on all ranks, which wait for each other."""

    def sample() -> None:
        for _ in range(replays):
            graph.replay()

    samples = []
    for _ in range(_SAMPLES + 1):  # drop the first sample, which raises the clocks
        dist.barrier()  # the untimed replay below waits for all ranks too
        samples.append(event_us(sample, graph.replay) / replays)  # an untimed replay aligns ranks
    return statistics.median(samples[1:])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

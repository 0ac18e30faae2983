"""Runs a function in several processes with a process group, as torchrun would."""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.support import cpu_seconds

_starts = itertools.count(1)
IMPORTED = [
    "tests.support.once",
    "tests.support.quick",
    "tests.support.unprobed",
    "dsv4_ops.integrations.transformers",
    "dsv4_ops.testing.models",
    "torch._dynamo.testing",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
]


def run_ranks(
    world: int,
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    seconds: float = 60,
    together: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """What ``function(rank, *args)`` returns on every rank; raises with the tracebacks of
    those that fail.

    Args:
        world: Number of processes.
        function: Function of a module, so that the processes find it.
        folder: Empty folder of the test, where they meet.
        seconds: Timeout of a collective.
        together: Whether ranks leave together; if not, who returns is gone.
        backend: Of the group; "nccl" gives each process a GPU.
    """
    given = (world, function, str(folder), args, seconds, together, backend)
    # importing torch and the models takes longer than most ranks run: they are forked from a
    # process that did it once, which never touches a GPU
    multiprocessing.set_forkserver_preload(IMPORTED)
    method = "forkserver" if backend == "gloo" else "spawn"
    multiprocessing.start_processes(_run, given, nprocs=world, join=True, start_method=method)
    results = [torch.load(_result(folder, rank), weights_only=False) for rank in range(world)]
    if method == "forkserver":  # else they are children, whom the system counts
        for _, _, taken in results:
            for pid, seconds in taken.items():
                cpu_seconds.add(pid, seconds)
    failed = [f"rank {rank}: {error}" for rank, (_, error, _) in enumerate(results) if error]
    assert not failed, "\n".join(failed)
    return [found for found, _, _ in results]


def start_forked(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """As ``torch.multiprocessing.spawn``, forked from the process that ``run_ranks`` takes."""
    pid = forkserver._forkserver._forkserver_pid
    before = cpu_seconds.of_process(pid, children=True) if pid else 0.0
    multiprocessing.set_forkserver_preload(IMPORTED)
    multiprocessing.start_processes(function, args, nprocs=nprocs, start_method="forkserver")
    pid = forkserver._forkserver._forkserver_pid
    taken = cpu_seconds.of_process(pid, children=True) - before
    cpu_seconds.add(pid, cpu_seconds.of_process(pid))
    cpu_seconds.add(-next(_starts), taken)


def gpu_ranks() -> int:
    """Ranks of a test on GPUs: one each on 4 GPUs, or on 2."""
    return 4 if torch.cuda.device_count() >= 4 else 2


def free_collectives() -> None:
    """Let gloo's threads free the tensors of eager collectives, before a package runs: torch keeps
    Python's lock while one runs (pytorch/pytorch#197516), and for that they need it."""
    dist.barrier()
    time.sleep(0.2)


def of_ranks(package: Callable[..., Any]) -> Callable[..., Any]:
    """``package`` as docs/limits.md says to run one on CPUs. Without inference mode its collectives
    go through torch's autograd formulas, which are Python: gloo's threads would need the lock for
    their tensors, too."""
    run: Callable[..., Any] = torch.inference_mode()(package)
    return run


def left_alone(rank: int, call: Callable[[], Any]) -> float | str:
    """Rank 1 leaves behind a call of both; rank 0 says how long its next one took to raise."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        return "left"
    start = time.perf_counter()
    try:
        call()
        torch.cuda.synchronize()
    except RuntimeError:
        return time.perf_counter() - start
    return "ended without the other rank"


def check_left_alone(function: Callable[..., Any], folder: Path) -> None:
    """``function(rank, 2)``, which ends in ``left_alone``, raises soon after the timeout."""
    seconds, left = run_ranks(2, function, folder, 2, backend="nccl", seconds=5, together=False)
    assert left == "left"
    assert 4 < seconds < 20


def _result(folder: Path | str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"


def _run(
    rank: int,
    world: int,
    function: Callable[..., Any],
    folder: str,
    args: Any,
    seconds: float,
    together: bool,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    found, error = None, ""
    try:
        found = function(rank, *args)
        if together:
            dist.barrier()  # who leaves earlier takes its sockets along
    except Exception:
        error = traceback.format_exc()
    taken = {pid: cpu_seconds.of_process(pid) for pid in (os.getpid(), os.getppid())}
    torch.save((found, error, taken), _result(folder, rank))
    # without a destroy that waits for ranks that died
    os._exit(0)

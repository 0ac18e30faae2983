"""Run a function in several processes with a process group, as torchrun would."""

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
    "tests.support.once", "tests.support.quick", "tests.support.unprobed",
    "dsv4_ops.integrations.transformers", "dsv4_ops.testing.models", "torch._dynamo.testing",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
]  # fmt: skip


def run_ranks(
    world: int,
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    seconds: float = 60,
    together: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """Return the results of ``function(rank, *args)`` on all ranks, or raise with the tracebacks of
    failed ranks.

    Args:
        world: Number of processes.
        function: A function at module level, so that the processes can import it.
        folder: An empty folder of the test, for files that the ranks share.
        seconds: Timeout of a collective.
        together: Whether ranks exit together; if not, a rank exits when its function returns.
        backend: Backend of the group; "nccl" gives each process a GPU.
    """
    given = (world, function, str(folder), args, seconds, together, backend)
    # imports of torch and the models take longer than most ranks run, so ranks are forked from a
    # process that has imported them once and never touches a GPU
    multiprocessing.set_forkserver_preload(IMPORTED)
    method = "forkserver" if backend == "gloo" else "spawn"
    multiprocessing.start_processes(_run, given, nprocs=world, join=True, start_method=method)
    results = [torch.load(_result(folder, rank), weights_only=False) for rank in range(world)]
    if method == "forkserver":  # the system counts spawned ranks
        for _, _, taken in results:
            for pid, seconds in taken.items():
                cpu_seconds.add(pid, seconds)
    failed = [f"rank {rank}: {error}" for rank, (_, error, _) in enumerate(results) if error]
    assert not failed, "\n".join(failed)
    return [found for found, _, _ in results]


def start_forked(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Like ``torch.multiprocessing.spawn``, but fork from the same process as ``run_ranks``."""
    pid = forkserver._forkserver._forkserver_pid
    before = cpu_seconds.of_process(pid, children=True) if pid else 0.0
    multiprocessing.set_forkserver_preload(IMPORTED)
    multiprocessing.start_processes(function, args, nprocs=nprocs, start_method="forkserver")
    pid = forkserver._forkserver._forkserver_pid
    taken = cpu_seconds.of_process(pid, children=True) - before
    cpu_seconds.add(pid, cpu_seconds.of_process(pid))
    cpu_seconds.add(-next(_starts), taken)


def gpu_ranks() -> int:
    """Return the number of ranks of a test on GPUs: 4 if there are 4 GPUs, else 2."""
    return 4 if torch.cuda.device_count() >= 4 else 2


def free_collectives() -> None:
    """Let gloo's threads free the tensors of eager collectives before a package runs: they need
    Python's lock, which torch holds while a package runs (pytorch/pytorch#197516)."""
    dist.barrier()
    time.sleep(0.2)


def of_ranks(package: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``package`` in inference mode, as docs/limits.md says for CPUs. Otherwise its
    collectives run torch's autograd formulas, which are Python code: gloo's threads would need
    Python's lock for the tensors of these collectives, too."""
    run: Callable[..., Any] = torch.inference_mode()(package)
    return run


def left_alone(rank: int, call: Callable[[], Any]) -> float | str:
    """Call on two ranks and let rank 1 exit; return how long rank 0's next call waits."""
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
    """Check that ``function(rank, 2)``, which ends in ``left_alone``, raises after the timeout."""
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
    place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **place)
    found, error = None, ""
    try:
        found = function(rank, *args)
        if together:
            dist.barrier()  # a rank that exits earlier would close its sockets
    except Exception:
        error = traceback.format_exc()
    taken = {pid: cpu_seconds.of_process(pid) for pid in (os.getpid(), os.getppid())}
    torch.save((found, error, taken), _result(folder, rank))
    # exit without destroy_process_group, which would wait for dead ranks
    os._exit(0)

"""Inductor's compile workers, which compile the kernels of graphs and our own kernels."""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import PriorityQueue
from threading import Semaphore, Thread
from typing import Any

import torch

Wait = Callable[[], Any]
"""A function that waits for a job and returns the job's result."""


def compile_workers() -> Callable[..., Wait] | None:
    """Return a function that submits jobs to a compile worker; None if
    TORCHINDUCTOR_COMPILE_THREADS or the machine allows only one compile at a time.

    The function takes the job's function, its arguments, and ``urgent``: jobs that are not urgent
    start after all urgent jobs. A job becomes urgent when the caller waits for it.
    """
    from dsv4_ops.lowering import _compat

    set_triton_folder()
    if _compat.get_compile_threads() <= 1:
        return None
    # set now, as Inductor does later, because file names depend on the release of ptxas
    _compat.set_ptxas_path()

    def submit(function: Callable[..., Any], *args: Any, urgent: bool = True) -> Wait:
        _compat.AsyncCompile.process_pool()  # the pool starts with the first job
        return _sender(_compat.get_compile_threads()).send(function, args, urgent)

    return submit


def set_triton_folder() -> None:
    """Let Triton use Inductor's folder for the first GPU. A folder that the user has set stays.

    Inductor would set a folder per GPU at its first kernel. If the folder changed then, launches
    would not find the kernels that workers compiled before. Processes with a GPU each share the
    folder of the first one, so that they need not compile each kernel again.
    """
    from dsv4_ops.lowering import _compat

    if "TRITON_CACHE_DIR" not in os.environ and torch.cuda.is_available():
        os.environ["TRITON_CACHE_DIR"] = _compat.triton_cache_dir(0)


def start_workers() -> None:
    """Start the compile workers in the background; their start takes seconds."""
    if compile_workers() is not None:
        from dsv4_ops.lowering import _compat

        _compat.AsyncCompile.use_process_pool()


@contextmanager
def kernels_in_workers() -> Iterator[None]:
    """Let Inductor wait for its compile workers while they start. Otherwise Inductor compiles the
    first kernels in this process, one after the other."""
    from dsv4_ops.lowering import _compat

    compiler: Any = _compat.AsyncCompile
    # torch's own method, even if another thread has replaced it and restores it first
    compile_kernel = vars(compiler.triton).get(_REPLACED, compiler.triton)
    waits = True

    @functools.wraps(compile_kernel)
    def wait_and_compile(self: Any, *args: Any, **settings: Any) -> Any:
        nonlocal waits
        if waits:
            try:
                self.wait_pool_ready(_MOST_SECONDS)
            except Exception:  # without workers, this process compiles
                waits = False
        return compile_kernel(self, *args, **settings)

    vars(wait_and_compile)[_REPLACED] = compile_kernel
    compiler.triton = wait_and_compile
    try:
        yield
    finally:
        compiler.triton = compile_kernel


_MOST_SECONDS = 60
"""Maximum time to wait for the workers' start."""

_REPLACED = "dsv4_ops_replaced"
"""Attribute of our method that holds torch's method."""


class _Sender:
    """A thread that sends jobs to the pool: first those that a launch waits for, then urgent jobs.

    A graph waits for its kernels, which Inductor sends to the same pool. So a quarter of the
    workers take none of our jobs. The ranks on a machine have a pool each, but share the cores and
    Triton's folder: each rank fills a part of its pool, and first sends its share of the jobs.

    The thread is a daemon, so that a process can end before all jobs are sent.
    """

    def __init__(self, workers: int) -> None:
        self._jobs: PriorityQueue[Any] = PriorityQueue()
        self._order = itertools.count()
        self._rank, self._ranks = _local_ranks()
        if self._ranks > 1:  # Inductor starts a worker per core, but at most 32, in each rank
            workers = min(workers, available_cores())
        self._idle = Semaphore(max(workers * 3 // 4, 1))
        Thread(target=self._run, name="dsv4_ops_jobs", daemon=True).start()

    def send(self, function: Callable[..., Any], args: tuple[Any, ...], urgent: bool) -> Wait:
        sent: Future[Future[Any]] = Future()
        is_ours = zlib.crc32(repr(args).encode()) % self._ranks == self._rank

        def queue(is_awaited: bool) -> None:
            place = (not is_awaited, not urgent, not is_ours, next(self._order))
            self._jobs.put((*place, sent, function, args))

        def wait() -> Any:
            if not sent.done():
                queue(True)
            return sent.result().result()

        queue(False)
        return wait

    def _run(self) -> None:
        from dsv4_ops.lowering import _compat

        while True:
            self._idle.acquire()
            *_, sent, function, args = self._jobs.get()
            if sent.done():  # it was queued again when it became urgent
                self._idle.release()
                continue
            try:
                # wait here: before the pool's process has imported torch, a few jobs would fill its
                # pipe, and Inductor, which uses the same pipe, would block
                _compat.AsyncCompile.wait_pool_ready()
                job = _compat.AsyncCompile.process_pool().submit(function, *args)
            except Exception as error:
                self._idle.release()
                sent.set_exception(error)
            else:
                job.add_done_callback(lambda _: self._idle.release())
                sent.set_result(job)


def _local_ranks() -> tuple[int, int]:
    """Return the rank of this process on this machine, and the number of ranks here, as torchrun
    passes them."""
    try:
        rank, ranks = (int(os.environ[f"LOCAL_{name}"]) for name in ("RANK", "WORLD_SIZE"))
    except (KeyError, ValueError):
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def available_cores() -> int:
    """Return this process's share of the cores on which it may run. The ranks on this machine share
    these cores, so ranks that are bound to cores of their own use fewer workers than others."""
    return _cores() // _local_ranks()[1]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _sender(workers: int) -> _Sender:
    return _Sender(workers)


if hasattr(os, "register_at_fork"):  # a fork has no threads, and Inductor gives it a new pool
    os.register_at_fork(after_in_child=_sender.cache_clear)

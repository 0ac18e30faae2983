"""Inductor's compile workers, which compile the kernels of graphs and also ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Wait = Callable[[], Any]
"""A function that waits for a job and returns the job's result."""


def compile_workers() -> Callable[..., Wait] | None:
    """Return a function that submits jobs to a compile worker; None if
    TORCHINDUCTOR_COMPILE_THREADS or the machine allows only one compile at a time."""
    from dsv4_ops.lowering import _compat

    if _compat.get_compile_threads() <= 1:
        return None
    # set now, as Inductor does later, because file names depend on the release of ptxas
    _compat.set_ptxas_path()

    def submit(function: Callable[..., Any], *args: Any) -> Wait:
        _compat.AsyncCompile.process_pool()  # starts with the first job
        sent: Future[Future[Any]] = _sender().submit(_send, function, *args)
        return lambda: sent.result().result()

    return submit


def _send(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Send a job after the pool's process has imported torch. Before the import is done, a few jobs
    would fill the pipe to the process, and Inductor, which uses the same pipe, would wait."""
    from dsv4_ops.lowering import _compat

    _compat.AsyncCompile.wait_pool_ready()
    job: Future[Any] = _compat.AsyncCompile.process_pool().submit(function, *args)
    return job


@functools.cache
def _sender() -> ThreadPoolExecutor:
    """Return a thread that waits for the pool and sends jobs."""
    return ThreadPoolExecutor(1, thread_name_prefix="dsv4_ops_jobs")

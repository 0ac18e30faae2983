"""Inductor's compile workers, which compile our kernels besides those of graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Wait = Callable[[], Any]
"""Waits for a job and returns its result."""


def compile_workers() -> Callable[..., Wait] | None:
    """Return a function that submits jobs to a compile worker; None if
    TORCHINDUCTOR_COMPILE_THREADS or the machine allows one compile at a time."""
    from dsv4_ops.lowering import _compat

    if _compat.get_compile_threads() <= 1:
        return None
    # as Inductor does later: names of files depend on the release of ptxas
    _compat.set_ptxas_path()

    def submit(function: Callable[..., Any], *args: Any) -> Wait:
        _compat.AsyncCompile.process_pool()  # starts with the first job
        sent: Future[Future[Any]] = _sender().submit(_send, function, *args)
        return lambda: sent.result().result()

    return submit


def _send(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Send a job once the pool's process has imported torch. Before that, a few jobs would fill the
    process's pipe, and Inductor, which uses it too, would wait."""
    from dsv4_ops.lowering import _compat

    _compat.AsyncCompile.wait_pool_ready()
    job: Future[Any] = _compat.AsyncCompile.process_pool().submit(function, *args)
    return job


@functools.cache
def _sender() -> ThreadPoolExecutor:
    """A thread that waits for the pool and sends jobs."""
    return ThreadPoolExecutor(1, thread_name_prefix="dsv4_ops_jobs")

"""Inductor's compile workers, which compile our kernels besides those of graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Wait = Callable[[], Any]
"""Waits for a job and returns its result."""


def compile_workers() -> Callable[..., Wait] | None:
    """Return what runs a function in a compile worker; None if TORCHINDUCTOR_COMPILE_THREADS, or
    the machine, allows one compile at a time."""
    from dsv4_ops.lowering import _compat

    if _compat.get_compile_threads() <= 1:
        return None
    _compat.set_ptxas_path()  # as Inductor does later: files of other releases have other names
    pool = _compat.AsyncCompile.process_pool()

    def submit(function: Callable[..., Any], *args: Any) -> Wait:
        sent: Future[Future[Any]] = _sender().submit(pool.submit, function, *args)
        return lambda: sent.result().result()

    return submit


@functools.cache
def _sender() -> ThreadPoolExecutor:
    """A thread that sends jobs: the pool takes none until its process has imported torch."""
    return ThreadPoolExecutor(1, thread_name_prefix="dsv4_ops_jobs")

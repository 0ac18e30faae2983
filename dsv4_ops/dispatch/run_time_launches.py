"""Whether a graph with symbolic sizes calls our ops, or contains the launches of their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CALLS: ContextVar[bool] = ContextVar("run_time_launches", default=False)


def are_on() -> bool:
    """Whether this trace keeps ops with symbolic sizes as calls."""
    return _CALLS.get()


@contextmanager
def run_time_launches() -> Iterator[None]:
    """Let traces keep an op with symbolic sizes as a call, if the op has a CUDA kernel.

    A launcher chooses tiles, splits and the number of programs by the sizes. In a trace with
    symbolic sizes, a launcher can only choose what works for all sizes; in a call, it chooses by
    the real sizes, as in eager mode. Calls also compile each kernel once per process instead of
    once per graph, and CUDA graphs hide the host time of calls. AOTInductor packages always contain
    the launches, because a package cannot call Python.
    """
    token = _CALLS.set(True)
    try:
        yield
    finally:
        _CALLS.reset(token)

"""Whether a graph of symbolic sizes calls ops that have kernels, or holds their launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CALLS: ContextVar[bool] = ContextVar("run_time_launches", default=False)


def are_on() -> bool:
    """Whether what is traced now leaves launches of symbolic sizes to calls of their ops."""
    return _CALLS.get()


@contextmanager
def run_time_launches() -> Iterator[None]:
    """Have what is traced keep an op whose sizes are symbols, if it has a kernel on CUDA.

    A launcher chooses tiles, splits and the number of programs by sizes. From a symbol it can only
    choose what works for every size. A call chooses by the real size, as an eager call does; each
    kernel is compiled once a process instead of once a graph; and a CUDA graph hides its host time.
    Packages, which have no Python to call, hold launches all the same.
    """
    token = _CALLS.set(True)
    try:
        yield
    finally:
        _CALLS.reset(token)

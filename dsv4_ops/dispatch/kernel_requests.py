"""Whether fake calls of ops ask for the kernels that a real call would launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dsv4_ops.core.registry import TRITON, OpSpec

_log = logging.getLogger(__name__)
_LAUNCHER: ContextVar[Any] = ContextVar("kernel_requests", default=None)


def are_on() -> bool:
    """Whether fake calls in this context ask for kernels."""
    return _LAUNCHER.get() is not None


@contextmanager
def kernel_requests(launcher: Any) -> Iterator[None]:
    """Run the launchers of fake calls with ``launcher``, whose launches only compile kernels."""
    token = _LAUNCHER.set(launcher)
    try:
        yield
    finally:
        _LAUNCHER.reset(token)


def request(spec: OpSpec, impl: str, args: Any, kwargs: Any) -> None:
    """Ask for the kernels of a fake call that ``impl`` would run."""
    if impl == TRITON:
        ask(spec.name, lambda launcher: spec.launcher(impl)(launcher, *args, **kwargs))


def ask(name: str, launch: Callable[[Any], Any]) -> None:
    """Ask for the kernels that ``launch(launcher)`` launches, if fake calls in this context do.

    If ``launch`` cannot run with fake tensors, no kernels are requested, and each kernel is
    compiled at its first launch.
    """
    if not are_on():
        return
    try:
        launch(_LAUNCHER.get())
    except Exception:
        _log.debug("no kernels of %s were requested", name, exc_info=True)

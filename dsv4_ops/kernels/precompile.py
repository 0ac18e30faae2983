"""Compile kernels in other processes before they are launched.

Triton compiles a kernel at its first launch, in the caller's process, so kernels compile one after
the other. ``REQUESTED`` replaces the launcher of a call and launches nothing: each kernel that the
call would launch becomes a job. A worker compiles the kernel, and the C code that launches it, into
Triton's cache folder. The first launch waits for the kernel's job, then loads the binary from that
folder. If a job fails, the launch compiles the kernel, so a failure costs only time.
"""

from __future__ import annotations

import importlib
import io
import logging
import operator
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from dsv4_ops.dispatch.kernel_requests import kernel_requests
from dsv4_ops.kernels.common.triton_compat import (
    cache_folder,
    forget_ptxas,
    is_compiled,
)
from dsv4_ops.kernels.launcher import Launcher, options_of

Wait = Callable[[], Any]
"""A function that waits for a job."""

Submit = Callable[..., Wait]
"""A function that runs another function in a worker, and returns a ``Wait``."""

_log = logging.getLogger(__name__)
_SUBMIT: ContextVar[Submit | None] = ContextVar("precompile_submit", default=None)


@contextmanager
def requests(submit: Submit) -> Iterator[None]:
    """Let fake calls of ops submit their kernels to workers."""
    token = _SUBMIT.set(submit)
    try:
        with kernel_requests(REQUESTED):
            yield
    finally:
        _SUBMIT.reset(token)


class _Request:
    """A kernel whose launches become jobs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> None:
            if isinstance(self.kernel, JITFunction) and _Jobs.of(self.kernel) is not None:
                # pass options in the order of a launch: Triton's key contains them as text
                named = options_of(self.kernel, args) | options
                named = {name: _typed(value) for name, value in named.items()}
                self.kernel.warmup(*map(_typed, args), grid=grid, **named)

        return ask


REQUESTED = Launcher(_Request, aligns_inputs=True)
"""Request kernels instead of launching them. Tensors are assumed to be aligned, because torch
allocates aligned memory."""


def _typed(value: Any) -> Any:
    """Replace tensors by their dtypes, for which Triton compiles a kernel."""
    if isinstance(value, Tensor):
        return MockTensor(value.dtype)
    if isinstance(value, tuple):
        values = map(_typed, value)
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    return value


class _Jobs:
    """The jobs of a kernel. This object replaces the kernel's ``_do_compile``, which Triton calls
    if a launch finds no binary."""

    def __init__(self, kernel: Any) -> None:
        self.compile = kernel._do_compile
        self.kernel, self.jobs = kernel, dict[Any, Wait | None]()

    @classmethod
    def of(cls, kernel: Any) -> _Jobs | None:
        """Return the jobs of a kernel; None if a worker could not import the kernel."""
        jobs = vars(kernel).get("_do_compile")
        if isinstance(jobs, cls):
            return jobs
        if _named(*_name(kernel)) is not kernel or not hasattr(kernel, "_do_compile"):
            return None
        kernel._do_compile = jobs = cls(kernel)
        return jobs

    def __call__(
        self,
        key: Any,
        signature: Any,
        device: Any,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> Any:
        submit = _SUBMIT.get()
        if submit is None:
            job = self.jobs.pop((device, key), None)
            if job is not None:
                self._wait(job)
            return self.compile(key, signature, device, constexprs, options, attrs, warmup)
        if (device, key) not in self.jobs:
            target = self.kernel.device_caches[device][2]
            source = (self.kernel.ASTSource, self.kernel, signature, constexprs, attrs)
            if is_compiled(source[0](*source[1:]), target, options):
                self.jobs[device, key] = None
            else:
                content = _pickled((*source, target, options.__dict__, _environment()))
                self.jobs[device, key] = submit(compile_kernel, content)
        return None

    def _wait(self, job: Wait) -> None:
        try:
            job()
        except Exception as error:
            _log.info("a worker did not compile %s: %s", self.kernel.fn.__name__, error)


def compile_kernel(content: bytes) -> None:
    """Compile a kernel in a worker, into Triton's cache folder."""
    make, kernel, signature, constexprs, attrs, target, options, environment = _Unpickler(
        io.BytesIO(content)
    ).load()
    if environment != _environment():
        for name in _environment().keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        forget_ptxas()
    source = make(kernel, signature, constexprs, attrs)
    compiled = triton.compile(source, target=target, options=options)
    with suppress(Exception):  # up to Triton 3.7, a C compiler builds the launch code
        driver.active.launcher_cls(compiled.src, compiled.metadata)


def _environment() -> dict[str, str]:
    """Return Triton's settings, on which the names of its cache files depend."""
    named = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    return named | {"TRITON_CACHE_DIR": cache_folder()}


def _name(function: Any) -> tuple[str, str]:
    return function.fn.__module__, function.fn.__qualname__


def _named(module: str, name: str) -> Any:
    with suppress(AttributeError, KeyError):
        return operator.attrgetter(name)(sys.modules[module])
    return None


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a kernel or device function as its name and its key in Triton's cache.

    The worker must use this process's key. Up to Triton 3.8, a kernel's key depends on which other
    functions already have keys, and a worker may have keys of different functions.
    """

    def persistent_id(self, value: Any) -> Any:
        is_function = hasattr(value, "cache_key") and hasattr(value, "fn")
        return (*_name(value), value.cache_key) if is_function else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, named: tuple[str, str, str]) -> Any:
        module, name, key = named
        importlib.import_module(module)
        function = _named(module, name)
        function.hash = key
        return function

"""Ops that a graph keeps whole, and their fakes. Each op is ours or another library's."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._C import DispatchKey

_T = TypeVar("_T")

_library = torch.library.Library("dsv4_ops", "FRAGMENT")
_fragments: dict[str, torch.library.Library] = {}
_described: set[Any] = set()

_AUTOGRAD = (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA)


def define(
    name: str, schema: str, call: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag
) -> Any:
    """Define an op of ours that a graph keeps whole; the op runs ``call``."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4_ops::{name}", fake, lib=_library)
    return getattr(torch.ops.dsv4_ops, name).default


def fields(call: Any) -> str:
    """Return the arguments of a schema, from the fields of a NamedTuple."""
    kinds = {Tensor: "Tensor", Tensor | None: "Tensor?"}
    hints = get_type_hints(call).items()
    return ", ".join(f"{kinds.get(kind) or kind.__name__} {name}" for name, kind in hints)


def trailing(op: Any, count: int) -> tuple[None, ...]:
    """Return a None for each argument of ``op`` after the first ``count``. Builds of a library
    differ in the number of these arguments."""
    return (None,) * (len(op._schema.arguments) - count)


def describe(op: Any, fake: Callable[..., Any]) -> None:
    """Register a fake for a library's op, so that Inductor can call it.

    vLLM's build registers functions for no particular device. Torch takes such a function for a
    composition of ops and traces into it, which fails because the function reads addresses. So this
    function turns off the op's autograd and decomposition; a graph then keeps the op whole.
    """
    if op in _described:
        return
    _described.add(op)
    name = op.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(name, "CompositeImplicitAutograd"):
        namespace = op.namespace
        if namespace not in _fragments:
            _fragments[namespace] = torch.library.Library(namespace, "IMPL")
        fragment, short = _fragments[namespace], op._schema.name.partition("::")[2]
        fragment.impl(short, torch.library.fallthrough_kernel, "Autograd")
        registrar: Any = fragment.m
        registrar.impl(short, "Meta", fake, False)  # Library.impl refuses a composition's fake
        op.py_impl(DispatchKey.CompositeImplicitAutograd)(lambda *args, **kwargs: NotImplemented)
        for key in _AUTOGRAD:
            op.py_impl(key)(_below_autograd(op))
    elif not has(name, "Meta") and not _has_fake(name):
        torch.library.register_fake(name, fake)


def _below_autograd(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return call


def _has_fake(name: str) -> bool:
    return torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


def kernel_module(device: torch.device, module: str = "external.sanitize") -> Any:
    """Return ``module``, whose kernels run before and after a library's call; None if no kernel
    runs on ``device``."""
    if device.type not in ("cuda", "meta") and not _interpreted():
        return None
    try:
        return importlib.import_module(f"dsv4_ops.kernels.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return None


def kernel_or_reference(
    function: Callable[..., _T],
    launch: Any,
    device: torch.device,
    module: str = "external.sanitize",
) -> Callable[..., _T]:
    """Return the launcher in ``module`` with the name of ``function``; ``function`` itself if no
    kernel runs on ``device``."""
    launchers = kernel_module(device, module)
    if launchers is None:
        return function
    return functools.partial(getattr(launchers, function.__name__), launch)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"

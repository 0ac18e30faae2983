"""Ops of other libraries as torch sees them: whole calls in a graph, with the shapes of their
results."""

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
    """An op of ours that stays whole in a graph and makes one call of a library."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4_ops::{name}", fake, lib=_library)
    return getattr(torch.ops.dsv4_ops, name).default


def fields(call: Any) -> str:
    """Arguments of a schema, from the fields of a NamedTuple."""
    kinds = {Tensor: "Tensor", Tensor | None: "Tensor?"}
    hints = get_type_hints(call).items()
    return ", ".join(f"{kinds.get(kind) or kind.__name__} {name}" for name, kind in hints)


def trailing(op: Any, given: int) -> tuple[None, ...]:
    """None for every optional argument that a build has behind those that are given."""
    return (None,) * (len(op._schema.arguments) - given)


def describe(op: Any, fake: Callable[..., Any]) -> None:
    """Tell torch what a library's op returns, so that Inductor can call it.

    vLLM's build registers functions without a device: torch takes them for compositions of ops that
    it may trace into, and they read addresses. Keeping autograd from them, and answering that there
    is no decomposition, leaves them whole.
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
        registrar.impl(short, "Meta", fake, False)  # Library.impl refuses it for compositions
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


def kernels(device: torch.device, module: str = "external.sanitize") -> Any:
    """The ``module`` of kernels that prepare and finish calls; None where none runs."""
    if device.type not in ("cuda", "meta") and not _interpreted():
        return None
    try:
        return importlib.import_module(f"dsv4_ops.kernels.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return None


def launching(
    function: Callable[..., _T],
    launch: Any,
    device: torch.device,
    module: str = "external.sanitize",
) -> Callable[..., _T]:
    """``function`` as the kernel of its name in ``module``, where there is one."""
    found = kernels(device, module)
    if found is None:
        return function
    return functools.partial(getattr(found, function.__name__), launch)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"

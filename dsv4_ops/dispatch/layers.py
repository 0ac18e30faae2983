"""Load by name what other layers hold for an op: kernels, lowerings and cases only when needed.

A name in a string counts as an import: no other module names a layer above its own in one.
"""

from __future__ import annotations

import importlib
from typing import Any

from dsv4_ops.core.registry import TRITON, OpSpec

_FOLDERS = {"testing": "testing.cases"}
"""Folders whose names are not their layers'."""


def module_of(layer: str, stem: str) -> str:
    """Name of the module of ``layer`` that holds the ops of a stem."""
    return f"dsv4_ops.{_FOLDERS.get(layer, layer)}.{stem}"


def function_of(layer: str, stem: str, name: str) -> Any:
    """What a module of ``layer`` calls ``name``."""
    return getattr(importlib.import_module(module_of(layer, stem)), name)


def load(spec: OpSpec, layer: str) -> Any:
    """What ``layer`` holds for the op: ``ops``, ``kernels``, ``lowering`` or ``testing``."""
    if layer == "lowering":
        return importlib.import_module("dsv4_ops.lowering.kinds").lowering_of(spec)
    return function_of(layer, spec.stem, spec.name)


def launcher(spec: OpSpec, impl: str) -> Any:
    """What runs the op with our kernel, or with a library."""
    if impl == TRITON:
        return load(spec, "kernels")
    return getattr(adapter(impl), spec.name)


def adapter(library: str) -> Any:
    """``kernels/external/<library>.py``."""
    return importlib.import_module(f"dsv4_ops.kernels.external.{library}")


def load_kernels(stem: str) -> None:
    """Import the launchers of a stem, and so define the ops that they trace."""
    importlib.import_module(module_of("kernels", stem))


def eager() -> Any:
    """The launcher of calls outside a compiler."""
    return importlib.import_module("dsv4_ops.kernels.launcher").EAGER

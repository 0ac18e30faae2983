"""Load the parts of an op from other layers, by name, when they are needed.

An import by a string is easily overlooked, so only this module may import a higher layer that way.
"""

from __future__ import annotations

import importlib
from typing import Any

from dsv4_ops.core.registry import TRITON, OpSpec

_FOLDERS = {"testing": "testing.cases"}
"""Folder of a layer, if the two names differ."""


def module_of(layer: str, stem: str) -> str:
    """Return the name of the module in ``layer`` that has the ops of a stem."""
    return f"dsv4_ops.{_FOLDERS.get(layer, layer)}.{stem}"


def function_of(layer: str, stem: str, name: str) -> Any:
    """Return the attribute ``name`` of a module in ``layer``."""
    return getattr(importlib.import_module(module_of(layer, stem)), name)


def load(spec: OpSpec, layer: str) -> Any:
    """Return the op's part in ``layer``: ``ops``, ``kernels``, ``lowering`` or ``testing``."""
    if layer == "lowering":
        return importlib.import_module("dsv4_ops.lowering.kinds").lowering_of(spec)
    return function_of(layer, spec.stem, spec.name)


def launcher(spec: OpSpec, impl: str) -> Any:
    """Return the function that runs the op with our kernel or with a library."""
    if impl == TRITON:
        return load(spec, "kernels")
    return getattr(adapter(impl), spec.name)


def adapter(library: str) -> Any:
    """Import ``kernels/external/<library>.py``."""
    return importlib.import_module(f"dsv4_ops.kernels.external.{library}")


def load_kernels(stem: str) -> None:
    """Import the launchers of a stem. The import defines the ops that the launchers trace."""
    importlib.import_module(module_of("kernels", stem))


def eager() -> Any:
    """Return the launcher for calls outside a compiler."""
    return importlib.import_module("dsv4_ops.kernels.launcher").EAGER


def launch_plans() -> Any:
    """Return the recorded launches that later calls repeat."""
    return importlib.import_module("dsv4_ops.kernels.launch_plans").PLANS

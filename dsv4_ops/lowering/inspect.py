"""Inspect the code that Inductor generates, and build and load packages with Inductor's
functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_OURS, _LAUNCHES = "torch.ops.dsv4_ops.", "torch.ops.dsv4_ops._hopper_"
_HOPPER_CALL = re.compile(r"= torch\.ops\.dsv4_ops\.(_hopper_\w+)\.default\(")


def opaque_calls(code: str) -> list[str]:
    """Return the lines of generated code that call one of our ops as a whole. Launches of Gluon
    kernels are left out, because ``hopper_calls`` counts them; so are comments, which name the ops
    that a kernel came from."""
    lines = (line.strip() for line in code.replace(_LAUNCHES, "").splitlines())
    return [line for line in lines if _OURS in line and not line.startswith("#")]


def hopper_calls(code: str) -> Counter[str]:
    """Count the calls in generated code that launch a Gluon kernel, keyed by
    ``OpSpec.hopper_call``."""
    return Counter(_HOPPER_CALL.findall(code))


def compile_and_get_code(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Call a ``torch.compile``d function for the first time; return its result and Inductor's
    code."""
    from dsv4_ops.lowering._compat import run_and_get_code

    result, codes = run_and_get_code(function, *args)
    if len(codes) != 1:
        raise RuntimeError(
            f"compile_and_get_code: function must compile to one graph, got {len(codes)}. "
            "Remove the graph break, or pass a function that was not compiled before."
        )
    return result, codes[0]


def build_package(program: torch.export.ExportedProgram, path: Path) -> Path:
    """Compile an exported program to an AOTInductor package at ``path`` (.pt2)."""
    from dsv4_ops.lowering._compat import aoti_compile_and_package

    return Path(aoti_compile_and_package(program, package_path=str(path)))


def load_package(path: Path, *, run_single_threaded: bool = False) -> Callable[..., Any]:
    """Load an AOTInductor package. CUDA graphs can capture a package only if it is loaded with
    ``run_single_threaded``."""
    from dsv4_ops.lowering._compat import aoti_load_package

    loaded: Callable[..., Any] = aoti_load_package(
        str(path), run_single_threaded=run_single_threaded
    )
    return loaded

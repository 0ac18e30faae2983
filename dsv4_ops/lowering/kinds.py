"""The kinds of lowering, as what happens when AOTAutograd traces an op (see
``core/registry.py``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4_ops.core.registry import OPS

_registered: set[Any] = set()
"""Overloads whose lowering Inductor has."""


@dataclass(frozen=True)
class Decompose:
    """Trace ``function`` into the graph instead of the op; Inductor lowers and fuses the aten ops
    it makes."""

    function: Callable[..., Any]
    kind = "decompose"

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with mode:
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class PointwiseIR:
    """Keep the op in the graph and have Inductor lower it with ``function``, which returns Inductor
    IR."""

    function: Callable[..., Any]
    kind = "pointwise"

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # A trace without Inductor (backend="aot_eager", opcheck) needs no lowering, nor the second
        # its import takes.
        if "torch._inductor.lowering" in sys.modules:
            self.register(op)
        return mode.__torch_dispatch__(op, types, args, kwargs)

    def register(self, op: Any) -> None:
        """Tell Inductor about ``function``, once."""
        from dsv4_ops.lowering import _compat

        # Not "op in lowerings": Inductor puts a fallback there for an op that it met opaque.
        if op not in _registered:
            _registered.add(op)
            # None: integers stay what they are, no type promotion among the arguments
            _compat.register_lowering(op, type_promotion_kind=None)(self.function)


@dataclass(frozen=True)
class TritonKernel:
    """On CUDA trace the launcher in ``kernels/<stem>.py``, whose kernel Inductor compiles into the
    graph; elsewhere trace ``function``, as ``Decompose`` does."""

    function: Callable[..., Any]
    kind = "triton"

    def trace(self, mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        with mode:
            if first.device.type != "cuda":
                return self.function(*args, **kwargs)
            launcher = OPS[op._schema.name.partition("::")[2]].station("kernels")
            return launcher(torch.library.wrap_triton, *args, **kwargs)

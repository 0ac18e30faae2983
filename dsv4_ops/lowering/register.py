"""What Inductor is told of ops: once, and where it is loaded. A trace without it
(backend="aot_eager", opcheck) needs no lowering, nor the second its import takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

registered: set[Any] = set()
"""Overloads whose lowering Inductor has."""


def inductor_is_loaded() -> bool:
    """Whether a graph may be lowered in this process."""
    return "torch._inductor.lowering" in sys.modules


def lower_with(op: Any, function: Callable[..., Any]) -> None:
    """Have Inductor lower ``op`` with ``function``, the same in every call."""
    # Not "op in lowerings": Inductor puts a fallback there for an op that it met opaque.
    if op in registered or not inductor_is_loaded():
        return
    from dsv4_ops.lowering import _compat

    registered.add(op)
    # None: integers stay what they are, no type promotion among the arguments
    _compat.register_lowering(op, type_promotion_kind=None)(function)

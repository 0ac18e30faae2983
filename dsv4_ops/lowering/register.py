"""Register lowerings with Inductor, once, if it is loaded. A trace without Inductor
(backend="aot_eager", opcheck) needs no lowering, and saves the second that importing Inductor
takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

registered: set[Any] = set()
"""Overloads with a registered lowering."""


def inductor_is_loaded() -> bool:
    """Whether a graph may be lowered in this process."""
    return "torch._inductor.lowering" in sys.modules


def lower_with(op: Any, function: Callable[..., Any]) -> None:
    """Make Inductor lower ``op`` with ``function``; all calls must pass the same one."""
    # not "op in lowerings": for an op without a lowering, Inductor adds a fallback there
    if op in registered or not inductor_is_loaded():
        return
    from dsv4_ops.lowering import _compat

    registered.add(op)
    # None: no type promotion among the arguments, so integers stay integers
    _compat.register_lowering(op, type_promotion_kind=None)(function)

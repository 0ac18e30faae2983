"""Register lowerings with Inductor, once, if Inductor is loaded. A trace without Inductor
(backend="aot_eager", opcheck) needs no lowering, and should not spend the second that the import of
Inductor takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

registered: set[Any] = set()
"""Overloads with a registered lowering."""


def inductor_is_loaded() -> bool:
    """Return whether Inductor's lowerings are loaded in this process."""
    return "torch._inductor.lowering" in sys.modules


def lower_with(op: Any, function: Callable[..., Any]) -> None:
    """Make Inductor lower ``op`` with ``function``; all calls for an op must pass the same
    function."""
    # not "op in lowerings": Inductor adds a fallback to lowerings for an op without a lowering
    if op in registered or not inductor_is_loaded():
        return
    from dsv4_ops.lowering import _compat

    registered.add(op)
    # None turns off type promotion among the arguments, so integers stay integers
    _compat.register_lowering(op, type_promotion_kind=None)(function)

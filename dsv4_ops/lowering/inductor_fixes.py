"""Fixes for Inductor, which may read a cache before a write to the cache, or after the cache is
freed.

On a CPU, fusion recomputes the loops of a node (``SchedulerNode.recompute_size_and_body``), and
also the node's reads and writes. Up to torch 2.13, this recomputation loses the new name of a
buffer that an earlier node wrote in place (pytorch issue 185509, fixed by pull request 185873). The
two nodes are then no longer ordered. Up to torch 2.11, the recomputation also loses dependencies
that only express an order (issue 177631, pull request 177816). Results are silently wrong: for
example, a step misses rows that it has stored itself. The fixes make earlier releases behave like
later ones.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def fix_scheduler() -> None:
    """Make Inductor keep the order of writes and reads, in this process, from now on."""
    from dsv4_ops.lowering._compat import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_restore(self: Any, *args: Any, **settings: Any) -> None:
        order_only = _order_only(self.read_writes.reads)
        recompute(self, *args, **settings)
        if order_only or self.mutation_renames:
            restored = self.read_writes.with_read(order_only).rename(self.mutation_renames)
            self.set_read_writes(restored)

    SchedulerNode.recompute_size_and_body = recompute_and_restore  # type: ignore[method-assign] # a repair


class _NamedInput:
    """A loop's input to which C++ code refers by the name of a variable."""

    def __init__(self, name: str) -> None:
        self.name = name

    def codegen_reference(self, *_: Any) -> str:
        return self.name


@functools.cache
def fix_while_loop() -> None:
    """Make packages keep the views that a loop reads alive, in this process, from now on.

    In code that torch 2.13 generates, a view, such as a view of a mutated cache, is a temporary:
    the first iteration frees it, and its next use crashes the process.
    """
    from dsv4_ops.lowering._compat import CppWrapperCpu

    generate = CppWrapperCpu.codegen_while_loop

    @functools.wraps(generate)
    def generate_with_names(self: Any, while_loop: Any, *args: Any, **settings: Any) -> Any:
        inputs, named = while_loop.additional_inputs, []
        for place, each in enumerate(inputs):
            reference = each.codegen_reference()
            if isinstance(reference, str) and reference.endswith(")"):
                name = f"{while_loop.get_name()}_input_{place}"
                self.writeline(f"auto {name} = {reference};")
                reference = name
            named.append(_NamedInput(reference))
        while_loop.additional_inputs = named
        try:
            return generate(self, while_loop, *args, **settings)
        finally:
            while_loop.additional_inputs = inputs

    CppWrapperCpu.codegen_while_loop = generate_with_names  # type: ignore[method-assign] # a repair


def _order_only(dependencies: Any) -> Any:
    """Return the dependencies that only express an order, which a new analysis of the loops does
    not find."""
    from dsv4_ops.lowering._compat import StarDep, WeakDep

    return type(dependencies)(
        dependency for dependency in dependencies if isinstance(dependency, (StarDep, WeakDep))
    )

"""Repairs of Inductor, which else reads a cache before it is written, or after it is freed.

On a CPU, fusion recomputes the loops of a node (``SchedulerNode.recompute_size_and_body``), and its
reads and writes with them. In torch up to 2.13 that forgets that a buffer was renamed when a node
before wrote to it in place, so that nothing orders the two any more (pytorch issue 185509, fixed by
pull request 185873); up to 2.11 it forgets dependencies that stand for an order only as well (issue
177631, pull request 177816). Results are silently wrong: a step did not see the rows that it had
stored itself. What is restored here is what later versions restore.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def mend_scheduler() -> None:
    """Have Inductor keep the order of writes and reads, in this process, from now on."""
    from dsv4_ops.lowering._compat import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_restore(self: Any, *args: Any, **settings: Any) -> None:
        kept = _order_only(self.read_writes.reads)
        recompute(self, *args, **settings)
        if kept or self.mutation_renames:
            restored = self.read_writes.with_read(kept).rename(self.mutation_renames)
            self.set_read_writes(restored)

    SchedulerNode.recompute_size_and_body = recompute_and_restore  # type: ignore[method-assign] # a repair


class _Held:
    """An input of a loop, by the name of the variable that holds it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def codegen_reference(self, *_: Any) -> str:
        return self.name


@functools.cache
def mend_while_loop() -> None:
    """Have packages hold the views that a loop reads, in this process, from now on.

    The code of torch 2.13 writes a view, such as that of a cache written to before, as a temporary:
    the first round frees it, and the next use of it ends the process.
    """
    from dsv4_ops.lowering._compat import CppWrapperCpu

    generate = CppWrapperCpu.codegen_while_loop

    @functools.wraps(generate)
    def generate_with_names(self: Any, while_loop: Any, *args: Any, **settings: Any) -> Any:
        given, named = while_loop.additional_inputs, []
        for place, each in enumerate(given):
            reference = each.codegen_reference()
            if isinstance(reference, str) and reference.endswith(")"):
                name = f"{while_loop.get_name()}_input_{place}"
                self.writeline(f"auto {name} = {reference};")
                reference = name
            named.append(_Held(reference))
        while_loop.additional_inputs = named
        try:
            return generate(self, while_loop, *args, **settings)
        finally:
            while_loop.additional_inputs = given

    CppWrapperCpu.codegen_while_loop = generate_with_names  # type: ignore[method-assign] # a repair


def _order_only(dependencies: Any) -> Any:
    """Those that no analysis of the loops finds again."""
    from dsv4_ops.lowering._compat import StarDep, WeakDep

    return type(dependencies)(
        dependency for dependency in dependencies if isinstance(dependency, (StarDep, WeakDep))
    )

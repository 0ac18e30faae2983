"""A repair of Inductor's scheduler, without which it may read a cache before it is written.

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

_done: list[bool] = []


def mend_scheduler() -> None:
    """Have Inductor keep the order of writes and reads, in this process, from now on."""
    if _done:
        return
    from dsv4_ops.lowering._compat import SchedulerNode

    _done.append(True)
    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_restore(self: Any, *args: Any, **settings: Any) -> None:
        kept = _order_only(self.read_writes.reads)
        recompute(self, *args, **settings)
        if kept or self.mutation_renames:
            restored = self.read_writes.with_read(kept).rename(self.mutation_renames)
            self.set_read_writes(restored)

    SchedulerNode.recompute_size_and_body = recompute_and_restore  # type: ignore[method-assign] # a repair


def _order_only(dependencies: Any) -> Any:
    """Those that no analysis of the loops finds again."""
    from dsv4_ops.lowering._compat import StarDep, WeakDep

    return type(dependencies)(
        dependency for dependency in dependencies if isinstance(dependency, (StarDep, WeakDep))
    )

"""Guards of compilers other than torch's own; there is none until such a compiler is imported."""

from __future__ import annotations

from typing import Protocol

from dsv4_ops.core.registry import OpSpec


class Guard(Protocol):
    """What another compiler may do with ops; both methods raise where it would lose a write."""

    def keeps_whole(self, spec: OpSpec) -> bool:
        """Whether the graph that is traced keeps the op, which is then not lowered."""

    def check_fake(self, spec: OpSpec) -> None:
        """Check a call of the fake: it is all that programs show which were decomposed before."""


GUARDS: list[Guard] = []
"""Guards that are asked in every trace."""

"""Hooks for compilers other than torch's; empty until such a compiler is imported."""

from __future__ import annotations

from typing import Protocol

from dsv4_ops.core.registry import OpSpec


class Guard(Protocol):
    """Rules of another compiler; both methods raise if that compiler would lose a write."""

    def keeps_whole(self, spec: OpSpec) -> bool:
        """Whether this trace keeps the op in its graph instead of lowering the op."""

    def check_fake(self, spec: OpSpec) -> None:
        """Check a call of the fake. Programs that are already decomposed reach only the fake."""


GUARDS: list[Guard] = []
"""The guards that every trace calls."""

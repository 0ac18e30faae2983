"""Derive ``__all__`` from the imports of a module that only re-exports names."""

from __future__ import annotations

from types import ModuleType


def public_names(namespace: dict[str, object]) -> list[str]:
    """Return the public names of a module's ``namespace``, without its submodules."""
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    )

"""``__all__`` of modules that only gather names, from their imports."""

from __future__ import annotations

from types import ModuleType


def public_names(namespace: dict[str, object]) -> list[str]:
    """Names that a module's ``namespace`` gives to its users: no submodules, nothing private."""
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    )

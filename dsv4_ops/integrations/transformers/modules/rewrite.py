"""Changes that ``patch`` makes to modules, and the loops that make, refresh and undo these changes.

A ``Rewrite`` is one change of one kind of module. ``patch`` checks and applies all rewrites, an
eager step refreshes them, and ``unpatch`` undoes them, each in one loop over the modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from dsv4_ops.integrations.transformers.modules.replacement import (
    Maker,
    mark,
    unmark,
    unwrapped,
)


class Rewrite(ABC):
    """One change of one kind of module. A ``Rewrite`` holds settings, not modules.

    The loops visit a module before the modules inside this module, so ``apply`` and ``refresh`` may
    change weights of inner modules before other rewrites read these weights.
    """

    attention_only: ClassVar[bool] = False
    """Whether the rewrite changes attention modules only. A loop over all modules takes 0.1 ms per
    layer, too much for a compiled step."""
    copies_weights: ClassVar[bool] = False
    """Whether ``apply`` adds copies of weights. A copy does not follow an in-place change."""

    @abstractmethod
    def applies(self, module: Any) -> bool:
        """Whether the rewrite changes a module."""

    def check(self, op: str, name: str, module: Any) -> None:
        """Raise if a module cannot be changed. ``patch`` calls this method for all modules before
        it changes any module."""
        return None

    @abstractmethod
    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Change a module, and yield the name and the maker of each method to replace."""

    def needs_refresh(self, body: Any) -> bool:
        """Whether changed weights may require a refresh of the model's modules."""
        return False

    def refresh(self, op: str, name: str, module: Any) -> None:
        """Update a module from its weights, before a step."""
        return None

    def restore(self, module: Any) -> None:
        """Undo ``apply``, but do not restore the methods."""
        return None


def check(op: str, model: Any, rewrites: Iterable[Rewrite]) -> None:
    """Raise if any module cannot be changed. Call this function before ``apply``."""
    rewrites = tuple(rewrites)
    for name, module in model.named_modules():
        for rewrite in rewrites:
            if rewrite.applies(module):
                rewrite.check(op, name, module)


def apply(model: Any, rewrites: Iterable[Rewrite]) -> Iterator[tuple[Any, str, Maker]]:
    """Mark and change all modules. Yield the module, name and maker of each method to replace."""
    rewrites = tuple(rewrites)
    for module in list(model.modules()):
        mark(module)
        for rewrite in rewrites:
            if rewrite.applies(module):
                for name, make in rewrite.apply(module):
                    yield module, name, make


def refresh(op: str, body: Any, rewrites: Iterable[Rewrite]) -> None:
    """Update all modules from their weights."""
    rewrites = tuple(each for each in rewrites if each.needs_refresh(body))
    if not rewrites:
        return
    attention_only = all(each.attention_only for each in rewrites)
    for name, module in list(attentions(body) if attention_only else body.named_modules()):
        for rewrite in rewrites:
            if rewrite.applies(module):
                rewrite.refresh(op, name, module)


def restore(model: Any, rewrites: Iterable[Rewrite]) -> None:
    """Undo ``apply`` for all modules, but do not restore the methods."""
    rewrites = tuple(rewrites)
    for module in list(model.modules()):
        for rewrite in rewrites:
            if rewrite.applies(module):
                rewrite.restore(module)
        unmark(module)


def attentions(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the attention module of every layer, without adapters."""
    for index, layer in enumerate(body.layers):
        yield f"layers.{index}.self_attn", unwrapped(layer.self_attn)

"""Changes that ``patch`` makes to modules, and the loops that make, refresh and undo them.

A ``Rewrite`` is one change of one kind of module. ``patch`` checks and applies all rewrites in a
loop over the modules, an eager step refreshes them in another, and ``unpatch`` restores the
modules in a third.
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
    """One change of one kind of module. It has settings, and no modules.

    Modules are visited before the modules inside them, so ``apply`` and ``refresh`` may change the
    weights of inner modules that other rewrites read.
    """

    attention_only: ClassVar[bool] = False
    """Whether it applies to attention modules only. A walk over all modules takes a tenth of a
    millisecond per layer, too much for a compiled step."""
    copies_weights: ClassVar[bool] = False
    """Whether ``apply`` adds copies of weights: a change in place does not reach them."""

    @abstractmethod
    def applies(self, module: Any) -> bool:
        """Whether it changes a module."""

    def check(self, op: str, name: str, module: Any) -> None:
        """Raise if a module cannot be changed; runs before any module is."""
        return None

    @abstractmethod
    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Change a module, and yield the methods to replace: name and maker."""

    def needs_refresh(self, body: Any) -> bool:
        """Whether modules of a model's body may have to follow their weights."""
        return False

    def refresh(self, op: str, name: str, module: Any) -> None:
        """Bring a module up to date with its weights, before a step."""
        return None

    def restore(self, module: Any) -> None:
        """Undo ``apply``, except for the methods."""
        return None


def check(op: str, model: Any, rewrites: Iterable[Rewrite]) -> None:
    """Raise if a module cannot be changed; nothing is changed yet."""
    rewrites = tuple(rewrites)
    for name, module in model.named_modules():
        for rewrite in rewrites:
            if rewrite.applies(module):
                rewrite.check(op, name, module)


def apply(model: Any, rewrites: Iterable[Rewrite]) -> Iterator[tuple[Any, str, Maker]]:
    """Mark and change all modules, and yield the methods to replace: module, name and maker."""
    rewrites = tuple(rewrites)
    for module in list(model.modules()):
        mark(module)
        for rewrite in rewrites:
            if rewrite.applies(module):
                for name, make in rewrite.apply(module):
                    yield module, name, make


def refresh(op: str, body: Any, rewrites: Iterable[Rewrite]) -> None:
    """Bring all modules up to date with their weights."""
    rewrites = tuple(each for each in rewrites if each.needs_refresh(body))
    if not rewrites:
        return
    attention_only = all(each.attention_only for each in rewrites)
    for name, module in list(attentions(body) if attention_only else body.named_modules()):
        for rewrite in rewrites:
            if rewrite.applies(module):
                rewrite.refresh(op, name, module)


def restore(model: Any, rewrites: Iterable[Rewrite]) -> None:
    """Undo what ``apply`` did to all modules, except for the methods."""
    rewrites = tuple(rewrites)
    for module in list(model.modules()):
        for rewrite in rewrites:
            if rewrite.applies(module):
                rewrite.restore(module)
        unmark(module)


def attentions(body: Any) -> Iterator[tuple[str, Any]]:
    """Name and attention module of every layer, inside adapters."""
    for index, layer in enumerate(body.layers):
        yield f"layers.{index}.self_attn", unwrapped(layer.self_attn)

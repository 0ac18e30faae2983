"""What sampled calls are made of; hypothesis is imported with the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


class Draw:
    """Hypothesis' ``draw``, its strategies as ``st``, and names for what most calls ask of them."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies

        self._draw, self.st = draw, strategies

    def __call__(self, strategy: Any) -> Any:
        """A value of a strategy."""
        return self._draw(strategy)

    def one_of(self, *values: T) -> T:
        """One of ``values``, the first if hypothesis shrinks it."""
        found: T = self._draw(self.st.sampled_from(values))
        return found

    def integer(self, least: int, most: int) -> int:
        """An integer, both bounds included."""
        found: int = self._draw(self.st.integers(least, most))
        return found

    def flag(self) -> bool:
        """True or False."""
        found: bool = self._draw(self.st.booleans())
        return found

    def places(self, count: int, most: int) -> list[int]:
        """Up to ``most`` indices into ``count`` values."""
        if not count:
            return []
        each = self.st.integers(0, count - 1)
        found: list[int] = self._draw(self.st.lists(each, max_size=most))
        return found

    def spoil(self, values: Tensor | list[Any], bad: Sequence[Any], most: int) -> None:
        """Put some of ``bad`` into up to ``most`` places of ``values``."""
        flat = values.view(-1) if isinstance(values, Tensor) else values
        for place in self.places(len(flat), most):
            flat[place] = self.one_of(*bad)

    def generator(self) -> torch.Generator:
        """Generator of bulk contents, with a sampled seed."""
        return torch.Generator().manual_seed(self.integer(0, 2**16))


def strategy_of(sampled: Callable[..., T], **settings: Any) -> SearchStrategy[T]:
    """Hypothesis strategy of what ``sampled`` makes of a ``Draw`` and ``settings``."""
    from hypothesis.strategies import composite

    def make(draw: Any) -> T:
        return sampled(Draw(draw), **settings)

    return composite(make)()

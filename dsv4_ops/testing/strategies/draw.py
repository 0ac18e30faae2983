"""Building blocks of sampled calls. Importing this file does not import hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


class Draw:
    """Hypothesis' ``draw``, its strategies as ``st``, and short forms of common draws."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies

        self._draw, self.st = draw, strategies

    def __call__(self, strategy: Any) -> Any:
        """Draw a value of a strategy."""
        return self._draw(strategy)

    def one_of(self, *values: T) -> T:
        """Draw one of ``values``; hypothesis shrinks to the first value."""
        value: T = self._draw(self.st.sampled_from(values))
        return value

    def integer(self, least: int, most: int) -> int:
        """Draw an integer, both bounds included."""
        value: int = self._draw(self.st.integers(least, most))
        return value

    def flag(self) -> bool:
        """Draw True or False."""
        value: bool = self._draw(self.st.booleans())
        return value

    def places(self, count: int, most: int) -> list[int]:
        """Draw at most ``most`` indices below ``count``."""
        if not count:
            return []
        each = self.st.integers(0, count - 1)
        values: list[int] = self._draw(self.st.lists(each, max_size=most))
        return values

    def spoil(self, values: Tensor | list[Any], bad: Sequence[Any], most: int) -> None:
        """Put some of ``bad`` into up to ``most`` places of ``values``."""
        flat = values.view(-1) if isinstance(values, Tensor) else values
        for place in self.places(len(flat), most):
            flat[place] = self.one_of(*bad)

    def generator(self) -> torch.Generator:
        """Return a generator of bulk contents, with a sampled seed."""
        return torch.Generator().manual_seed(self.integer(0, 2**16))


def strategy_of(sampled: Callable[..., T], **settings: Any) -> SearchStrategy[T]:
    """Return a Hypothesis strategy that samples results of ``sampled``. ``sampled`` takes a
    ``Draw`` and ``settings``."""
    from hypothesis.strategies import composite

    def make(draw: Any) -> T:
        return sampled(Draw(draw), **settings)

    return composite(make)()

"""Types for ``argparse`` options of the examples and benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def bounded_int(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return the type of an option that takes an int of at least ``least``, and at most ``most``.

    Example:
        >>> from dsv4_ops.cli.options import bounded_int
        >>> bounded_int(1)("7")
        7
    """
    rule = f"an int of at least {least}" if most is None else f"an int, {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
        return value

    return parse

"""The check of ints, which arguments and layouts share."""

from __future__ import annotations

import torch


def at_least(op: str, minimum: int, **values: int) -> None:
    """Every value is an int of at least ``minimum``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(
                f"{op}: {name} must be an int, got {type(value).__name__}. "
                "Pass a Python int that is known on the host, never a tensor."
            )
        if value < minimum:
            raise ValueError(
                f"{op}: {name} must be at least {known(minimum)}, got {known(value)}. "
                f"Pass {known(minimum)} or more."
            )


def known(value: int) -> int:
    """``value`` as an int that Dynamo can put into a message even where it traces it as a symbol:
    an error ends the trace, so that the guard costs nothing."""
    return int(value)

"""The former name of ``errors.argument_error``, until its last callers have moved."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def refusal(
    kind: type[_Error], op: str, argument: str, rule: str, actual: object, advice: str
) -> _Error:
    """The error that ``argument_error`` makes, with a type that callers can name."""
    return kind(f"{op}: {argument} must {rule}, got {actual}. {advice}.")

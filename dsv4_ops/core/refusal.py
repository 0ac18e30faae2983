"""The form of every error message."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def refusal(
    kind: type[_Error], op: str, argument: str, rule: str, actual: object, advice: str
) -> _Error:
    """The error to raise where ``argument`` of ``op`` does not follow ``rule``.

    Args:
        kind: ValueError for shapes, ranges and devices, TypeError for dtypes, NotImplementedError
            for combinations, ImportError for extras, RuntimeError for devices that cannot.
        op: Public function that was called.
        argument: Its argument.
        rule: What the argument must do or be.
        actual: What it is.
        advice: What to do, a sentence without its period.
    """
    return kind(f"{op}: {argument} must {rule}, got {actual}. {advice}.")

"""The wording of every error message."""

from __future__ import annotations


def argument_error(
    op: str, name: str, *, must: str, got: object, do: str, kind: type[Exception] = ValueError
) -> Exception:
    """Make the error that says which rule an argument breaks.

    Args:
        op: Public function that was called.
        name: The function's argument.
        must: The rule, after the word "must".
        got: The argument's value, or what is wrong with the argument.
        do: What the caller can do: a sentence without its period.
        kind: ValueError for shapes, ranges and devices, TypeError for dtypes, NotImplementedError
            for combinations, ImportError for missing packages, RuntimeError for devices that
            cannot run the call.
    """
    return kind(f"{op}: {name} must {must}, got {got}. {do}.")


def install_extra(name: str) -> str:
    """Say how to install an extra of this package. No package index has the package."""
    return f"Run `pip install '.[{name}]'` in a clone of dsv4_ops"


def kind_of(value: object) -> str:
    """Name the class of a value for a message, such as "a PagedCache" or "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def plain_int(value: int) -> int:
    """Convert a size to an int for a message, because Dynamo cannot format a symbolic int. The
    conversion adds a guard, which costs nothing because the error ends the trace."""
    return int(value)

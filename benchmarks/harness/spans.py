"""The range of one field over many rows, or its single value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.harness.stored import Row, Stored, number

Figure = Callable[[Stored], str]
Form = Callable[[float], str]
Chosen = Callable[[Row], bool]


def brief(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.{1 if value < 10 else 0}f}"


def value_of(row: Row, expression: str) -> float | None:
    """A field, a sum ``a + b``, or a quotient of these ``a + b / c + d``."""
    over, _, under = expression.partition(" / ")
    sums = []
    for part in (over, under) if under else (over,):
        terms = [row.get(name) for name in part.split(" + ")]
        if None in terms:
            return None
        sums.append(sum(float(term) for term in terms if term is not None))
    return sums[0] / sums[1] if under else sums[0]


def values(
    stored: Stored, file: str, expression: str, chosen: Chosen = bool, **where: Any
) -> list[float]:
    """Of the newest rows that have it; ``where`` are values of fields."""
    found = [
        value_of(row, expression)
        for row in stored.rows(file)
        if chosen(row) and all(row.get(name) == wanted for name, wanted in where.items())
    ]
    kept = [value for value in found if value is not None]
    if not kept:
        raise ValueError(
            f"page: rows of {file} must hold {expression}, got none of {where}. "
            "Run its benchmark, or take the figure from the pages."
        )
    return kept


def between(found: Iterable[float], form: Form) -> str:
    """Smallest and largest; once if they look the same."""
    found = list(found)
    least, most = form(min(found)), form(max(found))
    return least if least == most else f"{least} to {most}"


def span(
    file: str, *expressions: str, form: Form = number, chosen: Chosen = bool, **where: Any
) -> Figure:
    """Smallest and largest value."""

    def figure(stored: Stored) -> str:
        found = [values(stored, file, each, chosen, **where) for each in expressions]
        return between([value for each in found for value in each], form)

    return figure


def most(file: str, expression: str, *, form: Form = number, **where: Any) -> Figure:
    """The largest value."""
    return lambda stored: form(max(values(stored, file, expression, **where)))


def cell(file: str, expression: str, *, form: Form = number, **where: Any) -> Figure:
    """The one value there is."""

    def figure(stored: Stored) -> str:
        (found,) = values(stored, file, expression, **where)
        return form(found)

    return figure

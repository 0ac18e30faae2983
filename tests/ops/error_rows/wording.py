"""The wording of every rule that several functions share, and rows for calls that break a rule.

A message is ``{argument} must {rule}, got {actual}. {what to do}.``; this file spells out the
message of each rule once, independently of ``core/checks.py``.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.helpers import i32
from tests.ops.error_rows.valid import COUNTS

HOST = "Pass a Python {kind} that is known on the host, never a tensor"
DEVICE = "Move all tensors of a call to one device"
PAIRS = "Pass [cos | sin] of the rotated pairs"


class Entry(NamedTuple):
    """Changes of a valid call, and the expected error; the op's name comes before the text."""

    text: str
    spoiled: dict[str, Any]
    error: type[Exception]


def wrong(
    name: str,
    must: str,
    got: object,
    do: str,
    error: type[Exception] = ValueError,
    /,
    **spoiled: Any,
) -> Entry:
    """Return an entry; without ``spoiled``, the argument has the value ``got``."""
    return Entry(f"{name} must {must}, got {got}. {do}.", spoiled or {name: got}, error)


def of_type(name: str, must: str, value: object, do: str, /, **spoiled: Any) -> Entry:
    return wrong(name, must, type(value).__name__, do, TypeError, **(spoiled or {name: value}))


def of_shape(name: str, must: str, value: Tensor, do: str, /, **spoiled: Any) -> Entry:
    return wrong(name, must, list(value.shape), do, **{name: value, **spoiled})


def rank(name: str, shape: str, value: Tensor, /, least: str = "", **spoiled: Any) -> Entry:
    count = shape.replace(", ...", "").count(",") + 1
    do = f"Pass a tensor of {least}{count} dimension{'s' * (count > 1)}"
    return of_shape(name, f"have shape {shape}", value, do, **spoiled)


def exactly(name: str, shape: str, value: Tensor, axis: int, /, **spoiled: Any) -> Entry:
    do = f"Pass exactly {shape[1:-1].split(', ')[axis]} entries in dimension {axis}"
    return of_shape(name, f"have shape {shape}", value, do, **spoiled)


def agree(
    name: str, shape: str, word: str, size: int, owner: str, value: Tensor, /, **spoiled: Any
) -> Entry:
    must = f"have shape {shape} with {word} = {size} as in {owner}"
    return of_shape(name, must, value, f"Make them agree: {word} counts {COUNTS[word]}", **spoiled)


def no_entry(name: str, shape: str = "[num_reqs + 1]", value: Any = None, /, **more: Any) -> Entry:
    do = "Pass at least 1 entry, even for an empty batch"
    return of_shape(name, f"have shape {shape}", i32([]) if value is None else value, do, **more)


def columns(name: str, limit_name: str, limit: int, got: int, /, **spoiled: Any) -> Entry:
    do = f"Widen it with columns of -1, or lower {limit_name}"
    return wrong(name, f"have at least {limit_name} = {limit} columns", got, do, **spoiled)


def rows_for_tokens(name: str, tokens: int, owner: str, got: int, /, **spoiled: Any) -> Entry:
    must = f"have at least num_tokens = {tokens} rows as in {owner}"
    return wrong(name, must, got, "Pass a row for every token", **spoiled)


def slots_for_tokens(name: str, value: Tensor, /) -> Entry:
    must, do = "have at most num_tokens = 5 entries as in q", "Pass one per token, or fewer"
    return wrong(name, must, len(value), do, **{name: value})


def dtype(name: str, dtypes: str, value: Any, do: str = "", tag: str = "", /, **more: Any) -> Entry:
    got = value.dtype if isinstance(value, Tensor) else value
    do = do or f"Cast it with .to({dtypes.split(' or ')[0]})"
    must = f"be {dtypes}" + f" for layout {tag!r}" * bool(tag)
    return wrong(name, must, got, do, TypeError, **(more or {name: value}))


def no_tensor(name: str, value: object, do: str, /, **spoiled: Any) -> Entry:
    return of_type(name, "be a tensor", value, do, **spoiled)


def elsewhere(name: str, device: str, owner: str, got: str, /, **spoiled: Any) -> Entry:
    return wrong(name, f"be on {device} like {owner}", got, DEVICE, **spoiled)


def at_least(name: str, least: int, got: object, /, **spoiled: Any) -> Entry:
    return wrong(name, f"be at least {least}", got, f"Pass {least} or more", **spoiled)


def at_most(name: str, limit_name: str, limit: int, got: int, /, **spoiled: Any) -> Entry:
    do = f"Lower {name}, or raise {limit_name}"
    return wrong(name, f"be at most {limit_name} = {limit}", got, do, **spoiled)


def too_many(name: str = "num_reqs", /, **spoiled: Any) -> Entry:
    return wrong(name, "be at most 16383", 16384, "Split the batch", **spoiled)


def multiple(name: str, of: str, size: int, got: int, use: int, /, **spoiled: Any) -> Entry:
    return wrong(name, f"be a multiple of {of} = {size}", got, f"Use {name} = {use}", **spoiled)


def alone(name: str, partner: str, /, *without: str) -> Entry:
    """Return an entry for ``name`` without ``partner``, or without all of ``without``."""
    nothing: dict[str, Any] = dict.fromkeys(without or (partner,))
    return wrong(name, f"be None without {partner}", "a tensor", "Pass both or neither", **nothing)


def not_with(name: str, partner: str, got: Any, neutral: Any = None, /, **spoiled: Any) -> Entry:
    return wrong(name, f"be {neutral} with {partner}", got, "Pass one of the two", **spoiled)


def no_int(name: str, value: object, /, **spoiled: Any) -> Entry:
    return of_type(name, "be an int", value, HOST.format(kind="int"), **{name: value, **spoiled})


def flag_rows(name: str, *values: object) -> Iterator[Entry]:
    for value in values or (1, None):
        yield of_type(name, "be a bool", value, "Pass True or False")


def no_float(name: str, value: object) -> Entry:
    return of_type(name, "be a float", value, HOST.format(kind="float"), **{name: value})


def float_rows(name: str, least: int, *, optional: bool = False) -> Iterator[Entry]:
    """Yield values that are not floats, or not above ``least``."""
    for value in (True, "1", None, torch.tensor(2.0)):
        if value is not None or not optional:
            yield no_float(name, value)
    for value in (float(least), least - 1.0, math.nan, math.inf):
        yield wrong(name, f"be above {least} and finite", value, f"Pass a number above {least}")


def word_rows(
    name: str,
    belongs_to: str,
    *allowed: str,
    unknown: tuple[str, ...] = ("", "other"),
    no_str: tuple[object, ...] = (None, 1),
) -> Iterator[Entry]:
    """Yield values of a setting that are not one of its words."""
    do = f"Pass the {name} that {belongs_to}"
    for word in unknown:
        yield wrong(name, f"be {' or '.join(map(repr, allowed))}", repr(word), do, **{name: word})
    for value in no_str:
        yield of_type(name, "be a str", value, do)


def angle_rows(most_name: str, most: int) -> Iterator[Entry]:
    must = f"have an even number of columns, at most {most_name} = {most}"
    for count in (63, most + 2):
        yield of_shape("cos_sin_cache", must, torch.ones(9, count), PAIRS)

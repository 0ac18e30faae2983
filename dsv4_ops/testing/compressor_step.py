"""Cases and strategies of a whole step of the compressor: those of its windows, with slots for the
states of its tokens where no window of the step reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import StateLayout
from dsv4_ops.testing import compressor
from dsv4_ops.testing.case import Case, Exact, OpTesting, i32, i64

_STATES, _SLOTS = 2, 4
"""Places of the states and of their slots."""


def _windows_of(case: Case) -> Case:
    """The call of ``compress_and_insert`` that is part of a step."""
    tensors = (*case.tensors[:_SLOTS], *case.tensors[_SLOTS + 1 :])
    return Case(case.name, tensors, case.settings)


def precise(*tensors: Tensor | None, **settings: Any) -> tuple[Exact | None, ...]:
    """float64 results of what ``readable`` reads: states are exact."""
    windows = _windows_of(Case("precise", tensors, settings))
    return None, *compressor.precise(*windows.tensors, **settings)


def readable(case: Case, outcome: Sequence[Tensor]) -> Sequence[Tensor]:
    """The states, then what is readable of the cache."""
    states, cache = outcome
    return states, *compressor.readable(_windows_of(case), [cache])


def read_slots(case: Case) -> set[int]:
    """Slots of the states that the windows of a call of ``compress_and_insert`` read."""
    states, table, positions, req_indices = case.tensors[2:6]
    assert states is not None
    assert table is not None
    assert positions is not None
    assert req_indices is not None
    ratio, size = case.settings["compress_ratio"], case.settings["state_block_size"]
    tokens = list(zip(req_indices.tolist(), positions.tolist(), strict=True))
    found = set()
    for token, _ in compressor.written_slots(case):
        request, position = tokens[token]
        for back in range(ratio * (2 if case.settings["overlap"] else 1)):
            place, other = position - back, token - back
            column = place // size
            if place < 0 or column >= table.shape[1]:
                continue
            if other < 0 or tokens[other] != (request, place):
                found.add(int(table[request, column]) * size + place % size)
    return {slot for slot in found if 0 <= slot < states.shape[0] * size}


def determined(case: Case) -> bool:
    """Whether no state is saved where a window reads another."""
    slots = case.tensors[_SLOTS]
    assert slots is not None
    return not read_slots(_windows_of(case)) & {int(slot) for slot in slots}


def _page(*rows: Sequence[float]) -> list[float]:
    """A page of rows of two values, and its padding."""
    values = [value for row in rows for value in row]
    return values + [0.0] * (StateLayout(2, 2).page_bytes // 4 - len(values))


def _worked(name: str, slots: Sequence[int], expected: Any = None, **changed: Any) -> Case:
    """Four tokens of one request, of one channel each: windows of two, kv 1 and 3, then 0 and -6.
    All scores are 0, and biased by 0.5."""
    one = {
        "kv_score": torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 0.0], [-6.0, 0.0]]),
        "ape": torch.full((2, 1), 0.5),
        "states": StateLayout(2, 2).allocate(2),
        "norm_weight": torch.tensor([0.5]),
        "cos_sin_cache": torch.zeros(0, 0),
        "k_cache": torch.full((1, 2, 1), 7.0),
    }
    windows = compressor.worked(name, **{**one, **changed})
    tensors = (*windows.tensors[:_SLOTS], i64([*slots]), *windows.tensors[_SLOTS:])
    return Case(name, tensors, windows.settings, expected)


def _cases() -> list[Case]:
    # a row of one value over the root of its mean square is its sign, times the weight
    rows, kept, zero = [[[0.5], [-0.5]]], [[[7.0], [7.0]]], _page()
    old = StateLayout(2, 2).allocate(2)
    StateLayout(2, 2).rows(old)[1, 0] = torch.tensor([-9.0, 0.5])
    last = {
        "kv_score": torch.tensor([[3.0, 0.0]]),
        "positions": i64([3]),
        "req_indices": i32([0]),
        "slot_mapping": i64([1]),
    }
    none = {name: tensor[:0] for name, tensor in last.items()}
    saved = [_page([-6.0, 0.5], [1.0, 0.5]), _page([0.0, 0.5])]
    return [
        _worked("two windows", [1, -1, 2, 0], (saved, rows)),
        _worked("no slot for a state", [-1, 4, 2**40, -(2**63)], ([zero, zero], rows)),
        _worked(
            "no slot for a row", [1, -1, 2, 0], (saved, kept), slot_mapping=i64([-1, 2, 0, -2])
        ),
        _worked("no request", [1, -1, 2, 0], (saved, kept), req_indices=i32([-1, 1, 0, 2])),
        _worked(
            "padding has neither, and a late token a state",
            [0, 1, 2, 3],
            ([zero, _page([0.0, 0.5], [-6.0, 0.5])], kept),
            positions=i64([-1, -(2**63), 2**31 - 1, 2**63 - 1]),
        ),
        _worked(
            "its own state beside that of the token before",
            [3],
            ([zero, _page([-9.0, 0.5], [3.0, 0.5])], [[[7.0], [-0.5]]]),
            states=old,
            **last,
        ),
        _worked("no token", [], ([zero, zero], kept), **none),
        _worked("no page", [1, -1, 2, 0], (saved, []), k_cache=torch.zeros(0, 2, 1)),
        _worked("no page of states", [1, -1, 2, 0], ([], rows), states=old[:0]),
        _worked("no table", [1, -1, 2, 0], (saved, kept), state_block_table=i32([[0, 1]])[:0]),
        _worked("bfloat16", [1, -1, 2, 0], k_cache=torch.full((1, 2, 1), 7.0).bfloat16()),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    """A drawn call of the windows; slots of states that its windows read are left out."""
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import slots

    windows = compressor.compress_and_insert.make(draw, settings, min_size)
    states, positions = windows.tensors[2], windows.tensors[4]
    assert states is not None
    assert positions is not None
    num_tokens, num_slots = positions.shape[0], states.shape[0] * settings["state_block_size"]
    read = read_slots(windows)
    free = sorted(set(range(num_slots)) - read)
    if draw(st.booleans()):  # next to what is read
        free = sorted(free, key=lambda slot: _distance(slot, read))[: num_tokens + 2]
    places = draw(slots(num_tokens=num_tokens, num_slots=len(free)))
    there = (places >= 0) & (places < len(free))
    chosen = torch.where(there, i64([*free, -1])[torch.where(there, places, -1)], places)
    outside = (places >= len(free)) & (places < num_slots)
    tensors = (*windows.tensors[:_SLOTS], torch.where(outside, -1, chosen))
    return Case("drawn", (*tensors, *windows.tensors[_SLOTS:]), settings)


def _distance(slot: int, read: set[int]) -> int:
    return min((abs(slot - other) for other in read), default=0)


save_and_compress = OpTesting(
    cases=_cases,
    settings=compressor.compress_and_insert.settings,
    make=_call,
    precise=precise,
    readable=readable,
    determined=determined,
)
save_and_compress_functional = save_and_compress

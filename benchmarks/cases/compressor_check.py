"""Check the compressor: states bit for bit, values within one code, sampled rows by float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.work import Args, differing_bytes
from dsv4_ops.core.layout import QuantizedLayout
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases import compressor as cases
from dsv4_ops.testing.contract.compare import assert_agrees

_SAMPLE = 16
_KV_SCORE, _STATES, _STATE_SLOTS, _POSITIONS, _REQUESTS, _TABLE, _CACHE, _SLOTS = (
    0, 2, 3, 4, 5, 6, 9, 10,
)  # fmt: skip
CODE_STEP, ROPE_STEP = 2.0**-3, 2.0**-7
"""Of e4m3 and bf16, relative, at most."""

_NEAR_ZERO = 2.0**-16  # of a row's largest value: steps there, and float32 sums that cancel


def differences(
    layout: QuantizedLayout,
    settings: dict[str, Any],
    args: Args,
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> str | None:
    """How states and cache are not what the reference allows."""
    if not differing_bytes(actual, expected):
        return None
    wrong = differing_bytes(actual[:1], expected[:1])
    if wrong:
        return f"{wrong} of {expected[0].nbytes} bytes of the states differ from the reference"
    finishing = (args[_POSITIONS] + 1) % settings["compress_ratio"] == 0
    tokens = finishing.nonzero()[:, 0]
    case = _case(settings, args, expected[0], tokens)
    ours, baseline = (results[1].cpu() for results in (actual, expected))
    *values, rest = zip(*(cases.decode(case, [c]) for c in (ours, baseline)), strict=True)
    wrong = differing_bytes(rest[:1], rest[1:])
    if wrong:
        return f"{wrong} bytes around the compressed rows differ from the reference"
    steps = (("codes", CODE_STEP), ("rope", ROPE_STEP))
    for (name, step), (left, right) in zip(steps, values, strict=True):
        if text := steps_apart(name, left, right, step):
            return text
    return _outside_budget(layout, settings, args, expected[0], tokens, ours, baseline)


def _case(settings: dict[str, Any], args: Args, states: Tensor, tokens: Tensor) -> Case:
    """``compress_and_insert`` of some tokens behind a save of all, on the CPU."""
    kv_score, positions, requests, slots = (
        args[place][tokens] for place in (_KV_SCORE, _POSITIONS, _REQUESTS, _SLOTS)
    )
    ape, table, norm_weight, cos_sin_cache = args[1], *args[_TABLE:_CACHE]
    tensors = (
        kv_score, ape, states, table, positions, requests, norm_weight, cos_sin_cache,
        args[_CACHE], slots,
    )  # fmt: skip
    return Case("bench", tuple(tensor.cpu() for tensor in tensors), settings)


def steps_apart(name: str, ours: Tensor, baseline: Tensor, step: float) -> str | None:
    """Values that are more than a step of their code apart."""
    if not ours.numel():
        return None
    size = torch.maximum(ours.abs(), baseline.abs()).float()
    allowed = step * size + _NEAR_ZERO * size.amax(-1, keepdim=True)
    wrong = ~((ours.float() - baseline.float()).abs() <= allowed)
    if bool(wrong.any()):
        row = int(wrong.any(-1).nonzero()[0, 0])
        return f"{name} of {int(wrong.any(-1).sum())} rows, of row {row} first, are over a step off"
    return None


def _outside_budget(
    layout: QuantizedLayout,
    settings: dict[str, Any],
    args: Args,
    states: Tensor,
    tokens: Tensor,
    ours: Tensor,
    baseline: Tensor,
) -> str | None:
    """The rows of a sample of tokens beside float64; the others are taken from the reference."""
    picked = torch.linspace(0, tokens.shape[0] - 1, min(_SAMPLE, tokens.shape[0])).long()
    case = _case(settings, args, states, tokens[picked.to(tokens.device)])
    mixed = baseline.clone()
    for _, slot in cases.written_slots(case):
        for start, size in (
            (layout.data_offset(slot), layout.data_bytes),
            (layout.scale_offset(slot), layout.scale_bytes),
        ):
            mixed.view(-1)[start : start + size] = ours.view(-1)[start : start + size]
    try:
        assert_agrees("compressor", cases.compress_and_insert, case, [mixed], [baseline])
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return None

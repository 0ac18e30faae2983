"""Benchmark FP8 linear layers against a copy of their weights, ``F.linear`` and ``scaled_mm``."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import dsv4_ops as ops
from benchmarks.harness.measure import run_kernels
from benchmarks.harness.timing import Call
from benchmarks.harness.weights import Row
from dsv4_ops.dispatch.providers import choice_of
from dsv4_ops.reference.linear import weight_values

LAYERS = {
    "kv": (1, 512, 4096),
    "q_a": (1, 1024, 4096),
    "shared gate_up": (1, 4096, 4096),
    "shared down": (1, 4096, 2048),
    "q_b": (1, 32768, 1024),
    "o_a": (8, 8192, 4096),
    "o_b": (1, 4096, 8192),
}
"""Groups, rows and columns of DeepSeek-V4-Flash's weights."""

CASES = {"w8a16": "bf16", "w8a8": "fp8"}
_TOKENS, _MORE_TOKENS = (1, 8, 32, 64), (128, 1024)
_ROTATED = 3 * 10**8
"""Bytes of all weights that a graph reads: several times the L2."""


def fp8_weight(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sample codes of either sign without NaN, and power-of-two scales."""
    codes = torch.randint(-8, 8, (rows, columns), device=device).to(torch.float8_e4m3fn)
    scale = torch.randint(114, 118, (rows // 128, columns // 128), device=device)
    return codes, torch.exp2(scale.float() - 127)


def calls(name: str, activations: str, row: Row, device: torch.device) -> dict[str, Sequence[Call]]:
    """Check a layer, and return the calls to time."""
    torch._dynamo.reset()
    groups, rows, columns = LAYERS[name]
    row.weight_bytes = rows * columns * (1 + 4 / 128**2)
    count = max(2, -(-_ROTATED // (rows * columns)))
    shape = (row.tokens, groups, columns) if groups > 1 else (row.tokens, columns)
    x = torch.randn(shape, device=device).bfloat16()
    made = [fp8_weight(rows, columns, device) for _ in range(count)]
    op: Callable[..., Tensor] = ops.fp8_linear if groups == 1 else ops.fp8_grouped_linear
    row.impl = choice_of(op.__name__, x, *made[0], activations=activations).impl
    call = torch.compile(functools.partial(op, activations=activations), dynamic=False)
    expected = op(x, *made[0], activations=activations, impl="reference", out_dtype=torch.float32)
    row.check(call(x, *made[0]), expected)
    forms: dict[str, Sequence[Call]] = {"us": [functools.partial(call, x, *each) for each in made]}
    plain = [weight_values(*each).bfloat16() for each in made[: max(2, count // 2)]]
    if groups == 1:
        forms["baseline_us"] = [functools.partial(linear, x, each) for each in plain]
        if activations == "fp8" and row.impl != "scaled_mm":
            scaled = functools.partial(op, activations=activations, impl="scaled_mm")
            other = torch.compile(scaled, dynamic=False)
            forms["scaled_mm_us"] = [functools.partial(other, x, *each) for each in made]
    else:
        parts = [each.unflatten(0, (groups, -1)) for each in plain]
        forms["baseline_us"] = [
            functools.partial(torch.einsum, "tgk,grk->tgr", x, each) for each in parts
        ]
    return forms


def _cases(options: argparse.Namespace) -> Iterator[tuple[Row, Any]]:
    for group in options.cases or CASES:
        tokens = _TOKENS + _MORE_TOKENS if group == "w8a16" else (64, *_MORE_TOKENS)
        for name, count in itertools.product(LAYERS, tokens[:2] if options.smoke else tokens):
            yield Row(f"{group} {name}", count), functools.partial(calls, name, CASES[group])


def run(options: argparse.Namespace) -> None:
    run_kernels(options, _cases(options))

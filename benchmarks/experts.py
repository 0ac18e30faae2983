"""Benchmark routed experts against a copy of their weights and torch's grouped GEMMs."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dsv4_ops as ops
from benchmarks.baselines import humming
from benchmarks.harness.measure import run_kernels
from benchmarks.harness.timing import Call
from benchmarks.harness.weights import Row, relative_error
from benchmarks.run import BenchError
from dsv4_ops.dispatch.providers import choice_of

NUM_EXPERTS, TOPK, WIDTH, SIZE, LIMIT = 256, 6, 4096, 2048, 10.0
"""DeepSeek-V4-Flash's sizes."""

W4A8 = "w4a8"
CASES = ("fp4", W4A8, "fp8", "bf16")
"""Formats of weights, with bf16 activations; "w4a8" has FP4 weights and FP8 activations."""

CHECKED, CHECK_SCALE = 8, 64.0
"""Tokens of the batch that checks Humming's results, and a factor for the batch's x. With the
factor, a tenth of the gates and ups exceed the limit."""

_TOKENS = (1, 8, 64, 128, 512, 1024, 4096)
_CALLS = {1: 8, 8: 8}
"""Calls per graph, by tokens. Calls differ in experts; the experts of one token exceed the L2."""


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "of fp4: time Humming's kernels too; fails where humming-kernels cannot be imported"
    parser.add_argument("--humming", action="store_true", help=help)


@functools.cache
def expert_weights(group: str, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """Sample gate_up, its scale, down and its scale for all experts."""
    if group == W4A8:
        return expert_weights("fp4", device)
    if group == "bf16":
        up, down = (each.transpose(1, 2) for each in bf16_weights(device))
        return up, None, down, None
    made: list[Any] = []
    for rows, columns in ((2 * SIZE, WIDTH), (WIDTH, SIZE)):
        shape = (NUM_EXPERTS, rows, columns // 2 if group == "fp4" else columns)
        most = 256 if group == "fp4" else 0x50
        made.append(torch.randint(0, most, shape, dtype=torch.uint8, device=device))
        if group == "fp8":
            made[-1] = made[-1].view(torch.float8_e4m3fn)
        blocks = (rows, columns // 32) if group == "fp4" else (rows // 128, columns // 128)
        shape = (NUM_EXPERTS, *blocks)
        made.append(torch.randint(114, 118, shape, dtype=torch.uint8, device=device))
    return made[0], made[1], made[2], made[3]


@functools.cache
def bf16_weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sample gate_up and down in bf16, transposed for torch's grouped GEMMs."""
    up, down = (
        torch.empty(NUM_EXPERTS, *shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        for shape in ((2 * SIZE, WIDTH), (WIDTH, SIZE))
    )
    return up.transpose(1, 2), down.transpose(1, 2)


def grouped_experts(x: Tensor, routing: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute experts with torch: sort rows, run two grouped GEMMs, and sum with weights."""
    keys, order = ids.flatten().sort()
    experts = torch.arange(NUM_EXPERTS, dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(keys, experts, right=True, out_int32=True)
    gate, value = torch._grouped_mm(x[order // TOPK], up, offs=ends).chunk(2, -1)
    gate, value = gate.float().clamp(max=LIMIT), value.float().clamp(-LIMIT, LIMIT)
    act = (gate * torch.sigmoid(gate) * value).bfloat16()
    out = torch._grouped_mm(act, down, offs=ends).float() * routing.flatten()[order, None]
    found = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return found.index_add_(0, order // TOPK, out).bfloat16()


@functools.cache
def humming_layers(library: Any, device: torch.device) -> tuple[Any, Any]:
    """Convert the FP4 experts of ``expert_weights`` to Humming's order."""
    up, up_scale, down, down_scale = expert_weights("fp4", device)
    made = humming.make_layer(library, up, up_scale), humming.make_layer(library, down, down_scale)
    return made[0], made[1]


def humming_step(library: Any, row: Row, inputs: tuple[Tensor, Tensor, Tensor]) -> humming.Step:
    """Return Humming's experts for a batch of this size, after a check of their results."""
    x, routing, ids = inputs
    layers = humming_layers(library, x.device)
    step = humming.experts_step(library, layers, ids.numel(), limit=LIMIT)
    x = CHECK_SCALE * x
    some = slice(None, None, max(1, row.tokens // CHECKED))
    part = x[some], routing[some].contiguous(), ids[some].contiguous()
    made = expert_weights("fp4", x.device)
    whole = ops.experts(*part, *made, swiglu_limit=LIMIT, impl="reference")
    row.humming_error = relative_error(step(x, routing, ids)[some], whole)
    if not row.humming_error < humming.MOST_ERROR:
        raise BenchError(f"Humming's error {row.humming_error:.2g}")
    return step


def calls(group: str, library: Any, row: Row, device: torch.device) -> dict[str, Sequence[Call]]:
    """Return the calls to time, with uniform routing; check the experts for up to 8 tokens."""
    torch._dynamo.reset()
    torch.manual_seed(row.tokens)
    made = expert_weights(group, device)
    inputs = []
    for _ in range(_CALLS.get(row.tokens, 3)):
        scores = torch.rand(row.tokens, NUM_EXPERTS, device=device)
        chosen = scores.topk(TOPK)
        x = torch.randn(row.tokens, WIDTH, device=device).bfloat16()
        inputs.append((x, chosen.values, chosen.indices.int()))
    experts = sum(int(each[2].unique().numel()) for each in inputs) / len(inputs)
    held = sum(each.nbytes for each in made if each is not None)
    row.weight_bytes = experts / NUM_EXPERTS * held
    settings: dict[str, Any] = {"swiglu_limit": LIMIT}
    settings["activations"] = "fp8" if group == W4A8 else "bf16"
    row.impl = choice_of("experts", *inputs[0], *made, **settings).impl
    call = torch.compile(functools.partial(ops.experts, **settings), dynamic=False)
    if row.tokens <= 8:
        whole = ops.experts(*inputs[0], *made, **settings, impl="reference")
        row.check(call(*inputs[0], *made), whole)
    forms: dict[str, Sequence[Call]] = {
        "us": [functools.partial(call, *each, *made) for each in inputs]
    }
    if group in ("fp4", "bf16"):
        plain = torch.compile(grouped_experts, dynamic=False)
        forms["baseline_us"] = [
            functools.partial(plain, *each, *bf16_weights(device)) for each in inputs
        ]
    if group == "fp4" and library is not None:
        step = humming_step(library, row, inputs[0])
        forms["humming_us"] = [functools.partial(step, *each) for each in inputs]
    return forms


def run(options: argparse.Namespace) -> None:
    library = humming.load() if options.humming else None
    sizes = _TOKENS[:1] if options.smoke else _TOKENS
    cases = [
        (Row(group, tokens), functools.partial(calls, group, library))
        for group in options.cases or CASES
        for tokens in sizes
    ]
    run_kernels(options, cases)

"""Cases, strategy and float64 results of hyper-connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, Exact, OpTesting
from dsv4_ops.testing.cases.sinkhorn import sinkhorn_error
from dsv4_ops.testing.float64.linear import SUM_ROUNDINGS, activations as sampled_activations
from dsv4_ops.testing.float64.rope import FP32_UNIT
from dsv4_ops.testing.strategies.draw import Draw

BF16_UNIT = 2.0**-8 / 2
TINY = 2.0**-140
SERVED = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}


def _hyper_connection_cases() -> list[Case]:
    settings = {"iterations": 1, "eps": TINY, "norm_eps": TINY}
    streams = torch.tensor([[[1.0, -3.0], [1.0, 1.0]]]).bfloat16()
    weights = torch.zeros(8, 4), torch.zeros(8), torch.ones(3), torch.tensor([2.0, 3.0])
    halves = [[[0.5, 0.5], [0.5, 0.5]]]
    out = torch.tensor([[2.0, 6.0]]).bfloat16()
    post, mix = torch.tensor([[1.0, 0.5]]), torch.tensor([[[1.0, 0.5], [0.0, 0.5]]])
    # the squares 1, 9, 1 and 1 have the mean 3, so each nonzero product with fn is 1; pre_0 is the
    # sigmoid of 1 - 1 = 0; both logits of the first row are 4 * 1 - 3, and equal logits give halves
    root = 3.0**0.5
    fn = torch.zeros(8, 4)
    fn[0, 0], fn[4, 0], fn[5, 1] = root, root, -root / 3
    base = torch.tensor([-1.0, 0.0, 0.0, 0.0, -3.0, -3.0, 0.0, 0.0])
    chosen = fn, base, torch.tensor([1.0, 1.0, 4.0]), weights[3]
    none = tuple(each[:0] for each in (out, post, mix))
    return [
        # the mean of the two streams is (1, -1)
        Case("alone", (streams, *weights), settings, ([], [[1.0, 1.0]], halves, [[2.0, -3.0]])),
        # the streams are (2 + 1, 6 - 3) and (1 + 0.5 + 0.5, 3 - 1.5 + 0.5), with mean (2.5, 2.5)
        Case(
            "after a block",
            (streams, *weights, out, post, mix),
            settings,
            ([[[3.0, 3.0], [2.0, 2.0]]], [[1.0, 1.0]], halves, [[2.0, 3.0]]),
        ),
        Case(
            "of the streams", (streams, *chosen), settings, ([], [[1.0] * 2], halves, [[2.0, -3.0]])
        ),
        Case("no token", (streams[:0], *weights), settings, ([], [], [], [])),
        Case("no token after a block", (streams[:0], *weights, *none), settings, ([], [], [], [])),
    ]


def _hyper_connection_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 17), min_size)
    count = 4 if min_size else draw.one_of(4, 1, 2, 3)
    width = 96 if min_size else draw.one_of(96, 1, 40, 130)
    seed, weights = draw.generator(), count * (count + 2)
    streams = sampled_activations(draw, num_tokens, count, width, infinite=False)
    fn = torch.randn(weights, count * width, generator=seed) / (count * width) ** 0.5
    base, scale = torch.randn(weights, generator=seed), torch.randn(3, generator=seed)
    tensors = (streams, fn, base, scale, torch.rand(width, generator=seed) + 0.5)
    if min_size or draw.flag():
        out = sampled_activations(draw, num_tokens, width, infinite=False)
        post = torch.rand(num_tokens, count, generator=seed) * 2
        mix = torch.rand(num_tokens, count, count, generator=seed) / count
        return Case("sampled", (*tensors, out, post, mix), settings)
    return Case("sampled", tensors, settings)


def _hyper_connection_precise(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    block_out: Tensor | None = None,
    post: Tensor | None = None,
    mix: Tensor | None = None,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Exact | None, ...]:
    fn, base, scale, norm_weight = (each.double() for each in (fn, base, scale, norm_weight))
    count, values = int(streams.shape[1]), streams.double()
    written = Exact(values[:0], values[:0])
    flipped = torch.zeros_like(values)
    if block_out is not None and post is not None and mix is not None:
        added = torch.einsum("ti,td->tid", post.double(), block_out.double())
        value = added + torch.einsum("tji,tjd->tid", mix.double(), values)
        terms = added.abs() + torch.einsum("tji,tjd->tid", mix.double().abs(), values.abs())
        written = Exact(value, value.abs() + (count + 1) * FP32_UNIT / BF16_UNIT * terms)
        values = value.to(torch.bfloat16).double()
        # a sum near the middle of two bf16 values may be rounded to either value
        flipped = 2 * BF16_UNIT * values.abs()
    flat = values.flatten(1)
    root = torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps)
    factor = scale.repeat_interleave(torch.tensor([count, count, count**2], device=scale.device))
    weights = (flat * root) @ fn.t() * factor + base
    terms = (flat * root).abs() @ fn.abs().t() * factor.abs() + base.abs()
    errors = SUM_ROUNDINGS * FP32_UNIT * terms
    errors = errors + 3 * ((flipped.flatten(1) * root) ** 2 @ (fn.t() ** 2)).sqrt() * factor.abs()
    pre, after, logits = weights.split([count, count, count**2], 1)
    of_pre, of_after, of_logits = errors.split([count, count, count**2], 1)
    gate, next_post = pre.sigmoid(), 2 * after.sigmoid()
    found_post = Exact(next_post, next_post * (4 + after.abs() + of_after / FP32_UNIT))
    found_mix = sinkhorn_error(logits, count, iterations, eps, of_logits)
    collapsed = ((gate + eps)[..., None] * values).sum(1)
    of_collapsed = BF16_UNIT * collapsed.abs() + (
        (gate * (4 * FP32_UNIT + of_pre))[..., None] * values.abs()
        + ((gate + eps)[..., None] * flipped)
    ).sum(1)
    # the collapsed stream is rounded before the norm, to either of two neighbours
    rounded = collapsed.to(torch.bfloat16).double()
    scaled = torch.rsqrt(rounded.square().mean(1, keepdim=True) + norm_eps) * norm_weight
    x = rounded * scaled
    error = x.abs() + 2 * of_collapsed / BF16_UNIT * scaled.abs()
    # the error of the largest value changes the mean square
    error = error + x.abs() * (of_collapsed / BF16_UNIT * scaled.abs()).amax(1, keepdim=True)
    return written, found_post, found_mix, Exact(x, error)


hyper_connection = OpTesting(
    cases=_hyper_connection_cases,
    settings=(
        SERVED,
        {**SERVED, "iterations": 1},
        {"iterations": 3, "eps": 0.125, "norm_eps": 1.0},
    ),
    make=_hyper_connection_call,
    precise=_hyper_connection_precise,
)

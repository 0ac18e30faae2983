"""Cases and strategies of draft verification."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.reference import draft as reference
from dsv4_ops.testing.case import Case, OpTesting, i64
from dsv4_ops.testing.strategies.draw import Draw

GREEDY, SAMPLED, SHARP = ({"temperature": value} for value in (0.0, 1.0, 0.5))

_P = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
"""The model's probabilities for a draft, and for the token after the draft."""


def _cases() -> list[Case]:
    eye = torch.eye(4)[torch.tensor([[2, 0, 3]])]
    no_token = torch.tensor([[[math.nan, 1, 1], [math.nan, -math.inf, math.nan]]])
    return [
        _greedy("first accepted", eye, [2, 1], ([[2, 0, -1]], [1])),
        _greedy("all accepted", eye, [2, 0], ([[2, 0, 3]], [2])),
        _greedy("none behind a rejection", eye, [1, 0], ([[2, -1, -1]], [0])),
        _greedy("drafts of no token", eye, [-1, 4], ([[2, -1, -1]], [0])),
        _greedy("no drafts", eye[:, 2:], [], ([[3]], [0])),
        _greedy("ties and no token", no_token, [1], ([[1, -1]], [1])),
        Case(
            "no token to sample",
            (no_token[:, 1:], i64([[]]), None, torch.tensor([[0.5]])),
            SAMPLED,
            ([[-1]], [0]),
        ),
        # p / q is 0.5 at token 0, so the uniform 0.4 accepts the draft, and 0.6 rejects the draft;
        # then 0.7 selects token 2 from _P[1], and 0.4 selects token 1 from the residual [0, 1/4,
        # 1/4]
        _sampled(
            "certain drafts", [0, 0], None, [[0.4, 0.7], [0.6, 0.4]], ([[0, 2], [1, -1]], [1, 0])
        ),
        # in the first request, p / q is 0.5 at token 1, and only token 0 has p > q; in the second
        # request, p / q is 2 at token 2
        _sampled(
            "from a distribution",
            [1, 2],
            [[0.25, 0.5, 0.25], [0.5, 0.5, 0.125]],
            [[0.55, 0.9], [0.99, 0.3]],
            ([[0, -1], [2, 1]], [0, 1]),
        ),
        # the uniform 0.6 selects token 1 from _P[0]; from the residual [1/2, 0, 1/4], 0.6 would
        # select token 0
        _sampled(
            "missing drafts", [-1, 3], [[0.0, 1, 0]] * 2, [[0, 0.6]] * 2, ([[1, -1]] * 2, [0, 0])
        ),
        # the squares of _P[0] and _P[1] are in proportion to [4, 1, 1] and [1, 1, 4]
        _sampled(
            "sharper", [0, 0], None, [[0.6, 0.4], [0.7, 0.6]], ([[0, 2], [2, -1]], [1, 0]), SHARP
        ),
    ]


def _greedy(name: str, logits: Tensor, ids: list[int], expected: tuple[Any, ...]) -> Case:
    return Case(name, (logits, i64([ids]), None, None), GREEDY, expected)


def _sampled(
    name: str, ids: list[int], q: Any, uniforms: Any, expected: Any, settings: Any = SAMPLED
) -> Case:
    """Make a call for two requests with one draft each and the probabilities ``_P``."""
    logits = torch.tensor([_P, _P]).log()
    probs = None if q is None else torch.tensor(q)[:, None]
    chances = torch.tensor(uniforms, dtype=torch.float32)
    return Case(name, (logits, i64(ids)[:, None], probs, chances), settings, expected)


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_reqs = max(draw.one_of(3, 0, 1, 2, 5, 9), min_size)
    num_drafts = 2 if min_size else draw.one_of(1, 0, 2, 3)
    vocab_size = 5 if min_size else draw.one_of(4, 1, 2, 5, 9)
    generator = torch.Generator().manual_seed(draw.integer(0, 2**31))
    logits = torch.randint(-6, 7, (num_reqs, num_drafts + 1, vocab_size), generator=generator) / 4.0
    draw.spoil(logits, (math.nan, math.inf, -math.inf, 30.0), 4)
    greedy = logits.nan_to_num(-math.inf, math.inf, -math.inf)[:, :num_drafts].argmax(2)
    guessed = torch.randint(0, vocab_size, greedy.shape, generator=generator)
    ids = torch.where(torch.rand(greedy.shape, generator=generator) < 0.6, greedy, guessed)
    draw.spoil(ids, (-1, vocab_size, -(2**62), 2**62), 2)
    if not min_size and draw.flag():
        logits = logits.bfloat16()
    if not settings["temperature"]:
        return Case("sampled", (logits, ids, None, None), settings)
    probs = None
    if min_size or draw.flag():  # far from every softmax of multiples of 1/4
        shares = torch.tensor([0.0, 0.113, 0.237, 0.371, 0.613, 1.0])
        shape = (num_reqs, num_drafts, vocab_size)
        probs = shares[torch.randint(0, len(shares), shape, generator=generator)]
        draw.spoil(probs, (math.nan, math.inf, -0.5), 2)
    uniforms = torch.randint(0, 64, (num_reqs, num_drafts + 1), generator=generator) / 64
    draw.spoil(uniforms, (0.0, 1 - 2.0**-24, math.nan, -1.0, 2.0), 2)
    return Case(
        "sampled", (logits, ids, probs, _clear(logits, ids, probs, uniforms, settings)), settings
    )


def _clear(
    logits: Tensor, ids: Tensor, probs: Tensor | None, uniforms: Tensor, settings: dict[str, Any]
) -> Tensor:
    """Move each request's ``uniforms`` until no decision is close, so that rounding changes
    none."""
    for _ in range(64):
        clean = uniforms.nan_to_num(0.0).clamp(0, 1)
        clear = [
            reference.verify_draft(logits, ids, probs, clean + change, **settings)[0]
            for change in (-1e-4, 0.0, 1e-4)
        ]
        close = ((clear[0] != clear[1]) | (clear[1] != clear[2])).any(1, keepdim=True)
        if not close.any():
            break
        uniforms = torch.where(close, (clean + 0.0173) % 1.0, uniforms)
    return uniforms


verify_draft = OpTesting(cases=_cases, settings=(SAMPLED, GREEDY, SHARP), make=_call)

"""Verify drafted tokens: find the tokens that the model accepts, and sample the next token.

The sampled token is the first whose prefix sum of weights exceeds a uniform number times the total
weight. Weights are integers, so sums are exact in any order. Hence a token of weight 0 is never
sampled, and devices with the same weights sample the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_MOST = torch.finfo(torch.float32).max  # independent of the default dtype
_WEIGHT_BITS, _UNIFORM_BITS = 38, 24
"""Fractional bits of weights and of uniform numbers in fixed point; a product stays below 2^63."""


def verify_draft(
    logits: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor | None,
    *,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    num_reqs, rows, vocab_size = logits.shape
    scores = logits.float()
    scores = torch.where(scores.isnan(), -torch.inf, scores).clamp(max=_MOST)
    ids = functional.pad(draft_ids, (0, 1), value=-1)  # the last row has no draft
    drafted = (ids >= 0) & (ids < vocab_size)
    top = scores.amax(2, keepdim=True)
    index = torch.arange(rows, device=logits.device)
    if uniforms is None:
        best = torch.where(top.squeeze(2) > -torch.inf, scores.argmax(2), -1)
        num_accepted = _first_false(drafted & (ids == best), index)
        following = best.gather(1, num_accepted[:, None])
    else:
        exact = torch.exp((scores - torch.where(top > -torch.inf, top, 0.0)) / temperature)
        p = exact / exact.sum(2, keepdim=True).clamp(min=1.0)  # 0 if all logits of a row are -inf
        uniform = uniforms.nan_to_num(0.0).clamp(0.0, 1 - 2.0**-_UNIFORM_BITS)
        if draft_probs is None:  # q is 1 at the drafted token
            q = ids[:, :, None] == torch.arange(vocab_size, device=ids.device)
            q = q.to(p.dtype)
        else:
            q = functional.pad(draft_probs, (0, 0, 0, 1)).nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
            q = torch.where(drafted[:, :, None], q, 0.0)
        place = ids.clamp(0, vocab_size - 1)[:, :, None]
        p_draft, q_draft = p.gather(2, place).squeeze(2), q.gather(2, place).squeeze(2)
        num_accepted = _first_false(drafted & (uniform * q_draft < p_draft), index)
        row = num_accepted[:, None, None].expand(num_reqs, 1, vocab_size)
        p, q = p.gather(1, row).squeeze(1), q.gather(1, row).squeeze(1)
        following = _sample(p, q, uniform[:, -1:])
    count = num_accepted[:, None]
    tokens = torch.where(index < count, ids, torch.where(index == count, following, -1))
    return tokens, num_accepted.to(torch.int32)


def _first_false(accepted: Tensor, index: Tensor) -> Tensor:
    """Return the first column that is False, [num_reqs]; the last column is always False."""
    return torch.where(accepted, index.shape[0] - 1, index).amin(1)


def _sample(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    """Sample a token [num_reqs, 1] from (p - q)+, or from p if (p - q)+ is 0 everywhere.

    The result is -1 if p is 0 everywhere."""
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(1, keepdim=True)
    rest = torch.where(total > 0, rest / total, p)
    until = (rest * 2.0**_WEIGHT_BITS).round().to(torch.int64).cumsum(1)
    fraction = (uniform * 2.0**_UNIFORM_BITS).to(torch.int64)
    passed = (until <= (until[:, -1:] * fraction) >> _UNIFORM_BITS).sum(1, keepdim=True)
    return torch.where(passed < p.shape[1], passed, -1)

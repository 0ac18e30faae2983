"""Sparse MLA in float64, from the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Exact
from dsv4_ops.testing.float64.rope import exact, exact_rotation


def exact_attention(
    q: Tensor, keys: Tensor, exists: Tensor, attn_sink: Tensor | None, softmax_scale: float
) -> tuple[Exact, Exact, Exact]:
    """Compute output, row_max and log-sum-exp in float64.

    Error scale: a logit is rounded in the dot product, in the product with ``softmax_scale``, and
    in the subtraction of row_max; these errors become relative errors of P. A float32 output is
    rounded five more times (exp, product, sum, row_sum, quotient). The errors of the sum over keys
    accumulate like a random walk, with the square root of the number of keys. In bf16, the rounding
    of P and of the output dominates. A log-sum-exp has the errors of its logits and of its sum, and
    is rounded three more times: in the base-2 logarithm, in the addition of row_max, and in the
    conversion to base e.
    """
    query, value = q.to(torch.float64), keys.to(torch.float64)
    value = torch.where(exists[..., None], value, 0.0)
    logits = torch.einsum("thd,tkd->thk", query, value) * softmax_scale
    logits = logits.masked_fill(~exists[:, None, :], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    below = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(torch.float64))
    weights = torch.exp(logits - below[..., None]).nan_to_num(0.0)
    size = torch.einsum("thd,tkd->thk", query.abs(), value.abs()).amax(-1) * softmax_scale
    spread = torch.einsum("thk,tkd->thd", weights, value.abs())
    if q.dtype == torch.float32:
        spread = spread * (5 + 2 * keys.shape[1] ** 0.5 + 3 * size[..., None])
    out = Exact(torch.einsum("thk,tkd->thd", weights, value), spread)
    return (
        out,
        Exact(logits.amax(-1), size * (1 + keys.shape[2] ** 0.5 / 2)),
        Exact(lse, 1 + 3 * size + 3 * lse.abs().nan_to_num(posinf=0.0)),
    )


def exact_over_both(q: Tensor, swa: Any, extra: Any, sink: Any, scale: float) -> Any:
    sources = [swa] if extra is None else [swa, extra]
    keys, exists = (torch.cat(parts, 1) for parts in zip(*sources, strict=True))
    out, _, lse = exact_attention(q, keys, exists, sink, scale)
    return out, lse


def exact_inverse_rope(out: Exact, positions: Tensor | None, cos_sin_cache: Tensor | None) -> Exact:
    """Apply inverse RoPE to ``out``.

    The error scale of a pair rotates with the pair, and grows by one rounding.
    """
    if positions is None or cos_sin_cache is None:
        return out
    value, products = exact_rotation(out.value, positions, cos_sin_cache, inverse=True)
    _, magnitude = exact_rotation(out.magnitude, positions, cos_sin_cache, inverse=True)
    first = value.shape[-1] - cos_sin_cache.shape[1]
    magnitude[..., first:] += exact(value, products, torch.bfloat16).magnitude[..., first:]
    return Exact(value, magnitude, out.unit)

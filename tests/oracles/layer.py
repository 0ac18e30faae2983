"""Oracle of a whole attention layer, from the formulas, in float64: all tokens of one request at
once, without blocks. This file does not import dsv4_ops."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE = 64


@dataclass(frozen=True)
class Sizes:
    """The settings in the formulas; ``ratio`` is 0 for a layer with a window only."""

    window: int
    ratio: int
    overlap: bool
    topk: int
    groups: int
    eps: float
    theta: float
    factor: float  # YaRN's factor; 1 without YaRN
    fp8: bool  # whether main keys are FP8; if not, only q is rounded
    indexer_fp8: bool


@dataclass(frozen=True)
class LayerResult:
    """Output [tokens, groups, width], and margins [tokens]: the worst selected row's score minus
    the best other row's, relative to the spread of scores; inf if all rows are selected."""

    out: Tensor
    margin: Tensor


def frequencies(sizes: Sizes) -> Tensor:
    """Return radians per position of the 32 pairs."""
    pair = torch.arange(ROPE // 2, dtype=torch.float64)
    plain = sizes.theta ** (-2 * pair / ROPE)
    if sizes.factor == 1:
        return plain

    def correction(turns: float) -> float:
        return ROPE * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(sizes.theta))

    low, high = math.floor(correction(32)), math.ceil(correction(1))
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    return plain / sizes.factor * ramp + plain * (1 - ramp)


def rotate(x: Tensor, positions: Tensor, sizes: Sizes, sign: int = 1) -> Tensor:
    """Rotate x [tokens, ..., dim]: multiply each of the last 32 pairs by e^(i angle)."""
    angle = positions.double()[:, None] * frequencies(sizes) * sign
    turn = torch.polar(torch.ones_like(angle), angle)
    turn = turn.view(len(positions), *[1] * (x.dim() - 2), ROPE // 2)
    pairs = torch.view_as_complex(x[..., -ROPE:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([x[..., :-ROPE], torch.view_as_real(pairs * turn).flatten(-2)], -1)


def normed(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def bf16(x: Tensor) -> Tensor:
    return x.float().to(torch.bfloat16).double()


def block_fp8(x: Tensor, block: int) -> Tensor:
    """Round bf16 values to e4m3 and back. Each block has a power of two as its scale, which maps
    the block's amax (at least 1e-4) to at most 448."""
    blocks = x.unflatten(-1, (-1, block))
    unit = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    mantissa, exponent = torch.frexp(unit)
    scale = torch.ldexp(torch.ones_like(unit), exponent - (mantissa == 0.5).int())
    codes = (blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return (codes.double() * scale).flatten(-2)


def stored(key: Tensor, fp8: bool) -> Tensor:
    """Return a rotated key as the main caches store it."""
    if not fp8:
        return key
    key = bf16(key)
    return torch.cat([block_fp8(key[..., :-ROPE], 64), key[..., -ROPE:]], -1)


def compressed_rows(kv_score: Tensor, ape: Tensor, norm_weight: Tensor, sizes: Sizes) -> Tensor:
    """Return rotated rows [tokens // ratio, head_dim]."""
    dim, r = norm_weight.shape[0], sizes.ratio
    count = kv_score.shape[0] // r
    kv, score = kv_score[: count * r].chunk(2, -1)
    score = score + ape.repeat(count, 1)
    rows = []
    for window in range(count):
        own = slice(window * r, (window + 1) * r)
        parts = [(kv[own, -dim:], score[own, -dim:])]
        if sizes.overlap and window > 0:
            before = slice((window - 1) * r, window * r)
            parts.append((kv[before, :dim], score[before, :dim]))
        values, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        rows.append((weights.softmax(0) * values).sum(0))
    made = torch.stack(rows) if rows else kv.new_zeros(0, dim)
    return rotate(normed(made, sizes.eps) * norm_weight, torch.arange(count) * r, sizes)


def selected(q: Tensor, weights: Tensor, keys: Tensor, sizes: Sizes) -> tuple[list[Tensor], Tensor]:
    """Return the selected rows of every token, and the margins of ``LayerResult``."""
    tokens, heads, dim = q.shape
    q = rotate(q, torch.arange(tokens), sizes)
    if sizes.indexer_fp8:
        keys, q = block_fp8(bf16(keys), dim), block_fp8(bf16(q), dim)
    scores = (torch.einsum("thd,jd->thj", q, keys).relu() * weights[..., None]).sum(1)
    scores = scores * dim**-0.5 * heads**-0.5
    chosen, margin = [], torch.full((tokens,), math.inf, dtype=torch.float64)
    for token in range(tokens):
        visible = scores[token, : (token + 1) // sizes.ratio]
        order = torch.sort(visible, descending=True, stable=True)  # of equals, the lower row first
        chosen.append(order.indices[: sizes.topk])
        if len(visible) > sizes.topk:
            gap = order.values[sizes.topk - 1] - order.values[sizes.topk]
            margin[token] = gap / (order.values[0] - order.values[-1]).clamp(min=1e-30)
    return chosen, margin


def attention(
    q: Tensor, swa: Tensor, rows: Tensor, chosen: list[Tensor], sink: Tensor, window: int
) -> Tensor:
    """Return the output [tokens, heads, dim]: a softmax over window, chosen rows and sink."""
    out = []
    for token in range(q.shape[0]):
        keys = torch.cat([swa[max(token - window + 1, 0) : token + 1], rows[chosen[token]]])
        logits = q[token] @ keys.mT * q.shape[-1] ** -0.5
        weights = torch.cat([logits, sink[:, None]], 1).softmax(1)[:, :-1]
        out.append(weights @ keys)
    return torch.stack(out)


def attention_layer(
    sizes: Sizes, inputs: dict[str, Tensor], weights: dict[str, Tensor]
) -> LayerResult:
    """Run the layer over a whole request, with fields of ``LayerInputs`` and ``LayerWeights``."""
    given = {name: tensor.double() for name, tensor in (inputs | weights).items()}
    tokens = given["q"].shape[0]
    positions = torch.arange(tokens)
    q = rotate(normed(given["q"], sizes.eps), positions, sizes)
    q = bf16(q) if inputs["q"].dtype == torch.bfloat16 else q
    swa = stored(rotate(given["kv"], positions, sizes), sizes.fp8)
    rows, margin = swa[:0], torch.full((tokens,), math.inf, dtype=torch.float64)
    chosen = [torch.arange(0)] * tokens
    if sizes.ratio:
        rows = stored(
            compressed_rows(given["kv_score"], given["ape"], given["norm_weight"], sizes), sizes.fp8
        )
        chosen = [torch.arange((token + 1) // sizes.ratio) for token in range(tokens)]
    if sizes.topk:
        keys = compressed_rows(
            given["indexer_kv_score"], given["indexer_ape"], given["indexer_norm_weight"], sizes
        )
        chosen, margin = selected(given["indexer_q"], given["indexer_weights"], keys, sizes)
    out = attention(q, swa, rows, chosen, given["attn_sink"], sizes.window)
    out = rotate(out, positions, sizes, sign=-1)
    return LayerResult(out.reshape(tokens, sizes.groups, -1), margin)

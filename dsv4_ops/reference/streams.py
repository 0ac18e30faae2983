"""Hyper-connections: mix, weight, collapse and normalise the residual streams between blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import HyperConnection
from dsv4_ops.reference.common import dense
from dsv4_ops.reference.sinkhorn import sinkhorn


def hyper_connection(
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
) -> HyperConnection:
    count = int(streams.shape[1])
    written = streams.new_empty((0, *streams.shape[1:]))
    if block_out is not None and post is not None and mix is not None:
        written = mixed(post, mix, block_out, streams)
        streams = written
    values = streams.to(torch.float32)
    weights = _normed(values.flatten(1), norm_eps) @ fn.t()
    pre, after, logits = (
        part * factor + bias
        for part, factor, bias in zip(
            weights.split([count, count, count * count], 1),
            scale.unbind(),
            base.split([count, count, count * count]),
            strict=True,
        )
    )
    collapsed = ((pre.sigmoid() + eps)[..., None] * values).sum(1).to(streams.dtype)
    x = _normed(collapsed.to(torch.float32), norm_eps) * norm_weight
    next_mix = sinkhorn(logits, num_streams=count, iterations=iterations, eps=eps)
    results = (written, 2 * after.sigmoid(), next_mix, x.to(streams.dtype))
    return HyperConnection(*(dense(each) for each in results))


def mixed(post: Tensor, mix: Tensor, out: Tensor, streams: Tensor) -> Tensor:
    """Return ``post`` times the block's output, plus the streams times the transposed ``mix``."""
    added = post.float()[..., None] * out.float()[..., None, :]
    # pointwise, because there are few streams, and a matmul would not fuse with its neighbours
    residual = (mix.float()[..., None] * streams.float()[..., None, :]).sum(-3)
    return (added + residual).to(streams.dtype)


def _normed(values: Tensor, eps: float) -> Tensor:
    scaled: Tensor = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return scaled

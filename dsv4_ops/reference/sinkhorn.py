"""Reference of the mixing matrices of hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, *, num_streams: int, iterations: int, eps: float) -> Tensor:
    mix = torch.softmax(logits.unflatten(1, (num_streams, num_streams)), -1) + eps
    for iteration in range(iterations):
        if iteration > 0:
            mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix

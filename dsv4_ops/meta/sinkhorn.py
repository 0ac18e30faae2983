"""Fake of ``sinkhorn``."""

from __future__ import annotations

from torch import Tensor


def sinkhorn(logits: Tensor, num_streams: int) -> Tensor:
    return logits.new_empty((logits.shape[0], num_streams, num_streams))

"""Fake of hyper-connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.types import HyperConnection


def hyper_connection(streams: Tensor, block_out: Tensor | None) -> HyperConnection:
    tokens, count, width = streams.shape
    floats: Any = {"dtype": torch.float32}
    return HyperConnection(
        streams.new_empty((0 if block_out is None else tokens, count, width)),
        streams.new_empty((tokens, count), **floats),
        streams.new_empty((tokens, count, count), **floats),
        streams.new_empty((tokens, width)),
    )

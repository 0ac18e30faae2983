"""Fake of the fused inserts of a C4 layer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import C4Step


def insert_c4_step(q: Tensor, indexer_q: Tensor) -> C4Step:
    return C4Step(
        q.new_empty(q.shape),
        indexer_q.new_empty(indexer_q.shape, dtype=torch.float8_e4m3fn),
        indexer_q.new_empty(indexer_q.shape[:2], dtype=torch.float32),
    )

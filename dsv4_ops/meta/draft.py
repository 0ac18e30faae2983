"""Fake of draft verification."""

from __future__ import annotations

import torch
from torch import Tensor


def verify_draft(logits: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    num_reqs, rows = logits.shape[0], logits.shape[1]
    tokens = draft_ids.new_empty((num_reqs, rows))
    return tokens, draft_ids.new_empty((num_reqs,), dtype=torch.int32)

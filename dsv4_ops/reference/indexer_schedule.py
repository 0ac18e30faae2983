"""DeepGEMM's schedule of a step's paged logits."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.tiles import SCHEDULE_KEYS


def paged_mqa_logits_metadata(seq_lens: Tensor, *, block_size: int, num_sms: int) -> Tensor:
    splits = (seq_lens.long().clamp(min=0) + SCHEDULE_KEYS - 1) // SCHEDULE_KEYS
    before = torch.nn.functional.pad(splits.cumsum(0), (1, 0))
    sm = torch.arange(num_sms + 1, device=seq_lens.device)
    share, rest = splits.sum() // num_sms, splits.sum() % num_sms
    start = (sm * share + torch.minimum(sm, rest))[:, None]
    # all comparisons at once: a search would wait for one load after the other
    reached = before <= start
    request = reached.sum(1) - 1
    split = start[:, 0] - torch.where(reached, before, 0).amax(1)
    return torch.stack((request, split), 1).to(torch.int32)

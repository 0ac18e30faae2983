"""Lengths of a sequence on the ranks that share it."""

from __future__ import annotations

import torch
from torch import Tensor


def cp_seq_lens(
    seq_lens: Tensor, cp_rank: Tensor | None, *, cp_world_size: int, cp_interleave: int
) -> Tensor:
    lens = seq_lens.long().clamp(min=0)
    rank = cp_rank
    if rank is None:
        lens = lens[:, None]
        rank = torch.arange(cp_world_size, device=seq_lens.device)
    rounds, rest = lens // (cp_interleave * cp_world_size), lens % (cp_interleave * cp_world_size)
    turn = (rest - rank.long() * cp_interleave).clamp(0, cp_interleave)
    found = rounds * cp_interleave + turn
    return torch.where((rank >= 0) & (rank < cp_world_size), found, 0).to(torch.int32)

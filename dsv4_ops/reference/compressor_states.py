"""States of the compressor: the projections of a token, with the bias of its place in the
window."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import ABSENT
from dsv4_ops.reference.common import take
from dsv4_ops.reference.pages import scatter_rows


def save_compressor_states_functional(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> Tensor:
    width = ape.shape[1]
    exists = positions >= 0
    bias = take(ape, torch.where(exists, positions, 0) % compress_ratio)
    rows = torch.cat([kv_score[:, :width], kv_score[:, width:] + bias], 1)
    slots = torch.where(exists, slot_mapping, ABSENT)
    row = torch.arange(block_size, device=states.device)[:, None]
    columns = row * (2 * width) + torch.arange(2 * width, device=states.device)
    return scatter_rows(states, rows, slots, block_size, columns)


def save_compressor_states(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> None:
    states.copy_(
        save_compressor_states_functional(
            kv_score,
            ape,
            states,
            slot_mapping,
            positions,
            compress_ratio=compress_ratio,
            block_size=block_size,
        )
    )

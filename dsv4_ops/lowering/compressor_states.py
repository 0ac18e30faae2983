"""Lowerings of the compressor's states: our kernel on CUDA, elsewhere the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import compressor_states as reference

save_compressor_states = TritonKernel(reference.save_compressor_states)


def _save_compressor_states_functional(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> Tensor:
    written = states.clone(memory_format=torch.contiguous_format)
    torch.ops.dsv4_ops.save_compressor_states.default(
        kv_score,
        ape,
        written,
        slot_mapping,
        positions,
        compress_ratio=compress_ratio,
        block_size=block_size,
    )
    return written


save_compressor_states_functional = Decompose(_save_compressor_states_functional)

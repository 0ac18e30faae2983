"""Compute the slots of the compressed rows that a step completes."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.dispatch.define import define_op

_compressed_slot_mapping = define_op(
    "slot_mapping",
    "compressed_slot_mapping(Tensor positions, Tensor req_indices, Tensor "
    "block_table, Tensor slot_mapping, *, "
    "int block_size, int compress_ratio, int cp_world_size, int cp_interleave) -> Tensor",
    dynamic=("num_tokens", "num_reqs", "max_blocks"),
    source="vLLM 0.33 get_compressed_slot_mapping; semantics re-derived",
    gradient=INTEGERS,
)


def compressed_slot_mapping(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    cp_world_size: int = 1,
    cp_interleave: int = 1,
) -> Tensor:
    """Compute the slot of the compressed row that each token completes.

    The token at position p completes row p // compress_ratio if (p + 1) % compress_ratio is 0;
    other tokens get -1.

    Args:
        positions: Absolute position of every token, [num_tokens], int64; values outside 0..2**31-2
            mark padding.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        block_table: Physical block of every logical block of the compressed cache, [num_reqs,
            max_blocks], int32, any strides.
        slot_mapping: Slot of every token in the uncompressed cache, [num_tokens], int64. A negative
            slot (padding, a replayed token, a token of another context-parallel rank) gives -1.
        block_size: Compressed rows per block. At least 1.
        compress_ratio: Positions per compressed row. At least 1.
        cp_world_size: Context-parallel ranks that share the sequence. At least 1.
        cp_interleave: Consecutive positions on one rank; a multiple of ``compress_ratio`` if there
            are several ranks.

    Returns:
        int64 [num_tokens]: block * block_size + row in the block; -1 for tokens that complete no
        row, and where the row lies past the table or the table entry is negative.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, several devices, or a bad interleave.
        TypeError: a dtype other than those above.

    Compile: decomposes to one pointwise kernel with a masked load; dynamic in all tensor sizes;
        CUDA graphs and export: yes.

    Source: vLLM 0.33 ``get_compressed_slot_mapping``.

    Example:
        >>> import torch, dsv4_ops
        >>> positions = torch.tensor([7, 8, 11])
        >>> req_indices = torch.tensor([0, 0, 1], dtype=torch.int32)
        >>> block_table = torch.tensor([[5], [9]], dtype=torch.int32)
        >>> slots = torch.tensor([7, 8, 11])
        >>> dsv4_ops.compressed_slot_mapping(
        ...     positions, req_indices, block_table, slots, block_size=64, compress_ratio=4
        ... ).tolist()
        [321, -1, 578]
    """
    checks = Checks("compressed_slot_mapping")
    checks.tokens(positions, req_indices, block_table)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    sizes = {"block_size": block_size, "compress_ratio": compress_ratio}
    sizes |= {"cp_world_size": cp_world_size, "cp_interleave": cp_interleave}
    checks.at_least(1, **sizes)
    if cp_world_size > 1:
        checks.divides("compress_ratio", compress_ratio, "cp_interleave", cp_interleave)
    return _compressed_slot_mapping(positions, req_indices, block_table, slot_mapping, **sizes)

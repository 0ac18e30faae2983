"""Lowerings of two ops: one lists the slots of the window, the other lists the slots of all
compressed rows."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_ops.lowering.kinds import PointwiseIR


def _swa_indices_and_lens(
    positions: Any, req_indices: Any, block_table: Any, *, block_size: int, window_size: int
) -> tuple[Any, Any]:
    from dsv4_ops.lowering._compat import ops
    from dsv4_ops.lowering.slot_rows import int32, realized, slot_rows, token_is_valid

    valid = token_is_valid(positions, req_indices, block_table.get_size()[0])
    load_position = positions.make_loader()

    def position(index: Any) -> Any:
        return ops.to_dtype(load_position(index), torch.int32)

    def length(index: Any) -> Any:
        full = ops.add(ops.minimum(position(index), int32(window_size - 1)), int32(1))
        return ops.where(valid(index), full, int32(0))

    def oldest(index: Any) -> Any:
        first = ops.maximum(ops.sub(position(index), int32(window_size - 1)), int32(0))
        return ops.where(valid(index), first, int32(0))

    num_tokens = positions.get_size()
    lens = realized(positions, torch.int32, num_tokens, length)
    first = realized(positions, torch.int32, num_tokens, oldest)
    indices = slot_rows(
        block_table, req_indices, first, lens, width=window_size, block_size=block_size
    )
    return indices, lens


swa_indices_and_lens = PointwiseIR(_swa_indices_and_lens)


def _dense_compressed_indices(
    positions: Any,
    req_indices: Any,
    block_table: Any,
    *,
    block_size: int,
    compress_ratio: int,
    max_compressed: Any,
) -> tuple[Any, Any]:
    from dsv4_ops.lowering._compat import ops
    from dsv4_ops.lowering.slot_rows import int32, realized, slot_rows, token_is_valid

    valid = token_is_valid(positions, req_indices, block_table.get_size()[0])
    load_position = positions.make_loader()

    def visible(index: Any) -> Any:
        position = ops.to_dtype(load_position(index), torch.int32)
        # truncation equals floor division for valid positions, which are not negative
        rows = ops.truncdiv(ops.add(position, int32(1)), int32(compress_ratio))
        width = ops.index_expr(max_compressed, torch.int32)
        return ops.where(valid(index), ops.minimum(rows, width), int32(0))

    lens = realized(positions, torch.int32, positions.get_size(), visible)
    indices = slot_rows(
        block_table, req_indices, None, lens, width=max_compressed, block_size=block_size
    )
    return indices, lens


dense_compressed_indices = PointwiseIR(_dense_compressed_indices)

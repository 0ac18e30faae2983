"""Slots of the compressed rows that a token attends to: selected ones (C4) or all of them
(C128)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import TopkIndices
from dsv4_ops.meta import topk_indices as meta
from dsv4_ops.reference import topk_indices as reference

_global_topk_indices_and_lens = define_op(
    OpSpec(
        stem="topk_indices",
        schema="global_topk_indices_and_lens(Tensor topk_indices, Tensor req_indices, Tensor "
        "block_table, *, "
        "int block_size) -> (Tensor, Tensor)",
        meta=meta.global_topk_indices_and_lens,
        reference=reference.global_topk_indices_and_lens,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=("num_tokens", "num_reqs", "max_blocks", "topk"),
        source="vLLM 0.33 compute_global_topk_indices_and_lens, with the bounds its newer "
        "tests demand",
        gradient=INTEGERS,
    )
)


def global_topk_indices_and_lens(
    topk_indices: Tensor, req_indices: Tensor, block_table: Tensor, *, block_size: int
) -> TopkIndices:
    """Translate each token's selected compressed rows from request-local numbers to cache slots.

    Args:
        topk_indices: Selected rows inside the request, [num_tokens, topk], int32; negative means
            unused.
        req_indices: Request of every token, [num_tokens], int32; outside 0..num_reqs-1 means
            padding.
        block_table: Page of every logical block of the compressed cache, [num_reqs, max_blocks],
            int32, any strides.
        block_size: Compressed rows per page. At least 1.

    Returns:
        ``TopkIndices(indices, lens)``: int32 [num_tokens, topk] slots at unchanged places, -1 for
        unused entries, rows past the table, negative pages and slots beyond int32; and int32
        [num_tokens], one past the last valid entry.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``block_size`` below 1, or several devices.
        TypeError: a dtype other than int32.

    Compile: decomposes to one kernel (masked load and a row maximum); dynamic in all tensor sizes;
        CUDA graphs and export: yes.

    Source: vLLM 0.33 ``compute_global_topk_indices_and_lens``.

    Example:
        >>> import torch, dsv4_ops
        >>> topk_indices = torch.tensor([[0, 64, -1, -1]], dtype=torch.int32)
        >>> block_table = torch.tensor([[10, 11]], dtype=torch.int32)
        >>> req_indices = torch.zeros(1, dtype=torch.int32)
        >>> result = dsv4_ops.global_topk_indices_and_lens(
        ...     topk_indices, req_indices, block_table, block_size=64
        ... )
        >>> result.indices.tolist(), result.lens.tolist()
        ([[640, 704, -1, -1]], [2])
    """
    checks = Checks("global_topk_indices_and_lens")
    checks.tensor("topk_indices", topk_indices, torch.int32, "num_tokens", "topk")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.at_least(1, block_size=block_size)
    return TopkIndices(
        *_global_topk_indices_and_lens(
            topk_indices, req_indices, block_table, block_size=block_size
        )
    )


_dense_compressed_indices = define_op(
    OpSpec(
        stem="topk_indices",
        schema="dense_compressed_indices(Tensor positions, Tensor req_indices, Tensor "
        "block_table, *, int block_size, "
        "int compress_ratio, int max_compressed) -> (Tensor, Tensor)",
        meta=meta.dense_compressed_indices,
        reference=reference.dense_compressed_indices,
        lowering={"cpu": "pointwise", "cuda": "pointwise"},
        dynamic=("num_tokens", "num_reqs", "max_blocks"),
        source="vLLM 0.33 build_c128a_topk_metadata; semantics re-derived",
        gradient=INTEGERS,
    )
)


def dense_compressed_indices(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    max_compressed: int,
) -> TopkIndices:
    """Cache slots of all compressed rows that every token may see: what C128 layers attend to.

    Args:
        positions: Absolute position of every token, [num_tokens], int64; outside 0..2**31-2 means
            padding.
        req_indices: Request of every token, [num_tokens], int32; outside 0..num_reqs-1 means
            padding.
        block_table: Page of every logical block of the compressed cache, [num_reqs, max_blocks],
            int32, any strides.
        block_size: Compressed rows per page. At least 1.
        compress_ratio: Positions per compressed row. At least 1.
        max_compressed: Width of the result, from the configured longest request; it never depends
            on the batch.

    Returns:
        ``TopkIndices(indices, lens)``: int32 [num_tokens, max_compressed] slots of rows 0, 1, ..,
        -1 past the visible ones; and int32 [num_tokens], min((position + 1) // compress_ratio,
        max_compressed). Padding tokens have a row of -1 and length 0. A row past the table, on a
        negative page or with a slot beyond int32 is -1.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: pointwise lowering (one masked table read per entry); dynamic in all tensor sizes; CUDA
        graphs and export: yes.

    Source: vLLM 0.33 ``build_c128a_topk_metadata``.

    Example:
        >>> import torch, dsv4_ops
        >>> block_table = torch.tensor([[4, 9]], dtype=torch.int32)
        >>> positions, req_indices = torch.tensor([383]), torch.zeros(1, dtype=torch.int32)
        >>> dsv4_ops.dense_compressed_indices(
        ...     positions,
        ...     req_indices,
        ...     block_table,
        ...     block_size=2,
        ...     compress_ratio=128,
        ...     max_compressed=4,
        ... ).indices.tolist()
        [[8, 9, 18, -1]]
    """
    checks = Checks("dense_compressed_indices")
    checks.tensor("positions", positions, torch.int64, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.at_least(
        1, block_size=block_size, compress_ratio=compress_ratio, max_compressed=max_compressed
    )
    return TopkIndices(
        *_dense_compressed_indices(
            positions,
            req_indices,
            block_table,
            block_size=block_size,
            compress_ratio=compress_ratio,
            max_compressed=max_compressed,
        )
    )

"""Insert into paged KV caches, FP8 and plain, and gather from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.dispatch.define import define_op

_quantize_and_insert_k_cache = define_op(
    "kv_cache",
    "quantize_and_insert_k_cache(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping, "
    "*, int block_size, str layout) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_blocks"),
    source="vLLM 0.33 quantize_and_insert_k_cache; values that it leaves open are decided here",
)


def quantize_and_insert_k_cache(
    k: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    layout: str = MainLayout.tag,
) -> None:
    """Quantise the key of every token to FP8 and write it to the token's cache slot.

    Args:
        k: Keys with RoPE applied, [num_rows, 512], bfloat16, any strides; at least num_tokens rows;
            extra rows are ignored. The last 64 values of a row are its RoPE part.
        k_cache: Paged cache, [num_blocks, page_bytes], uint8, from ``MainLayout.allocate``. Blocks
            must start at multiples of 16 bytes and may have gaps between them.
        slot_mapping: Slot of every token, block * block_size + row, [num_tokens], int64. Tokens
            whose slot is below 0 or past the last block are skipped.
        block_size: Rows per block: 64 for the window and C4, 2 for C128. At least 1.
        layout: Tag of the cache's layout, "v4_fp8".

    Returns:
        Nothing.

    Mutates: ``k_cache``: only the 584 bytes of each slot that the call writes. Every 64 of the
        first 448 values share the smallest power-of-two scale, at least 2^-22, for which amax /
        scale is at most 448. The row stores the scales as UE8M0 bytes and the values divided by
        their scales as e4m3 codes (round to nearest even). Values within 3 % of the largest
        bfloat16 read back as infinities. RoPE values are copied bit for bit; the eighth scale byte
        is 0. NaN becomes code 0x7F and does not affect the scale; an infinity affects the scale
        like the largest finite bfloat16, saturates, and reads back as an infinity. If two tokens
        share a slot, the slot may hold a mix of their bytes.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, ``block_size`` below
            1, an unknown layout, or several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of the cache; on CUDA our Triton kernel runs, both in
        graphs and in AOTInductor packages; on a CPU, Inductor generates scatters; dynamic in
        num_tokens and num_blocks; CUDA graphs and export: yes. For CUDA graphs, keep the cache in
        ``KVCacheBuffers`` or mark it with ``dsv4_ops.attention.caches.mark_static``.

    Source: vLLM 0.33 ``quantize_and_insert_k_cache``; FlashMLA's 584-byte rows.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import MainLayout
        >>> layout = MainLayout(block_size=64)
        >>> k_cache = layout.allocate(num_blocks=4)
        >>> k = torch.zeros(1, 512, dtype=torch.bfloat16)
        >>> k[0, :3] = torch.tensor([3.0, -0.3, 0.01])
        >>> dsv4_ops.quantize_and_insert_k_cache(k, k_cache, torch.tensor([130]), block_size=64)
        >>> k_cache.view(-1)[layout.data_offset(130) :][:3].tolist()
        [124, 226, 58]
        >>> k_cache.view(-1)[layout.scale_offset(130) :][:8].tolist()
        [120, 105, 105, 105, 105, 105, 105, 0]
    """
    op = "quantize_and_insert_k_cache"
    check_quantized_insert(MainLayout, op, k, k_cache, slot_mapping, block_size, layout)
    _quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size=block_size, layout=layout)


def check_quantized_insert(
    kind: type[MainLayout | IndexerLayout],
    op: str,
    k: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    layout: str,
) -> None:
    """Check the arguments of an op that quantises keys into a cache of layout ``kind``."""
    checks = Checks(op)
    checks.at_least(1, block_size=block_size)
    checks.one_of("layout", layout, kind.tag)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    checks.tensor("k", k, torch.bfloat16, "num_rows", kind.head_dim)
    checks.rows_for_tokens("k", k)
    checks.pages("k_cache", k_cache, kind(block_size))


_dequantize_and_gather_k_cache = define_op(
    "kv_cache",
    "dequantize_and_gather_k_cache(Tensor(a!) out, Tensor k_cache, Tensor seq_lens, "
    "Tensor? gather_lens, Tensor block_table, *, int block_size, int offset, str layout) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_reqs", "num_rows", "num_blocks", "max_blocks"),
    source="vLLM 0.33 dequantize_and_gather_k_cache, with bounds",
)


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    block_size: int,
    offset: int = 0,
    layout: str = MainLayout.tag,
) -> None:
    """Gather the last keys of every request as bfloat16.

    The op reads a paged FP8 cache and writes to a workspace.

    Args:
        out: Workspace, [num_reqs, num_rows, 512], bfloat16, any strides.
        k_cache: Paged cache, [num_blocks, page_bytes], uint8, as for
            ``quantize_and_insert_k_cache``.
        seq_lens: Number of rows of each request in this cache, [num_reqs], int32.
        gather_lens: Number of rows to read from the end of every request, [num_reqs], int32; None
            reads all rows.
        block_table: Physical block of every logical block of this cache, [num_reqs, max_blocks],
            int32, any strides.
        block_size: Rows per block. At least 1.
        offset: Row in each request's part of the workspace at which its gathered rows begin,
            0..num_rows.
        layout: Tag of the cache's layout, "v4_fp8".

    Returns:
        Nothing.

    Mutates: ``out``: rows offset .. offset + gather_lens - 1 of every request, as far as the
        workspace has these rows; no other value. Rows before position 0, past the block table or on
        a block that does not exist are zeros.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, an
            unknown layout, or several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place; on CUDA our Triton kernel runs, both in graphs and in AOTInductor
        packages, and its work grows with the number of gathered rows; on a CPU, the code rewrites
        the whole workspace; dynamic in all tensor sizes except the 512; CUDA graphs and export:
        yes.

    Source: vLLM 0.33 ``dequantize_and_gather_k_cache``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import MainLayout
        >>> k_cache = MainLayout(block_size=64).allocate(num_blocks=4)
        >>> k = torch.full((1, 512), 1.5, dtype=torch.bfloat16)
        >>> dsv4_ops.quantize_and_insert_k_cache(k, k_cache, torch.tensor([130]), block_size=64)
        >>> out = torch.zeros(1, 2, 512, dtype=torch.bfloat16)
        >>> seq_lens, gather_lens = torch.tensor([[3], [1]], dtype=torch.int32)
        >>> block_table = torch.tensor([[2]], dtype=torch.int32)
        >>> dsv4_ops.dequantize_and_gather_k_cache(
        ...     out, k_cache, seq_lens, gather_lens, block_table, block_size=64, offset=1
        ... )
        >>> out[0, :, 0].tolist()
        [0.0, 1.5]
    """
    checks = Checks("dequantize_and_gather_k_cache")
    checks.at_least(1, block_size=block_size)
    checks.at_least(0, offset=offset)
    checks.one_of("layout", layout, MainLayout.tag)
    checks.tensor("out", out, torch.bfloat16, "num_reqs", "num_rows", MainLayout.head_dim)
    checks.apart("out", out, "Pass a tensor with memory for every row")
    checks.at_most("offset", offset, "num_rows", checks.sizes["num_rows"])
    checks.pages("k_cache", k_cache, MainLayout(block_size))
    _check_requests(checks, seq_lens, gather_lens, block_table)
    tensors = (out, k_cache, seq_lens, gather_lens, block_table)
    settings: dict[str, Any] = {"block_size": block_size, "offset": offset, "layout": layout}
    _dequantize_and_gather_k_cache(*tensors, **settings)


_gather_k_cache = define_op(
    "kv_cache",
    "gather_k_cache(Tensor k_cache, Tensor seq_lens, Tensor? gather_lens, Tensor "
    "block_table, *, int block_size, SymInt num_rows, int offset, str layout) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_reqs", "num_rows", "num_blocks", "max_blocks"),
    source="vLLM 0.33 dequantize_and_gather_k_cache, with bounds; functional",
)


def gather_k_cache(
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    offset: int = 0,
    layout: str = MainLayout.tag,
) -> Tensor:
    """Gather the last keys of every request from a paged cache into a new tensor.

    Args:
        k_cache: "v4_fp8": [num_blocks, page_bytes], uint8. "plain": [num_blocks, block_size,
            width], bfloat16 or float32, with dense rows.
        seq_lens: Number of rows of each request in this cache, [num_reqs], int32.
        gather_lens: Number of rows to read from the end of every request, [num_reqs], int32; None
            reads all rows.
        block_table: Physical block of every logical block of this cache, [num_reqs, max_blocks],
            int32, any strides.
        block_size: Rows per block. At least 1.
        num_rows: Rows of the result per request. At least 0.
        offset: Row in each request's part of the result at which its gathered rows begin,
            0..num_rows.
        layout: Tag of the cache's layout, "v4_fp8" or "plain".

    Returns:
        For "v4_fp8", the dequantised rows, [num_reqs, num_rows, 512], bfloat16. For "plain", the
        rows bit for bit, [num_reqs, num_rows, width], of the cache's dtype. Rows before ``offset``,
        rows beyond ``gather_lens`` and absent rows are zeros.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, an
            unknown layout, or several devices.
        TypeError: a dtype other than those above.

    Compile: on CUDA one Triton kernel of ours that writes every row once; on a CPU, masked loads;
        dynamic in all tensor sizes and num_rows; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``dequantize_and_gather_k_cache``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import MainLayout
        >>> k_cache = MainLayout(block_size=64).allocate(num_blocks=4)
        >>> k = torch.full((1, 512), 1.5, dtype=torch.bfloat16)
        >>> dsv4_ops.quantize_and_insert_k_cache(k, k_cache, torch.tensor([130]), block_size=64)
        >>> seq_lens = torch.tensor([3], dtype=torch.int32)
        >>> block_table = torch.tensor([[2]], dtype=torch.int32)
        >>> dsv4_ops.gather_k_cache(
        ...     k_cache, seq_lens, None, block_table, block_size=64, num_rows=4
        ... )[0, :, 0].tolist()
        [0.0, 0.0, 1.5, 0.0]
    """
    checks = Checks("gather_k_cache")
    checks.at_least(1, block_size=block_size)
    checks.at_least(0, num_rows=num_rows, offset=offset)
    checks.at_most("offset", offset, "num_rows", num_rows)
    checks.one_of("layout", layout, MainLayout.tag, PlainLayout.tag)
    if layout == PlainLayout.tag:
        checks.rows("k_cache", k_cache, block_size)
    else:
        checks.pages("k_cache", k_cache, MainLayout(block_size))
    _check_requests(checks, seq_lens, gather_lens, block_table)
    settings: dict[str, Any] = {"block_size": block_size, "offset": offset, "layout": layout}
    tensors = (k_cache, seq_lens, gather_lens, block_table)
    return _gather_k_cache(*tensors, num_rows=num_rows, **settings)


def _check_requests(
    checks: Checks, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor
) -> None:
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.optional("gather_lens", gather_lens, torch.int32, "num_reqs")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.request_limit()


_insert_k_cache = define_op(
    "kv_cache",
    "insert_k_cache(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_blocks"),
    source="vLLM 0.33 plain rows of its full-cache inserts",
)


def insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    """Insert the key of every token into an unquantised paged cache.

    Keys are copied bit for bit.

    Args:
        k: Keys, [num_rows, width], bfloat16 or float32, any strides; at least num_tokens rows;
            extra rows are ignored.
        k_cache: Paged cache, [num_blocks, block_size, width], of the dtype of ``k``, with dense
            rows, from ``PlainLayout.allocate``.
        slot_mapping: Slot of every token, block * block_size + row, [num_tokens], int64. Tokens
            whose slot is below 0 or past the last block are skipped.

    Returns:
        Nothing.

    Mutates: ``k_cache``: only the rows of the slots that the call writes. If two tokens share a
        slot, the slot may hold a mix of their values.

    Raises:
        ValueError: shapes that disagree, rows that are not dense, or several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of the cache; on CUDA our Triton kernel runs, both in
        graphs and in AOTInductor packages; on a CPU, Inductor generates a scatter; dynamic in
        num_tokens and num_blocks; CUDA graphs and export: yes.

    Source: vLLM 0.33, the plain-row variants of its cache inserts.

    Example:
        >>> import torch, dsv4_ops
        >>> k_cache = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
        >>> k = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)
        >>> dsv4_ops.insert_k_cache(k, k_cache, torch.tensor([5, -1]))
        >>> k_cache[1, 1].tolist(), int(k_cache.count_nonzero())
        ([1.0, 2.0, 3.0], 3)
    """
    checks = Checks("insert_k_cache")
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    checks.rows("k_cache", k_cache)
    checks.apart("k_cache", k_cache)
    checks.tensor("k", k, k_cache.dtype, "num_rows", "width")
    checks.rows_for_tokens("k", k)
    _insert_k_cache(k, k_cache, slot_mapping)

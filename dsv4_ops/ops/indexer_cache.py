"""Paged FP8 key cache of the lightning indexer: the bytes that DeepGEMM reads."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import IndexerKeys
from dsv4_ops.meta import indexer_cache as meta
from dsv4_ops.reference import indexer_cache as reference

_INSERT = "(Tensor k, Tensor{} k_cache, Tensor slot_mapping, *, int block_size, str layout) -> {}"
_SOURCE = "vLLM 0.33, the store of its indexer compressor; values that it leaves open decided here"

_quantize_and_insert_indexer_k = define_op(
    OpSpec(
        stem="indexer_cache",
        schema="quantize_and_insert_indexer_k" + _INSERT.format("(a!)", "()"),
        meta=meta.quantize_and_insert_indexer_k,
        reference=reference.quantize_and_insert_indexer_k,
        lowering={"cpu": "decompose", "cuda": "triton"},
        dynamic=("num_tokens", "num_blocks"),
        source=_SOURCE,
        providers=("triton", "reference"),
    )
)
_quantize_and_insert_indexer_k_functional = define_op(
    OpSpec(
        stem="indexer_cache",
        schema="quantize_and_insert_indexer_k_functional" + _INSERT.format("", "Tensor"),
        meta=meta.quantize_and_insert_indexer_k_functional,
        reference=reference.quantize_and_insert_indexer_k_functional,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=("num_tokens", "num_blocks"),
        source=_SOURCE,
    )
)


def quantize_and_insert_indexer_k(
    k: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    layout: str = IndexerLayout.tag,
) -> None:
    """Quantise the indexer keys of every token to FP8 and write each to its slot of the cache.

    Args:
        k: Keys with RoPE applied, [num_rows, 128], bfloat16, any strides; at least num_tokens rows,
            more are ignored.
        k_cache: Paged cache, [num_blocks, page_bytes], uint8, from ``IndexerLayout.allocate``.
            Pages may lie apart, at multiples of 16 bytes.
        slot_mapping: Slot of every token, page * block_size + row, [num_tokens], int64. Slots below
            0 and past the last page are skipped.
        block_size: Rows per page, 64 for DeepGEMM. At least 1.
        layout: Tag of the cache's layout, "v4_indexer_fp8".

    Returns:
        Nothing.

    Mutates: ``k_cache``: the 128 codes and the 4 scale bytes of every slot that is written; no
        other byte. One scale for the whole row, float32, the smallest power of two, 2^-22 at least,
        with which the largest magnitude is at most 448. NaN, infinities and tokens that share a
        slot: as ``quantize_and_insert_k_cache``.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, ``block_size`` below
            1, an unknown layout, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: in place, never a copy of the cache; on CUDA our Triton kernel in the graph and in
        AOTInductor packages, on CPU scatters of Inductor; dynamic in num_tokens and num_blocks;
        CUDA graphs and export: yes.

    Source: vLLM 0.33, the store of its indexer compressor; DeepGEMM's paged key layout.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import IndexerLayout
        >>> layout = IndexerLayout(block_size=64)
        >>> k_cache = layout.allocate(num_blocks=2)
        >>> k = torch.full((1, 128), 3.0, dtype=torch.bfloat16)
        >>> dsv4_ops.quantize_and_insert_indexer_k(k, k_cache, torch.tensor([65]), block_size=64)
        >>> k_cache.view(-1)[layout.data_offset(65) :][:2].tolist()
        [124, 124]
        >>> k_cache.view(-1)[layout.scale_offset(65) :][:4].view(torch.float32).tolist()
        [0.0078125]
    """
    _check_insert("quantize_and_insert_indexer_k", k, k_cache, slot_mapping, block_size, layout)
    _quantize_and_insert_indexer_k(k, k_cache, slot_mapping, block_size=block_size, layout=layout)


def quantize_and_insert_indexer_k_functional(
    k: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    layout: str = IndexerLayout.tag,
) -> Tensor:
    """``quantize_and_insert_indexer_k`` into a copy of the cache; for tests and for reading.

    Args:
        k: As for ``quantize_and_insert_indexer_k``, as are the arguments below.
        k_cache: Cache to copy, [num_blocks, page_bytes], uint8.
        slot_mapping: Slot of every token, [num_tokens], int64.
        block_size: Rows per page. At least 1.
        layout: Tag of the cache's layout, "v4_indexer_fp8".

    Returns:
        The new cache, [num_blocks, page_bytes], uint8, dense.

    Mutates: nothing.

    Raises:
        ValueError: as ``quantize_and_insert_indexer_k``.
        TypeError: as ``quantize_and_insert_indexer_k``.

    Compile: a copy and ``quantize_and_insert_indexer_k``; dynamic in num_tokens and num_blocks;
        CUDA graphs and export: yes.

    Source: vLLM 0.33, the store of its indexer compressor.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import IndexerLayout
        >>> k_cache = IndexerLayout(block_size=64).allocate(num_blocks=1)
        >>> k, slots = torch.ones(1, 128, dtype=torch.bfloat16), torch.tensor([0])
        >>> dsv4_ops.quantize_and_insert_indexer_k_functional(
        ...     k, k_cache, slots, block_size=64
        ... )[0, :2]
        tensor([120, 120], dtype=torch.uint8)
    """
    name = "quantize_and_insert_indexer_k_functional"
    _check_insert(name, k, k_cache, slot_mapping, block_size, layout)
    written: Tensor = _quantize_and_insert_indexer_k_functional(
        k, k_cache, slot_mapping, block_size=block_size, layout=layout
    )
    return written


def _check_insert(
    op: str, k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int, layout: str
) -> None:
    checks = Checks(op)
    checks.at_least(1, block_size=block_size)
    checks.one_of("layout", layout, IndexerLayout.tag)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    checks.tensor("k", k, torch.bfloat16, "num_rows", IndexerLayout.head_dim)
    checks.rows_for_tokens("k", k)
    checks.pages("k_cache", k_cache, IndexerLayout(block_size))


_gather_indexer_k = define_op(
    OpSpec(
        stem="indexer_cache",
        schema="gather_indexer_k(Tensor k_cache, Tensor cu_seq_lens, Tensor block_table, *, "
        "int block_size, SymInt num_rows, str layout) -> (Tensor, Tensor)",
        meta=meta.gather_indexer_k,
        reference=reference.gather_indexer_k,
        lowering={"cpu": "decompose", "cuda": "triton"},
        dynamic=("num_reqs", "num_rows", "num_blocks", "max_blocks"),
        source="vLLM 0.33 cp_gather_indexer_k_quant_cache, with bounds",
        providers=("triton", "reference"),
        gradient=INTEGERS,
    )
)


def gather_indexer_k(
    k_cache: Tensor,
    cu_seq_lens: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_rows: int,
    layout: str = IndexerLayout.tag,
) -> IndexerKeys:
    """The indexer keys of all requests, one behind the other: what DeepGEMM's ragged logits take.

    Args:
        k_cache: Paged cache, [num_blocks, page_bytes], uint8, as for
            ``quantize_and_insert_indexer_k``.
        cu_seq_lens: First result row of every request, and the end, [num_reqs + 1], int32,
            non-decreasing; ``dsv4_ops.prefill_row_bounds`` gives it.
        block_table: Page of every logical block of this cache, [num_reqs, max_blocks], int32, any
            strides.
        block_size: Rows per page. At least 1.
        num_rows: Rows of the result, a capacity. At least 0.
        layout: Tag of the cache's layout, "v4_indexer_fp8".

    Returns:
        ``IndexerKeys(k, scales)``: uint8 [num_rows, 128] e4m3 codes, whose values are
        ``k.view(torch.float8_e4m3fn)``, and float32 [num_rows] scales. Rows that belong to no
        request or lie on no page are zeros.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, an
            unknown layout, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: on CUDA one Triton kernel of ours, on CPU a search and masked loads; dynamic in all
        tensor sizes and num_rows; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``cp_gather_indexer_k_quant_cache``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import IndexerLayout
        >>> k_cache = IndexerLayout(block_size=64).allocate(num_blocks=2)
        >>> k = torch.full((1, 128), 3.0, dtype=torch.bfloat16)
        >>> dsv4_ops.quantize_and_insert_indexer_k(k, k_cache, torch.tensor([65]), block_size=64)
        >>> cu_seq_lens = torch.tensor([0, 2], dtype=torch.int32)
        >>> block_table = torch.tensor([[1]], dtype=torch.int32)
        >>> keys = dsv4_ops.gather_indexer_k(
        ...     k_cache, cu_seq_lens, block_table, block_size=64, num_rows=3
        ... )
        >>> keys.k[:, 0].tolist(), keys.scales.tolist()
        ([0, 124, 0], [0.0, 0.0078125, 0.0])
    """
    checks = Checks("gather_indexer_k")
    checks.at_least(1, block_size=block_size)
    checks.at_least(0, num_rows=num_rows)
    checks.one_of("layout", layout, IndexerLayout.tag)
    checks.pages("k_cache", k_cache, IndexerLayout(block_size))
    checks.tensor("cu_seq_lens", cu_seq_lens, torch.int32, "num_reqs + 1")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.request_limit()
    return IndexerKeys(
        *_gather_indexer_k(
            k_cache,
            cu_seq_lens,
            block_table,
            block_size=block_size,
            num_rows=num_rows,
            layout=layout,
        )
    )

"""Paged key cache without quantisation: the reference mode, and what FlashInfer reads."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.meta import plain_cache as meta
from dsv4_ops.reference import plain_cache as reference

_SOURCE = "vLLM 0.33 plain rows of its full-cache inserts"

_insert_k_cache = define_op(
    OpSpec(
        stem="plain_cache",
        schema="insert_k_cache(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping) -> ()",
        meta=meta.insert_k_cache,
        reference=reference.insert_k_cache,
        lowering={"cpu": "decompose", "cuda": "triton"},
        dynamic=("num_tokens", "num_blocks"),
        source=_SOURCE,
        providers=("triton", "reference"),
    )
)
_insert_k_cache_functional = define_op(
    OpSpec(
        stem="plain_cache",
        schema="insert_k_cache_functional(Tensor k, Tensor k_cache, Tensor slot_mapping) -> Tensor",
        meta=meta.insert_k_cache_functional,
        reference=reference.insert_k_cache_functional,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=("num_tokens", "num_blocks"),
        source=_SOURCE,
    )
)


def insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the key of every token to its slot of an unquantised paged cache, bit for bit.

    Args:
        k: Keys, [num_rows, width], bfloat16 or float32, any strides; at least num_tokens rows, more
            are ignored.
        k_cache: Paged cache, [num_blocks, block_size, width], of the dtype of ``k``, with dense
            rows, from ``PlainLayout.allocate``.
        slot_mapping: Slot of every token, page * block_size + row, [num_tokens], int64. Slots below
            0 and past the last page are skipped.

    Returns:
        Nothing.

    Mutates: ``k_cache``: the rows of the slots that are written; nothing else. If two tokens have
        one slot, its values are of either of them, not of one alone.

    Raises:
        ValueError: shapes that disagree, rows that are not dense, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: in place, never a copy of the cache; on CUDA our Triton kernel in the graph and in
        AOTInductor packages, on CPU a scatter of Inductor; dynamic in num_tokens and num_blocks;
        CUDA graphs and export: yes.

    Source: vLLM 0.33, the plain-row variants of its cache inserts.

    Example:
        >>> import torch, dsv4_ops
        >>> k_cache = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
        >>> k = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)
        >>> dsv4_ops.insert_k_cache(k, k_cache, torch.tensor([5, -1]))
        >>> k_cache[1, 1].tolist(), int(k_cache.count_nonzero())
        ([1.0, 2.0, 3.0], 3)
    """
    _check("insert_k_cache", k, k_cache, slot_mapping)
    _insert_k_cache(k, k_cache, slot_mapping)


def insert_k_cache_functional(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """``insert_k_cache`` into a copy of the cache; for tests and for reading.

    Args:
        k: Keys, [num_rows, width], bfloat16 or float32, as for ``insert_k_cache``.
        k_cache: Cache to copy, [num_blocks, block_size, width], of the dtype of ``k``.
        slot_mapping: Slot of every token, [num_tokens], int64.

    Returns:
        The new cache, [num_blocks, block_size, width], dense.

    Mutates: nothing.

    Raises:
        ValueError: as ``insert_k_cache``.
        TypeError: as ``insert_k_cache``.

    Compile: a copy and ``insert_k_cache``; dynamic in num_tokens and num_blocks; CUDA graphs and
        export: yes.

    Source: vLLM 0.33, the plain-row variants of its cache inserts.

    Example:
        >>> import torch, dsv4_ops
        >>> k_cache, k = torch.zeros(1, 2, 2), torch.ones(1, 2)
        >>> dsv4_ops.insert_k_cache_functional(k, k_cache, torch.tensor([1])).tolist()
        [[[0.0, 0.0], [1.0, 1.0]]]
    """
    _check("insert_k_cache_functional", k, k_cache, slot_mapping)
    written: Tensor = _insert_k_cache_functional(k, k_cache, slot_mapping)
    return written


def _check(op: str, k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    checks = Checks(op)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    checks.rows("k_cache", k_cache)
    checks.tensor("k", k, k_cache.dtype, "num_rows", "width")
    checks.rows_for_tokens("k", k)

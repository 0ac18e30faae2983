"""What happens to queries and keys before attention: norm, rotation, and the insert of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import InsertedQuery
from dsv4_ops.meta import qnorm as meta
from dsv4_ops.reference import qnorm as reference

ROPE_DIM = MainLayout.head_dim - MainLayout.code_dim
"""Values of a key that are rotated."""

_DIMENSIONS = ("num_tokens", "num_positions", "num_heads", "num_slots", "num_blocks")
_SOURCE = "vLLM 0.33 fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, with bounds"

_SCHEMA = (
    "(Tensor q, Tensor kv, Tensor{} k_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, *, float eps, int block_size, str layout) -> {}"
)
_qnorm_rope_kv_insert = define_op(
    OpSpec(
        stem="qnorm",
        schema="qnorm_rope_kv_insert" + _SCHEMA.format("(a!)", "Tensor"),
        meta=meta.qnorm_rope_kv_insert,
        reference=reference.qnorm_rope_kv_insert,
        lowering={"cpu": "decompose", "cuda": "triton"},
        dynamic=_DIMENSIONS,
        source=_SOURCE,
        providers=("triton", "reference"),
    )
)
_qnorm_rope_kv_insert_functional = define_op(
    OpSpec(
        stem="qnorm",
        schema="qnorm_rope_kv_insert_functional" + _SCHEMA.format("", "(Tensor, Tensor)"),
        meta=meta.qnorm_rope_kv_insert_functional,
        reference=reference.qnorm_rope_kv_insert_functional,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=_DIMENSIONS,
        source=_SOURCE,
    )
)


def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str = MainLayout.tag,
) -> Tensor:
    """Normalise and rotate the queries; rotate the keys and write them to the window cache.

    Args:
        q: Queries, [num_tokens, num_heads, 512], bfloat16, any strides.
        kv: Keys after their own RMSNorm, [num_tokens, 512], bfloat16, any strides.
        k_cache: "v4_fp8": [num_blocks, page_bytes], uint8, from ``MainLayout.allocate``. "plain":
            [num_blocks, block_size, 512], bfloat16, from ``PlainLayout.allocate``.
        slot_mapping: Slot of the first num_slots tokens, [num_slots], int64; at most num_tokens.
            The keys of the tokens after them are not written, nor are those of slots below 0 and
            past the last page.
        positions: Absolute position of every token, [num_tokens], int64. Rows of a position below 0
            or past the table are not rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, 64], float32.
        eps: Added to the mean square in the RMSNorm. Above 0.
        block_size: Rows per page. At least 1.
        layout: Tag of the cache's layout, "v4_fp8" or "plain".

    Returns:
        A tensor like ``q``, dense: each head over the root of its mean square plus ``eps``, without
        a weight, then its last 64 values as ``apply_rope`` rotates them; float32 throughout and one
        cast. A head whose sum of squares exceeds float32 becomes 0.

    Mutates: ``k_cache``: the bytes of every slot that is written; no other byte. They are those of
        ``apply_rope`` followed by ``quantize_and_insert_k_cache`` (or ``insert_k_cache``), bit for
        bit; a NaN among the rotated values is 0x7FC0. If two tokens have one slot, its bytes are
        of either of them, not of one alone. Alone among the ops, this one and ``insert_c4_step``
        write to an argument and return a result: what their parts share is the launch.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, more slots than
            tokens, ``eps`` not above 0, ``block_size`` below 1, an unknown layout, or several
            devices.
        TypeError: a dtype other than the ones above.

    Compile: in place, never a copy of the cache; on CUDA one launch of our Triton kernel in the
        graph and in AOTInductor packages, on CPU loops and scatters of Inductor; dynamic in
        num_tokens, num_heads, num_slots, num_blocks and num_positions; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import MainLayout
        >>> cos_sin_cache = dsv4_ops.rope_cos_sin_cache(9, theta=10000.0)
        >>> k_cache = MainLayout(block_size=64).allocate(num_blocks=4)
        >>> q = torch.full((1, 2, 512), 3.0, dtype=torch.bfloat16)
        >>> kv, slot_mapping = torch.ones(1, 512, dtype=torch.bfloat16), torch.tensor([130])
        >>> q = dsv4_ops.qnorm_rope_kv_insert(
        ...     q, kv, k_cache, slot_mapping, torch.tensor([0]), cos_sin_cache,
        ...     eps=1e-6, block_size=64
        ... )
        >>> q[0, 1, 510:], k_cache[2, 2 * 576 :][:2]
        (tensor([1., 1.], dtype=torch.bfloat16), tensor([120, 120], dtype=torch.uint8))
    """
    _check_insert(
        "qnorm_rope_kv_insert",
        (q, kv, k_cache, slot_mapping, positions, cos_sin_cache),
        eps,
        block_size,
        layout,
    )
    normed: Tensor = _qnorm_rope_kv_insert(
        q,
        kv,
        k_cache,
        slot_mapping,
        positions,
        cos_sin_cache,
        eps=eps,
        block_size=block_size,
        layout=layout,
    )
    return normed


def qnorm_rope_kv_insert_functional(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str = MainLayout.tag,
) -> InsertedQuery:
    """``qnorm_rope_kv_insert`` into a copy of the cache; for tests and for reading.

    Args:
        q: As for ``qnorm_rope_kv_insert``, as are the arguments below.
        kv: Keys, [num_tokens, 512], bfloat16.
        k_cache: Cache to copy, of this layout.
        slot_mapping: Slot of the first num_slots tokens, [num_slots], int64.
        positions: Absolute position of every token, [num_tokens], int64.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, 64], float32.
        eps: Added to the mean square. Above 0.
        block_size: Rows per page. At least 1.
        layout: Tag of the cache's layout, "v4_fp8" or "plain".

    Returns:
        ``InsertedQuery(q, k_cache)``: the result of ``qnorm_rope_kv_insert``, and the new cache,
        dense.

    Mutates: nothing.

    Raises:
        ValueError: as ``qnorm_rope_kv_insert``.
        TypeError: as ``qnorm_rope_kv_insert``.

    Compile: a copy and ``qnorm_rope_kv_insert``; dynamic as that; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> rows = torch.full((1, 1, 512), 2.0, dtype=torch.bfloat16)
        >>> inserted = dsv4_ops.qnorm_rope_kv_insert_functional(
        ...     rows, rows[0], PlainLayout(1).allocate(1), torch.tensor([0]), torch.tensor([0]),
        ...     dsv4_ops.rope_cos_sin_cache(1, theta=10000.0),
        ...     eps=1e-6, block_size=1, layout="plain"
        ... )
        >>> inserted.q[0, 0, 0].item(), inserted.k_cache[0, 0, 0].item()
        (1.0, 2.0)
    """
    _check_insert(
        "qnorm_rope_kv_insert_functional",
        (q, kv, k_cache, slot_mapping, positions, cos_sin_cache),
        eps,
        block_size,
        layout,
    )
    return InsertedQuery(
        *_qnorm_rope_kv_insert_functional(
            q,
            kv,
            k_cache,
            slot_mapping,
            positions,
            cos_sin_cache,
            eps=eps,
            block_size=block_size,
            layout=layout,
        )
    )


def _check_insert(
    op: str, tensors: tuple[Tensor, ...], eps: float, block_size: int, layout: str
) -> None:
    q, kv, k_cache, slot_mapping, positions, cos_sin_cache = tensors
    head_dim = MainLayout.head_dim
    checks = Checks(op)
    checks.above(0, eps=eps)
    checks.at_least(1, block_size=block_size)
    checks.one_of("layout", layout, MainLayout.tag, PlainLayout.tag)
    check_query(checks, q, kv)
    if layout == PlainLayout.tag:
        checks.storage("k_cache", k_cache, "PlainLayout", layout, torch.bfloat16)
        checks.rows("k_cache", k_cache, block_size)
        checks.tensor("k_cache", k_cache, torch.bfloat16, "num_blocks", "block_size", head_dim)
    else:
        checks.pages("k_cache", k_cache, MainLayout(block_size))
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_slots")
    checks.rotation(positions, cos_sin_cache, ROPE_DIM)
    checks.no_more_than_tokens("slot_mapping", slot_mapping)


def check_query(checks: Checks, q: Tensor, kv: Tensor) -> None:
    """Checks of the queries and keys of every token."""
    checks.tensor("q", q, torch.bfloat16, "num_tokens", "num_heads", MainLayout.head_dim)
    checks.tensor("kv", kv, torch.bfloat16, "num_tokens", MainLayout.head_dim)

"""Dense multi-head latent attention (DeepSeek-V2, V3, R1, Kimi-K2): paged decode."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import (
    MLA_LAYOUTS,
    MlaDsFp8Layout,
    MlaFp8Layout,
    PlainLayout,
    mla_layout,
)
from dsv4_ops.core.registry import OpSpec
from dsv4_ops.core.tiles import PLAN_COLUMNS
from dsv4_ops.core.types import MlaAttention
from dsv4_ops.dispatch.choice import check_impl
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.meta import mla as meta
from dsv4_ops.ops.sparse_mla import check_splits
from dsv4_ops.reference import mla as reference

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of models."""

PROVIDERS = ("triton", "flash_mla", "reference")


def check_scale(checks: Checks, name: str, scale: Tensor | None, taken: bool, what: str) -> None:
    """A scale per tensor, where one is ``taken``: by what has no other scale."""
    if scale is None:
        return
    if not taken:
        checks.without(name, "a tensor", None, what)
    checks.tensor(name, scale, torch.float32, 1)


def check_cache(checks: Checks, kv_cache: Tensor, block_size: int, layout: str, width: int) -> None:
    """A cache of rows of ``width`` values."""
    checks.at_least(1, block_size=block_size)
    if layout == PlainLayout.tag:
        checks.rows("kv_cache", kv_cache, block_size, dtypes=FLOATS)
        return
    dims = ("num_blocks", "block_size", "row_bytes")
    checks.pages("kv_cache", kv_cache, mla_layout(layout, block_size, width), dims)


_mla_decode = define_op(
    OpSpec(
        stem="mla",
        schema="mla_decode(Tensor q, Tensor kv_cache, Tensor seq_lens, Tensor req_indices, "
        "Tensor block_table, Tensor? query_start_loc, Tensor? plan, Tensor? q_scale, "
        "Tensor? kv_scale, *, float softmax_scale, int block_size, int kv_lora_rank, str layout, "
        'int num_splits, bool batch_invariant, str impl="auto") -> (Tensor out, Tensor lse)',
        meta=meta.mla_decode,
        reference=reference.mla_decode,
        lowering={"cpu": "decompose", "cuda": "choices"},
        dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks"),
        source="decode of vLLM's MLA common layer, with bounds and the tokens of requests ragged",
        providers=PROVIDERS,
    )
)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None = None,
    plan: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int = 512,
    layout: str = PlainLayout.tag,
    num_splits: int = 0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> MlaAttention:
    """Attend with absorbed queries to the latent rows of a paged cache.

    Every head shares the one row of a position: all of it is the key, its first ``kv_lora_rank``
    values are the value. A request may bring any number of tokens: lengths are per token, so that
    they need no causal mask.

    Args:
        q: Queries from ``mla_absorb_q``, [num_tokens, num_heads, kv_lora_rank +
            qk_rope_head_dim], bfloat16, float16 or float32, any strides; for the layout "mla_fp8"
            float8_e4m3fn too.
        kv_cache: Paged rows from ``mla_insert_kv``. "plain": [num_blocks, block_size, width] of the
            dtype of q. "mla_fp8": [num_blocks, block_size, width], uint8. "mla_ds_fp8":
            [num_blocks, block_size, 656], uint8. Pages may lie apart, FP8 ones at multiples of 16
            bytes.
        seq_lens: How many rows of its request a token sees, itself included, [num_tokens], int32,
            as ``flatten_decode`` with ``compress_ratio=1`` gives them. 0 or less for padding. Rows
            past the block table and on pages that do not exist are skipped.
        req_indices: Request of every token, [num_tokens], int32; a token of one that does not exist
            sees no row.
        block_table: Page of every (request, block), [num_reqs, max_blocks], int32, any strides.
        query_start_loc: First token of every request, [num_reqs + 1], int32: a hint that tokens of
            a request can share the reads of its rows. Results do not depend on it.
        plan: How to share the rows of all tokens among programs, [num_tiles, 4], int32, from
            ``sparse_mla_plan(seq_lens, None)`` for as many tokens and heads; None to have the call
            decide. Which lengths it was made of changes only the speed. What another tensor in its
            place gives is undefined, but in bounds.
        q_scale: What e4m3 codes of q are multiplied by, [1], float32; None for 1.
        kv_scale: What codes of the layout "mla_fp8" are multiplied by, [1], float32; None for 1.
        softmax_scale: What q . row is multiplied by. Above 0.
        block_size: Rows per page. At least 1.
        kv_lora_rank: Values of the latent, at most the width of q; 512 for "mla_ds_fp8".
        layout: Tag of the cache's layout, "plain", "mla_fp8" or "mla_ds_fp8".
        num_splits: Splits of the rows of a token; 0 has the batch, or the plan, decide. At least 0,
            and 0 with a plan.
        batch_invariant: With num_splits 0, split by the table's width alone: a token's result has
            the same bits whatever other tokens are in the batch. Not with a plan.
        impl: What runs: "reference" the definition; "auto" the fastest here.

    Returns:
        out: [num_tokens, num_heads, kv_lora_rank], the dtype of q, bfloat16 for e4m3; 0 without any
            row, so for padding.
        lse: Natural logarithm of the sum of exp(logit), [num_tokens, num_heads], float32; -inf
            without any row.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of the layout, a scale that nothing is
            multiplied by, a number out of range, or several devices.
        TypeError: a dtype other than the ones above.
        RuntimeError: an ``impl`` that does not run here, and why.

    Compile: gathers and products; dynamic in num_tokens, num_reqs, max_blocks and the pages of the
        cache; CUDA graphs and export: yes.

    Source: the decode of vLLM's ``MLACommonImpl``. The lse of a token without rows is -inf here,
        +inf in FlashMLA.

    Example:
        >>> import math, torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> kv_cache = PlainLayout(block_size=2, width=2, dtype=torch.float32).allocate(2)
        >>> kv_cache[1] = torch.tensor([[1.0, 0.0], [5.0, 1.0]])
        >>> q = torch.tensor([[[0.0, math.log(3)]]])
        >>> out, lse = dsv4_ops.mla_decode(
        ...     q, kv_cache, torch.tensor([2]).int(), torch.tensor([0]).int(),
        ...     torch.tensor([[1]]).int(), softmax_scale=1.0, block_size=2, kv_lora_rank=1,
        ... )
        >>> round(out.item(), 4), round(lse.exp().item(), 4)  # (1 * 1 + 3 * 5) / 4
        (4.0, 4.0)
    """
    checks = Checks("mla_decode")
    checks.one_of("layout", layout, *MLA_LAYOUTS)
    codes = (torch.float8_e4m3fn,) if layout == MlaFp8Layout.tag else ()
    checks.floats("q", q, *FLOATS, *codes)
    checks.tensor("q", q, q.dtype, "num_tokens", "num_heads", "width")
    width = int(q.shape[2])  # configuration: a constant in compiled code
    checks.at_least(1, kv_lora_rank=kv_lora_rank)
    checks.at_most("kv_lora_rank", kv_lora_rank, "the width of q", width)
    if layout == MlaDsFp8Layout.tag:
        checks.tensor("q", q, q.dtype, "num_tokens", "num_heads", MlaDsFp8Layout.width)
        checks.equal(
            "kv_lora_rank", kv_lora_rank, MlaDsFp8Layout.kv_lora_rank, f"layout {layout!r}"
        )
    check_splits(checks, num_splits, batch_invariant)
    taken = {"layout": layout, "num_splits": num_splits, "batch_invariant": batch_invariant}
    taken |= {"block_size": block_size, "kv_lora_rank": kv_lora_rank, "plan": plan}
    check_impl(checks.op, PROVIDERS, impl, q.device, {"q": q, **taken})
    checks.above(0, softmax_scale=softmax_scale)
    check_cache(checks, kv_cache, block_size, layout, width)
    if layout == PlainLayout.tag:
        checks.tensor("kv_cache", kv_cache, q.dtype, "num_blocks", "block_size", "width")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    if query_start_loc is not None:
        checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    if plan is not None:
        checks.tensor("plan", plan, torch.int32, "num_tiles", PLAN_COLUMNS)
        checks.rows_for_tokens("plan", plan)
        checks.without("num_splits", num_splits, 0, "a plan")
        checks.without("batch_invariant", batch_invariant, False, "a plan")
    is_coded = q.dtype == torch.float8_e4m3fn
    check_scale(checks, "q_scale", q_scale, is_coded, f"a q of {q.dtype}")
    check_scale(checks, "kv_scale", kv_scale, layout == MlaFp8Layout.tag, f"layout {layout!r}")
    return MlaAttention(
        *_mla_decode(
            q,
            kv_cache,
            seq_lens,
            req_indices,
            block_table,
            query_start_loc,
            plan,
            q_scale,
            kv_scale,
            softmax_scale=softmax_scale,
            block_size=block_size,
            kv_lora_rank=kv_lora_rank,
            layout=layout,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            impl=impl,
        )
    )

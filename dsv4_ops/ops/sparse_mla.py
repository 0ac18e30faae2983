"""Sparse MLA: attention of every token over the cache rows that its index lists name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.choice import check_impl
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import FlashMlaPlan, SparseMla, SparseMlaGathered
from dsv4_ops.meta import sparse_mla as meta
from dsv4_ops.ops.mla_checks import (
    check_cache,
    check_decode,
    check_lists,
    check_none,
    check_plan,
    check_sink,
    check_turn,
)
from dsv4_ops.reference import sparse_mla as reference

_SETTINGS = (
    "float softmax_scale, int swa_block_size, int extra_block_size, str layout, int num_splits, "
    'bool batch_invariant, str impl="auto"'
)
_OPTIONS = "Tensor? attn_sink, Tensor? plan, Tensor? positions, Tensor? cos_sin_cache"
_SWA = "Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens"
_SOURCE = "FlashMLA flash_mla_with_kvcache as vLLM 0.33 calls it; lse of no key is -inf here"

_Settings = dict[str, Any]
_LOWERING = {"cpu": "decompose", "cuda": "choices"}
DECODE_PROVIDERS = ("triton", "flash_mla", "reference")

_sparse_mla_decode = define_op(
    OpSpec(
        stem="sparse_mla",
        schema=(
            f"sparse_mla_decode({_SWA}, Tensor? extra_cache, Tensor? extra_indices, "
            f"Tensor? extra_lens, {_OPTIONS}, *, {_SETTINGS}) "
            "-> (Tensor out, Tensor lse)"
        ),
        meta=meta.sparse_mla_decode,
        reference=reference.sparse_mla_decode,
        lowering=_LOWERING,
        dynamic=("num_tokens", "num_blocks", "swa_width", "extra_width", "num_positions"),
        source=_SOURCE,
        providers=DECODE_PROVIDERS,
    )
)
_sparse_mla_decode_paged = define_op(
    OpSpec(
        stem="sparse_mla",
        schema=(
            f"sparse_mla_decode_paged({_SWA}, Tensor extra_cache, Tensor extra_lens, "
            f"Tensor req_indices, Tensor extra_block_table, {_OPTIONS}, *, {_SETTINGS}) "
            "-> (Tensor out, Tensor lse)"
        ),
        meta=meta.sparse_mla_decode_paged,
        reference=reference.sparse_mla_decode_paged,
        lowering=_LOWERING,
        dynamic=(
            "num_tokens",
            "num_blocks",
            "swa_width",
            "num_reqs",
            "max_blocks",
            "num_positions",
        ),
        source=_SOURCE,
        providers=DECODE_PROVIDERS,
    )
)
_sparse_mla_gathered = define_op(
    OpSpec(
        stem="sparse_mla",
        schema=(
            "sparse_mla_gathered(Tensor q, Tensor kv, Tensor indices, Tensor lens, "
            'Tensor? attn_sink, *, float softmax_scale, str impl="auto") '
            "-> (Tensor out, Tensor max_logits, Tensor lse)"
        ),
        meta=meta.sparse_mla_gathered,
        reference=reference.sparse_mla_gathered,
        lowering=_LOWERING,
        dynamic=("num_tokens", "num_rows", "topk"),
        source="FlashMLA flash_mla_sparse_fwd; lse in natural logarithms",
        providers=DECODE_PROVIDERS,
    )
)


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: Tensor | FlashMlaPlan | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int = 1,
    layout: str = MainLayout.tag,
    num_splits: int = 0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> SparseMla:
    """Attend to the window's rows and to the selected rows of the compressed cache; keys are
    values.

    Args:
        q: Queries with RoPE applied, [num_tokens, num_heads, 512], bfloat16, any strides; for the
            layout "plain" of any width and dtype that the caches have.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8, from
            ``MainLayout.allocate``; or of ``PlainLayout``.
        swa_indices: Slots of the window's rows, [num_tokens, swa_width], int32, as
            ``swa_indices_and_lens`` gives them. Slots that do not exist are skipped.
        swa_lens: How many leading entries of ``swa_indices`` count, [num_tokens], int32.
        extra_cache: Compressed cache of the same layout, [num_extra_blocks, page_bytes]; None for
            a layer with only a window, and then neither of the next two.
        extra_indices: Slots of the selected rows, [num_tokens, extra_width], int32, as
            ``indexer_select`` with ``slots`` and ``global_topk_indices_and_lens`` give them.
        extra_lens: How many leading entries of ``extra_indices`` count, [num_tokens], int32.
        attn_sink: Logit that joins the denominator, [num_heads], float32; None for none. inf makes
            the output 0, -inf has no effect.
        plan: How to share the keys of all tokens among programs, [num_pieces, 4], int32, from
            ``sparse_mla_plan`` for as many tokens and heads; None to have the call decide. Which
            lens it was made of changes only the speed. What another tensor in its place gives is
            undefined, but in bounds. Or what nothing but FlashMLA reads: its own plan for the lens
            of this call and no other, from ``flash_mla_metadata`` of them, [num_rows, 8], which it
            does not check; or a ``FlashMlaPlan`` for the sizes of this call, from
            ``dsv4_ops.providers.flash_mla_plan``.
        positions: Absolute position of every query, [num_tokens], int64, to have the rotation of
            the output undone where it is computed; None to leave it, and then no ``cos_sin_cache``.
            Rows of a position below 0 or past the table are not rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, rope_dim], float32; rope_dim is
            even and at most the width of q.
        softmax_scale: What q . k is multiplied by, 512**-0.5 in DeepSeek-V4. Above 0.
        swa_block_size: Rows per page of ``swa_cache``. At least 1.
        extra_block_size: Rows per page of ``extra_cache``. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        num_splits: Parts that the keys of a token are cut into; 0 has the batch, or the plan,
            decide. At least 0, and 0 with a plan. Our kernels hold the
            result of a part as float16 times one scale for all of 64 heads: values below 2^-14 of
            the largest of them lose bits, unless there is one part.
        batch_invariant: With num_splits 0, cut by the widths alone: a token's result has the same
            bits whatever other tokens are in the batch. Not with a plan.
        impl: What runs: "triton" our kernels, "flash_mla" FlashMLA, "reference" the definition;
            "auto" ours, unless FlashMLA is there and was faster at these sizes on an H200.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 without any key. With ``positions``
            what an eager ``inverse_rope_group`` in one group makes of the output without, bit for
            bit: rounded, rotated back in float32, and rounded again.
        lse: Natural logarithm of the sum of exp(logit) over the keys, without the sink,
            [num_tokens, num_heads], float32; -inf without any key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, caches that are not of the layout, a number out of range,
            a ``FlashMlaPlan`` of other sizes, or several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError: an ``impl`` that does not take the call: FlashMLA has 64 or 128 heads,
            up to 8192 tokens and the layout "v4_fp8", and decides itself what it splits.
        ImportError, RuntimeError: an ``impl`` that does not run here, and why.

    Compile: on CUDA our Triton kernels, of splits and of their join; on Hopper with FP8 caches the
        first is in Gluon: graphs call an op that launches both, packages hold its binary; float32
        queries, rows not of 512 values, angles of another rope_dim than 64 and other devices get
        the reference: gathers and products, and Inductor may keep the output in float32 until it is
        rotated. FlashMLA is a call of its own op, in packages too, which then need that library;
        slots that do not exist become -1 before it, and a rotation is undone behind it. It plans in
        every call without one of its plans. Dynamic in num_tokens, the pages of the caches, both
        widths and num_positions, which have "auto" take ours; CUDA graphs and export: yes.

    Source: FlashMLA ``flash_mla_with_kvcache`` with ``indices`` and ``extra_indices_in_kvcache``.
        The lse of a token without keys is -inf here, +inf there.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> cache = PlainLayout(block_size=2, width=4, dtype=torch.float32).allocate(num_blocks=1)
        >>> cache[0, 1] = 2.0
        >>> q = torch.zeros(1, 1, 4)
        >>> indices, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([1]).int()
        >>> sink = torch.zeros(1)
        >>> out, lse = dsv4_ops.sparse_mla_decode(
        ...     q, cache, indices, lens, attn_sink=sink,
        ...     softmax_scale=0.5, swa_block_size=2, layout="plain",
        ... )
        >>> out[0, 0, 0].item(), lse.item()
        (1.0, 0.0)
        >>> quarter = torch.tensor([[0.0, 1.0]])  # of a turn, for the last pair
        >>> dsv4_ops.sparse_mla_decode(
        ...     q, cache, indices, lens, positions=torch.tensor([0]), cos_sin_cache=quarter,
        ...     softmax_scale=0.5, swa_block_size=2, layout="plain",
        ... ).out
        tensor([[[ 2.,  2.,  2., -2.]]])
    """
    cuts: _Settings = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    taken: _Settings = {"layout": layout, **cuts}
    checks = check_decode("sparse_mla_decode", q, softmax_scale, DECODE_PROVIDERS, impl, **taken)
    checks.at_least(1, extra_block_size=extra_block_size)
    check_cache(checks, "swa", q, swa_cache, swa_block_size, layout)
    check_lists(checks, "swa", swa_indices, swa_lens)
    if extra_cache is not None and extra_indices is not None and extra_lens is not None:
        check_cache(checks, "extra", q, extra_cache, extra_block_size, layout)
        check_lists(checks, "extra", extra_indices, extra_lens)
    else:
        check_none(checks, extra_cache, extra_indices, extra_lens)
    check_sink(checks, attn_sink)
    extra_width = 0 if extra_indices is None else extra_indices.shape[1]
    widths = (swa_indices.shape[1], extra_width)
    plan = check_plan(checks, plan, num_splits, batch_invariant, impl, widths)
    check_turn(checks, q, positions, cos_sin_cache)
    window = (q, swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache)
    sizes = {"swa_block_size": swa_block_size, "extra_block_size": extra_block_size}
    extra = (extra_cache, extra_indices, extra_lens)
    settings = {"softmax_scale": softmax_scale, "impl": impl, **sizes, **taken}
    return SparseMla(*_sparse_mla_decode(*window, *extra, *rest, **settings))


def sparse_mla_decode_paged(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor,
    extra_lens: Tensor,
    req_indices: Tensor,
    extra_block_table: Tensor,
    attn_sink: Tensor | None = None,
    plan: Tensor | FlashMlaPlan | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str = MainLayout.tag,
    num_splits: int = 0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> SparseMla:
    """``sparse_mla_decode`` over the window and the first rows of each token's request: a C128
    layer, which selects nothing. The kernel walks the block table.

    Args:
        q: Queries, as for ``sparse_mla_decode``, as is all that is not described here.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8.
        swa_indices: Slots of the window's rows, [num_tokens, swa_width], int32.
        swa_lens: How many leading entries of ``swa_indices`` count, [num_tokens], int32.
        extra_cache: Compressed cache, [num_extra_blocks, page_bytes], uint8.
        extra_lens: How many rows of its request a token sees, [num_tokens], int32:
            (position + 1) // 128. Rows past the block table and on pages that do not exist are
            skipped.
        req_indices: Request of every token, [num_tokens], int32; one that does not exist sees no
            compressed row.
        extra_block_table: Page of every (request, block), [num_reqs, max_blocks], int32.
        attn_sink: Logit that joins the denominator, [num_heads], float32; None for none.
        plan: As for ``sparse_mla_decode``.
        positions: Absolute position of every query, [num_tokens], int64, to have the rotation of
            the output undone; None to leave it.
        cos_sin_cache: Angles of the positions, [num_positions, rope_dim], float32; or None too.
        softmax_scale: What q . k is multiplied by.
        swa_block_size: Rows per page of ``swa_cache``. At least 1.
        extra_block_size: Rows per page of ``extra_cache``: 2 for C128. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        num_splits: Parts that the keys of a token are cut into; 0 has the batch decide.
        batch_invariant: With num_splits 0, cut by the widths alone.
        impl: As for ``sparse_mla_decode``.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 without any key. With ``positions``
            rotated back, as that of ``sparse_mla_decode``.
        lse: As for ``sparse_mla_decode``, [num_tokens, num_heads], float32.

    Mutates: nothing.

    Raises:
        ValueError, TypeError, NotImplementedError, ImportError, RuntimeError: as
            ``sparse_mla_decode``.

    Compile: as ``sparse_mla_decode``; dynamic in num_tokens, num_reqs, max_blocks, swa_width,
        num_positions and the pages of the caches; CUDA graphs and export: yes. The reference
        gathers every row of the block table for every token, and FlashMLA gets a list of them.

    Source: FlashMLA ``flash_mla_with_kvcache`` over the indices that vLLM 0.33 writes for C128.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> cache = PlainLayout(block_size=2, width=4, dtype=torch.float32).allocate(num_blocks=2)
        >>> cache[1, 0] = 2.0
        >>> q, none = torch.zeros(1, 1, 4), torch.tensor([0]).int()
        >>> out, lse = dsv4_ops.sparse_mla_decode_paged(
        ...     q, cache, none[:, None], none, cache, torch.tensor([1]).int(), none,
        ...     torch.tensor([[1, 0]]).int(), softmax_scale=0.5, swa_block_size=2,
        ...     extra_block_size=2, layout="plain",
        ... )
        >>> out[0, 0, 0].item(), lse.item()
        (2.0, 0.0)
    """
    cuts: _Settings = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    taken: _Settings = {"layout": layout, **cuts}
    checks = check_decode(
        "sparse_mla_decode_paged", q, softmax_scale, DECODE_PROVIDERS, impl, **taken
    )
    check_cache(checks, "swa", q, swa_cache, swa_block_size, layout)
    check_lists(checks, "swa", swa_indices, swa_lens)
    check_cache(checks, "extra", q, extra_cache, extra_block_size, layout)
    checks.tensor("extra_lens", extra_lens, torch.int32, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("extra_block_table", extra_block_table, torch.int32, "num_reqs", "max_blocks")
    check_sink(checks, attn_sink)
    widths = (swa_indices.shape[1], extra_block_table.shape[1] * extra_block_size)
    plan = check_plan(checks, plan, num_splits, batch_invariant, impl, widths)
    check_turn(checks, q, positions, cos_sin_cache)
    window = (q, swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache)
    sizes = {"swa_block_size": swa_block_size, "extra_block_size": extra_block_size}
    extra = (extra_cache, extra_lens, req_indices, extra_block_table)
    settings = {"softmax_scale": softmax_scale, "impl": impl, **sizes, **taken}
    return SparseMla(*_sparse_mla_decode_paged(*window, *extra, *rest, **settings))


def sparse_mla_gathered(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor,
    attn_sink: Tensor | None = None,
    *,
    softmax_scale: float,
    impl: str = "auto",
) -> SparseMlaGathered:
    """Attend to rows of an unpaged tensor: the form of FlashMLA's sparse prefill.

    Args:
        q: Queries, [num_tokens, num_heads, width], bfloat16 or float32.
        kv: Keys, which are the values, [num_rows, width], the dtype of q.
        indices: Rows of ``kv``, [num_tokens, topk], int32; rows that do not exist are skipped.
        lens: How many leading entries of ``indices`` count, [num_tokens], int32.
        attn_sink: Logit that joins the denominator, [num_heads], float32; None for none.
        softmax_scale: What q . k is multiplied by.
        impl: What runs: "triton" our kernel, which is for Hopper, bfloat16 and rows of 512 values;
            "flash_mla" FlashMLA, "reference" the definition. "auto" takes our kernel, and where it
            does not run the definition.

    Returns:
        out: [num_tokens, num_heads, width], the dtype of q; 0 without any key.
        max_logits: Largest logit, [num_tokens, num_heads], float32; -inf without any key.
        lse: Natural logarithm of the sum of exp(logit), without the sink, [num_tokens, num_heads],
            float32; -inf without any key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError: an ``impl`` that does not take the call: FlashMLA has 64 or 128 heads
            and bfloat16 rows of 512 values, our kernel such rows on Hopper.
        ImportError, RuntimeError: an ``impl`` that does not run here, and why.

    Compile: a call of our kernel, whose binary AOTInductor packages hold, of FlashMLA's op, or
        gathers and products; dynamic in num_tokens, num_rows and topk; CUDA graphs and export: yes.

    Source: FlashMLA ``flash_mla_sparse_fwd``.

    Example:
        >>> import torch, dsv4_ops
        >>> kv, q = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(1, 1, 2)
        >>> indices, lens = torch.tensor([[1, 0]]).int(), torch.tensor([2]).int()
        >>> dsv4_ops.sparse_mla_gathered(q, kv, indices, lens, softmax_scale=1.0).out
        tensor([[[0.5000, 1.0000]]])
    """
    checks = Checks("sparse_mla_gathered")
    checks.above(0, softmax_scale=softmax_scale)
    checks.floats("q", q, torch.bfloat16, torch.float32)
    checks.tensor("q", q, q.dtype, "num_tokens", "num_heads", "width")
    checks.tensor("kv", kv, q.dtype, "num_rows", "width")
    checks.tensor("indices", indices, torch.int32, "num_tokens", "topk")
    checks.tensor("lens", lens, torch.int32, "num_tokens")
    checks.at_least(1, topk=indices.shape[1])
    check_sink(checks, attn_sink)
    check_impl(checks.op, DECODE_PROVIDERS, impl, q.device, {"q": q})
    return SparseMlaGathered(
        *_sparse_mla_gathered(
            q, kv, indices, lens, attn_sink, softmax_scale=softmax_scale, impl=impl
        )
    )

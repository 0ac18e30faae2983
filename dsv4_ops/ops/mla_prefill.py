"""Sparse MLA from positions and block tables alone: prefill straight from the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.choice import check_impl
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import SparseMla
from dsv4_ops.meta import mla_prefill as meta
from dsv4_ops.ops.mla_checks import check_cache, check_queries, check_sink
from dsv4_ops.reference import mla_prefill as reference

PREFILL_PROVIDERS = ("triton", "flash_mla", "reference")

_sparse_mla_prefill = define_op(
    OpSpec(
        stem="mla_prefill",
        schema=(
            "sparse_mla_prefill(Tensor q, Tensor swa_cache, Tensor positions, Tensor req_indices, "
            "Tensor swa_block_table, Tensor? extra_cache, Tensor? extra_block_table, "
            "Tensor? topk_indices, Tensor? attn_sink, *, float softmax_scale, int window_size, "
            "int compress_ratio, int swa_block_size, int extra_block_size, str layout, "
            'str impl="auto") '
            "-> (Tensor out, Tensor lse)"
        ),
        meta=meta.sparse_mla_prefill,
        reference=reference.sparse_mla_prefill,
        lowering={"cpu": "decompose", "cuda": "choices"},
        dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks"),
        source="vLLM 0.33's prefill: gather, combine and flash_mla_sparse_fwd, as one op",
        providers=PREFILL_PROVIDERS,
    )
)


def sparse_mla_prefill(
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    extra_cache: Tensor | None = None,
    extra_block_table: Tensor | None = None,
    topk_indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    *,
    softmax_scale: float,
    window_size: int,
    compress_ratio: int = 1,
    swa_block_size: int,
    extra_block_size: int = 1,
    layout: str = MainLayout.tag,
    impl: str = "auto",
) -> SparseMla:
    """Attend to the window and to compressed rows, straight from the paged caches: no gathered
    copy, no index matrix, no chunks, unless that is faster or FlashMLA runs it.

    The window of a token is its own position and the ``window_size - 1`` before it. Compressed
    rows are those that ``topk_indices`` selects (C4), or without it all that the token may see
    (C128). It takes any batch. A program attends for one token and 64 heads, and on Hopper "auto"
    splits the keys of few tokens over more of them; elsewhere few tokens are
    ``sparse_mla_decode``'s, which always does.

    Args:
        q: Queries with RoPE applied, [num_tokens, num_heads, 512], bfloat16, any strides; for the
            layout "plain" of any width and dtype that the caches have.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8, from
            ``MainLayout.allocate``; or of ``PlainLayout``. Holds the rows of this batch already.
        positions: Position of every token in its request, [num_tokens], int64; -1 for padding.
        req_indices: Request of every token, [num_tokens], int32; -1 for padding.
        swa_block_table: Page of every (request, block) of the window cache, [num_reqs,
            max_swa_blocks], int32. Pages before the window may be missing.
        extra_cache: Compressed cache of the same layout, [num_extra_blocks, page_bytes]; None for
            a layer with only a window, and then neither of the next two.
        extra_block_table: Page of every (request, block) of it, [num_reqs, max_extra_blocks],
            int32.
        topk_indices: Rows of its request that a token attends to, [num_tokens, topk], int32, as
            ``indexer_select`` gives them. Rows that do not exist, or that the token may not see
            yet, are skipped. None for all rows.
        attn_sink: Logit that joins the denominator, [num_heads], float32; None for none.
        softmax_scale: What q . k is multiplied by. Above 0.
        window_size: Keys of the window, the token's own included. At least 1.
        compress_ratio: Positions per compressed row; a token sees (position + 1) // compress_ratio
            rows. At least 1.
        swa_block_size: Rows per page of ``swa_cache``. At least 1.
        extra_block_size: Rows per page of ``extra_cache``. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        impl: What runs: "triton" our kernel that reads the pages, "flash_mla" a gather of the rows
            to bfloat16 and FlashMLA over it, "reference" the definition. "auto" takes ours; on
            Hopper, where it is faster at these sizes, over such a copy too, or with the keys of few
            tokens in splits. What runs may change bits, and "auto" goes by the number of tokens,
            and by time on the GPU: a copy's five launches take the host 0.5 to 0.9 ms where nothing
            captures them. A copy has memory for all rows that the block tables name, of which there
            may be 2**20, and for the keys of every token, 4 bytes each: without ``topk_indices`` as
            many as a row of the table names.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 without any key, so for padding.
            Rotated as the values are: only ``sparse_mla_decode`` can undo that itself, here
            ``inverse_rope_group`` does it behind.
        lse: Natural logarithm of the sum of exp(logit) over the keys, without the sink,
            [num_tokens, num_heads], float32; -inf without any key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, caches that are not of the layout, a number out of range,
            or several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError: an ``impl`` that does not take the call: FlashMLA has 64 or 128 heads,
            the layout "v4_fp8", and a workspace of up to 2^20 rows (1 GiB), which are all that the
            block tables have columns for; our kernel has rows of 512 bfloat16 values.
        ImportError, RuntimeError: an ``impl`` that does not run here, and why.

    Compile: on CUDA our Triton kernel in the graph and in AOTInductor packages; on Hopper, with FP8
        caches, graphs call an op that launches those in Gluon, packages hold their binaries, and
        both decide by the sizes of each call whether rows are copied; float32 queries, rows of
        another width than 512 and other devices get the reference: gathers and matrix products.
        FlashMLA is a call of its own op, in AOTInductor packages too, which then need that library;
        kernels of ours gather the rows that tokens of the batch may see, into a workspace whose
        size the block tables' shapes decide, and list them. Dynamic in num_tokens, num_reqs, the
        blocks of both tables and the pages of the caches; CUDA graphs and export: yes.

    Source: the attention of vLLM 0.33's prefill chunks, which gathers rows to bf16, combines top-k
        and window indices, and calls FlashMLA's ``flash_mla_sparse_fwd``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> cache = PlainLayout(block_size=2, width=4, dtype=torch.float32).allocate(num_blocks=2)
        >>> cache[1, 0], cache[1, 1] = 2.0, 4.0
        >>> q, positions = torch.zeros(2, 1, 4), torch.tensor([0, 1])
        >>> requests, table = torch.zeros(2).int(), torch.tensor([[1]]).int()
        >>> out, lse = dsv4_ops.sparse_mla_prefill(
        ...     q, cache, positions, requests, table,
        ...     softmax_scale=0.5, window_size=2, swa_block_size=2, layout="plain",
        ... )
        >>> out[:, 0, 0].tolist()
        [2.0, 3.0]
    """
    checks = check_queries("sparse_mla_prefill", q, layout)
    checks.above(0, softmax_scale=softmax_scale)
    checks.at_least(
        1,
        window_size=window_size,
        compress_ratio=compress_ratio,
        extra_block_size=extra_block_size,
    )
    check_cache(checks, "swa", q, swa_cache, swa_block_size, layout)
    checks.tensor("positions", positions, torch.int64, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("swa_block_table", swa_block_table, torch.int32, "num_reqs", "max_swa_blocks")
    if extra_cache is not None and extra_block_table is not None:
        check_cache(checks, "extra", q, extra_cache, extra_block_size, layout)
        dims = ("num_reqs", "max_extra_blocks")
        checks.tensor("extra_block_table", extra_block_table, torch.int32, *dims)
    elif extra_cache is not None:
        checks.comes_with("extra_cache", "extra_block_table", None)
    elif extra_block_table is not None:
        checks.comes_with("extra_block_table", "extra_cache", None)
    if topk_indices is not None:
        checks.comes_with("topk_indices", "extra_cache", extra_cache)
        checks.tensor("topk_indices", topk_indices, torch.int32, "num_tokens", "topk")
        checks.at_least(1, topk=topk_indices.shape[1])
    check_sink(checks, attn_sink)
    taken = {
        "q": q,
        "swa_block_table": swa_block_table,
        "swa_block_size": swa_block_size,
        "extra_block_table": extra_block_table,
        "extra_block_size": extra_block_size,
        "layout": layout,
    }
    check_impl("sparse_mla_prefill", PREFILL_PROVIDERS, impl, q.device, taken)
    return SparseMla(
        *_sparse_mla_prefill(
            q,
            swa_cache,
            positions,
            req_indices,
            swa_block_table,
            extra_cache,
            extra_block_table,
            topk_indices,
            attn_sink,
            softmax_scale=softmax_scale,
            window_size=window_size,
            compress_ratio=compress_ratio,
            swa_block_size=swa_block_size,
            extra_block_size=extra_block_size,
            layout=layout,
            impl=impl,
        )
    )

"""The lightning indexer's selection of compressed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.choice import check_impl
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.meta import indexer_topk as meta
from dsv4_ops.ops.indexer import PROVIDERS, check_paged, check_schedule
from dsv4_ops.reference import indexer_topk as reference

_KERNELS = {"cpu": "decompose", "cuda": "triton"}

_indexer_topk = define_op(
    OpSpec(
        stem="indexer_topk",
        schema="indexer_topk(Tensor logits, Tensor lens, *, int topk) -> Tensor",
        meta=meta.indexer_topk,
        reference=reference.indexer_topk,
        lowering=_KERNELS,
        dynamic=("num_tokens", "num_rows"),
        source="DeepSeek-V4's lightning indexer; the order of ties and of the result decided here",
        providers=("triton", "reference"),
    )
)
_indexer_select = define_op(
    OpSpec(
        stem="indexer_topk",
        schema="indexer_select(Tensor q, Tensor weights, Tensor k_cache, Tensor positions, "
        "Tensor req_indices, Tensor block_table, Tensor? schedule=None, *, int block_size, "
        "int compress_ratio, "
        'int topk, str layout, bool slots=False, str impl="auto") -> Tensor',
        meta=meta.indexer_select,
        reference=reference.indexer_select,
        lowering={"cpu": "decompose", "cuda": "choices"},
        dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks"),
        source="DeepSeek-V4's lightning indexer; the order of ties and of the result decided here",
        providers=PROVIDERS,
    )
)


def indexer_topk(logits: Tensor, lens: Tensor, *, topk: int) -> Tensor:
    """The best columns of every row of logits.

    Args:
        logits: Scores, [num_tokens, num_rows], float32, any strides; ``indexer_logits`` gives them.
        lens: Columns of every row that are candidates, [num_tokens], int32; what is behind them may
            be anything.
        topk: Columns of the result. At least 0.

    Returns:
        int32 [num_tokens, topk], dense: the ``topk`` candidates with the highest score, in
        ascending order, then -1. Of equal scores the lower column is chosen first. -0 equals 0, NaN
        is below every number, and a score of -inf is no candidate.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``topk`` below 0, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: on CUDA our Triton kernels (for topk up to 4096), on CPU the topk and sort of torch
        over loops of Inductor; dynamic in all tensor sizes; CUDA graphs and export: yes.

    Source: DeepSeek-V4's lightning indexer. Other libraries leave both orders open.

    Example:
        >>> import torch, dsv4_ops
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 9.0], [0.0, -torch.inf, 1.0, 9.0, 9.0]])
        >>> lens = torch.tensor([4, 3], dtype=torch.int32)
        >>> dsv4_ops.indexer_topk(logits, lens, topk=2).tolist()
        [[1, 2], [0, 2]]
    """
    checks = Checks("indexer_topk")
    checks.at_least(0, topk=topk)
    checks.tensor("logits", logits, torch.float32, "num_tokens", "num_rows")
    checks.tensor("lens", lens, torch.int32, "num_tokens")
    indices: Tensor = _indexer_topk(logits, lens, topk=topk)
    return indices


def indexer_select(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    layout: str = IndexerLayout.tag,
    slots: bool = False,
    impl: str = "auto",
) -> Tensor:
    """The compressed rows that every token attends to: scores and selection in one, decodes and
    prefills alike.

    Our kernels do not store scores: memory and launches do not grow with the context. The
    reference, which the layout "plain" takes everywhere, gathers keys and stores their scores. A
    token's rows depend on no other token.

    Args:
        q: Queries, [num_tokens, num_heads, 128], float8_e4m3fn, any strides; from
            ``indexer_quantize_q``, as are the weights. For the layout "plain" bfloat16 or float32,
            rotated by ``apply_rope``.
        weights: Weights with the scales of the queries, [num_tokens, num_heads], float32, any
            strides. Those of plain queries are the weights of the heads, times a softmax_scale if
            the caller likes: a factor above 0 of all of them selects the same rows.
        k_cache: Paged keys, [num_blocks, page_bytes], uint8, from ``IndexerLayout.allocate``. Pages
            may lie apart, at multiples of 16 bytes. For "plain" [num_blocks, block_size, 128], of
            the dtype of q, with dense rows, as ``compress_and_insert`` writes them.
        positions: Absolute position of every token, [num_tokens], int64; below 0: no row.
        req_indices: Request of every token, [num_tokens], int32; others than 0..num_reqs-1 have no
            rows.
        block_table: Page of every logical block of this cache, [num_reqs, max_blocks], int32, any
            strides.
        schedule: For DeepGEMM, as ``indexer_logits`` takes it: of the complete rows of every token,
            no more than max_blocks * block_size. None to have it made in the call.
        block_size: Rows per page, 64 for DeepGEMM. At least 1.
        compress_ratio: Tokens of a compressed row, 4. At least 1.
        topk: Rows to choose, 512 (Flash) or 1024 (Pro). At least 0.
        layout: Tag of the cache's layout, "v4_indexer_fp8" or "plain".
        slots: Whether the result has cache slots, for ``sparse_mla_decode``, in place of rows of
            the request. That saves the kernel of a translation behind the selection.
        impl: What runs: "triton" our kernels, "deep_gemm" DeepGEMM's logits and our selection among
            them, "reference" the definition; "auto" ours, unless DeepGEMM is there and was faster
            at these sizes on an H200.

    Returns:
        int32 [num_tokens, topk], dense: rows of the request, ascending, then -1, for
        ``sparse_mla_prefill``. Candidates are the (position + 1) // compress_ratio rows that are
        complete, as far as their pages exist; scores are those of ``indexer_logits``, and ties and
        NaN as in ``indexer_topk``. If there are no more than ``topk`` candidates, all of them. With
        ``slots``, what ``global_topk_indices_and_lens`` makes of these rows, at their places: page
        * block_size + row in the page, -1 where there is no row and for slots beyond int32.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, or
            several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError, ImportError, RuntimeError: as ``indexer_logits``.

    Compile: on CUDA our Triton kernels (for topk up to 4096); on CPU, and everywhere for the layout
        "plain", the reference: the matrix product, topk and sort of torch over loops of Inductor.
        With DeepGEMM a call and our kernels behind it, in no AOTInductor package; its scores are
        rounded otherwise, so that it may choose others among rows that nearly tie. Dynamic in all
        tensor sizes, which have "auto" take ours; CUDA graphs and export: yes.

    Source: DeepSeek-V4's lightning indexer. Other libraries leave the order of ties open.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import IndexerLayout
        >>> k_cache = IndexerLayout(block_size=4).allocate(num_blocks=1)
        >>> k = torch.tensor([[1.0], [-1.0], [2.0]]).expand(3, 128).to(torch.bfloat16)
        >>> dsv4_ops.quantize_and_insert_indexer_k(k, k_cache, torch.arange(3), block_size=4)
        >>> q, weights = torch.ones(1, 1, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
        >>> zeros = torch.zeros(1, 1, dtype=torch.int32)
        >>> dsv4_ops.indexer_select(
        ...     q, weights, k_cache, torch.tensor([11]), zeros[0], zeros, block_size=4,
        ...     compress_ratio=4, topk=2
        ... )
        tensor([[0, 2]], dtype=torch.int32)
    """
    checks = Checks("indexer_select")
    checks.at_least(1, compress_ratio=compress_ratio)
    checks.at_least(0, topk=topk)
    checks.flag("slots", slots)
    check_paged(checks, q, weights, k_cache, block_size=block_size, layout=layout)
    checks.tensor("positions", positions, torch.int64, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    check_schedule(checks, schedule)
    taken = {"layout": layout, "block_size": block_size}
    check_impl(checks.op, PROVIDERS, impl, q.device, {"q": q, **taken})
    indices: Tensor = _indexer_select(
        q,
        weights,
        k_cache,
        positions,
        req_indices,
        block_table,
        schedule,
        block_size=block_size,
        compress_ratio=compress_ratio,
        topk=topk,
        layout=layout,
        slots=slots,
        impl=impl,
    )
    return indices

"""The lightning indexer's queries and logits."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.choice import check_impl
from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import IndexerQuery
from dsv4_ops.meta import indexer as meta
from dsv4_ops.reference import indexer as reference

DIM = IndexerLayout.head_dim

PROVIDERS = ("triton", "deep_gemm", "reference")

_KERNELS = {"cpu": "decompose", "cuda": "triton"}

_indexer_quantize_q = define_op(
    OpSpec(
        stem="indexer",
        schema="indexer_quantize_q(Tensor q, Tensor weights, Tensor positions, "
        "Tensor cos_sin_cache, *, float softmax_scale) -> (Tensor, Tensor)",
        meta=meta.indexer_quantize_q,
        reference=reference.indexer_quantize_q,
        lowering=_KERNELS,
        dynamic=("num_tokens", "num_positions"),
        source="vLLM 0.33, rotation and FP8 quantisation of its indexer's queries",
        providers=("triton", "reference"),
    )
)
_indexer_logits = define_op(
    OpSpec(
        stem="indexer",
        schema="indexer_logits(Tensor q, Tensor weights, Tensor k_cache, Tensor lens, "
        "Tensor req_indices, Tensor block_table, Tensor? schedule=None, *, int block_size, "
        "SymInt num_rows, "
        'str layout, str impl="auto") -> Tensor',
        meta=meta.indexer_logits,
        reference=reference.indexer_logits,
        lowering={"cpu": "decompose", "cuda": "choices"},
        dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks", "num_rows"),
        source="DeepSeek-V4's lightning indexer; DeepGEMM's paged MQA logits",
        providers=PROVIDERS,
    )
)
_indexer_logits_ragged = define_op(
    OpSpec(
        stem="indexer",
        schema="indexer_logits_ragged(Tensor q, Tensor weights, Tensor k, Tensor scales, "
        "Tensor row_start, Tensor row_stop) -> Tensor",
        meta=meta.indexer_logits_ragged,
        reference=reference.indexer_logits_ragged,
        lowering=_KERNELS,
        dynamic=("num_tokens", "num_k"),
        source="DeepSeek-V4's lightning indexer; DeepGEMM's MQA logits",
        providers=("triton", "reference"),
    )
)


def indexer_quantize_q(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float | None = None,
) -> IndexerQuery:
    """Rotate the indexer's queries, quantise them to FP8, and put their scales into the weights of
    the heads.

    Args:
        q: Queries without RoPE, [num_tokens, num_heads, 128], bfloat16, any strides.
        weights: Weight of every head, [num_tokens, num_heads], bfloat16 or float32, any strides.
        positions: Absolute position of every token, [num_tokens], int64. Queries of a position
            below 0 or past the table are not rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, of the layers with a compressor, [num_positions,
            rope_dim], float32; rope_dim is even and at most 128.
        softmax_scale: Factor of all weights, a number above 0; None for 128^-0.5 * num_heads^-0.5.

    Returns:
        ``IndexerQuery(q, weights)``, dense. q: float8_e4m3fn [num_tokens, num_heads, 128]: rotated
        as by ``apply_rope``, over a scale, rounded to nearest even. One scale for the whole head,
        as in ``quantize_and_insert_indexer_k``, NaN and infinities included. weights: float32
        [num_tokens, num_heads], the weight times this scale, then times ``softmax_scale``.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a ``softmax_scale`` out of range, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: on CUDA our Triton kernel, on CPU a loop of Inductor, with the same bits; dynamic in
        num_tokens and num_positions; CUDA graphs and export: yes.

    Source: vLLM 0.33's indexer queries. No Hadamard rotation: it cancels in the product with keys.

    Example:
        >>> import torch, dsv4_ops
        >>> q = torch.full((1, 2, 128), 3.0, dtype=torch.bfloat16)
        >>> weights = torch.ones(1, 2, dtype=torch.bfloat16)
        >>> query = dsv4_ops.indexer_quantize_q(
        ...     q, weights, torch.tensor([-1]), torch.zeros(1, 64), softmax_scale=0.5
        ... )
        >>> query.q[0, 0, 0].item(), query.weights.tolist()  # 3 / 2^-7, and 0.5 * 2^-7
        (384.0, [[0.00390625, 0.00390625]])
    """
    checks = Checks("indexer_quantize_q")
    check_unquantized(checks, q, weights)
    checks.rotation(positions, cos_sin_cache)
    checks.even("cos_sin_cache", cos_sin_cache, "dim", DIM)
    softmax_scale = checked_scale(checks, q, softmax_scale)
    query = _indexer_quantize_q(q, weights, positions, cos_sin_cache, softmax_scale=softmax_scale)
    return IndexerQuery(*query)


def check_unquantized(
    checks: Checks, q: Tensor, weights: Tensor, heads: str = "num_heads", prefix: str = ""
) -> None:
    """Checks of queries before they are quantised and of the weights of their ``heads``; ``prefix``
    is that of the arguments' names."""
    checks.tensor(f"{prefix}q", q, torch.bfloat16, "num_tokens", heads, DIM)
    checks.floats(f"{prefix}weights", weights, torch.bfloat16, torch.float32)
    checks.tensor(f"{prefix}weights", weights, weights.dtype, "num_tokens", heads)


def checked_scale(checks: Checks, q: Tensor, softmax_scale: float | None) -> float:
    """``softmax_scale``, or that of the model for None."""
    if softmax_scale is None:
        softmax_scale = DIM**-0.5 * max(int(q.shape[1]), 1) ** -0.5
    checks.above(0, softmax_scale=softmax_scale)
    return softmax_scale


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    schedule: Tensor | None = None,
    *,
    block_size: int,
    num_rows: int,
    layout: str = IndexerLayout.tag,
    impl: str = "auto",
) -> Tensor:
    """Scores of the first compressed rows of every token's request, read from their pages.

    To select rows, ``indexer_select`` does not store the scores at all.

    Args:
        q: Queries, [num_tokens, num_heads, 128], float8_e4m3fn, any strides; from
            ``indexer_quantize_q``, as are the weights. For the layout "plain" bfloat16 or float32,
            rotated by ``apply_rope``.
        weights: Weights with the scales of the queries, [num_tokens, num_heads], float32, any
            strides. Those of plain queries are the weights of the heads times a softmax_scale that
            the caller applies: ``indexer_quantize_q`` has 128^-0.5 * num_heads^-0.5.
        k_cache: Paged keys, [num_blocks, page_bytes], uint8, from ``IndexerLayout.allocate``. Pages
            may lie apart, at multiples of 16 bytes. For "plain" [num_blocks, block_size, 128], of
            the dtype of q, with dense rows, as ``compress_and_insert`` writes them.
        lens: Rows that every token may see, [num_tokens], int32; ``flatten_decode`` gives them.
        req_indices: Request of every token, [num_tokens], int32; others than 0..num_reqs-1 have no
            rows.
        block_table: Page of every logical block of this cache, [num_reqs, max_blocks], int32, any
            strides.
        schedule: How DeepGEMM shares the keys among SMs, [num_sms + 1, 2], int32, from
            ``paged_mqa_logits_metadata``, so that a step makes it once; None to have it made in the
            call. Of just the lens that count here: 0 for tokens of no request, and no more than
            num_rows and max_blocks * block_size. DeepGEMM checks nothing: by one of other lens it
            reads and writes where it must not. Whatever else runs goes by none.
        block_size: Rows per page, 64 for DeepGEMM. At least 1.
        num_rows: Columns of the result, a capacity. At least 0.
        layout: Tag of the cache's layout, "v4_indexer_fp8" or "plain".
        impl: What runs: "triton" our kernel, "deep_gemm" DeepGEMM, "reference" the definition;
            "auto" ours, unless DeepGEMM is there and was faster at these sizes on an H200.

    Returns:
        float32 [num_tokens, num_rows], dense: sum over heads of weights * relu(q . k), times the
        scale of the key if it has one. -inf for rows past ``lens`` and for rows whose page does not
        exist. Sums are float32; the FP8 matrix unit of Hopper keeps some 14 bits of a product over
        128 values.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, or
            several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError: an ``impl`` that does not take the call: DeepGEMM has 32 or 64 heads
            and pages of 64 rows of the layout "v4_indexer_fp8".
        ImportError, RuntimeError: an ``impl`` that does not run here, and why.

    Compile: on CUDA one Triton kernel of ours; on CPU, and everywhere for the layout "plain", the
        reference: masked loads and a matrix product, over a gathered key per score. DeepGEMM is a
        call in the graph, and in no AOTInductor package. It adds the
        products of the heads in another order, in float32 as well. Dynamic in all tensor sizes and
        num_rows, which have "auto" take ours; CUDA graphs and export: yes.

    Source: DeepSeek-V4's lightning indexer; DeepGEMM's paged MQA logits.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import IndexerLayout, PlainLayout
        >>> k_cache = IndexerLayout(block_size=2).allocate(num_blocks=1)
        >>> k = torch.ones(2, 128, dtype=torch.bfloat16) * torch.tensor([[1.0], [-1.0]]).bfloat16()
        >>> dsv4_ops.quantize_and_insert_indexer_k(k, k_cache, torch.tensor([0, 1]), block_size=2)
        >>> q = torch.ones(1, 2, 128).to(torch.float8_e4m3fn)
        >>> lens, zeros = torch.tensor([2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        >>> dsv4_ops.indexer_logits(
        ...     q, torch.tensor([[0.5, 1.0]]), k_cache, lens, zeros[0], zeros, block_size=2,
        ...     num_rows=3
        ... )
        tensor([[192.,   0., -inf]])
    """
    checks = Checks("indexer_logits")
    checks.at_least(0, num_rows=num_rows)
    check_paged(checks, q, weights, k_cache, block_size=block_size, layout=layout)
    checks.tensor("lens", lens, torch.int32, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    check_schedule(checks, schedule)
    taken = {"layout": layout, "block_size": block_size}
    check_impl(checks.op, PROVIDERS, impl, q.device, {"q": q, **taken})
    logits: Tensor = _indexer_logits(
        q,
        weights,
        k_cache,
        lens,
        req_indices,
        block_table,
        schedule,
        block_size=block_size,
        num_rows=num_rows,
        layout=layout,
        impl=impl,
    )
    return logits


def indexer_logits_ragged(
    q: Tensor, weights: Tensor, k: Tensor, scales: Tensor, row_start: Tensor, row_stop: Tensor
) -> Tensor:
    """Scores of gathered keys, of which every token sees a span.

    Args:
        q: Queries, [num_tokens, num_heads, 128], float8_e4m3fn, any strides; from
            ``indexer_quantize_q``, as are the weights.
        weights: Weights with the scales of the queries, [num_tokens, num_heads], float32, any
            strides.
        k: e4m3 codes of the keys, [num_k, 128], uint8, any strides; ``gather_indexer_k`` gives
            them, with their scales.
        scales: Scale of every key, [num_k], float32, any strides.
        row_start: First key of every token, [num_tokens], int32; ``prefill_row_bounds`` gives both.
        row_stop: One past its last key, [num_tokens], int32.

    Returns:
        float32 [num_tokens, num_k], dense: as ``indexer_logits``; -inf outside of the spans.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than the ones above.

    Compile: on CUDA one Triton kernel of ours, on CPU a matrix product and a loop; dynamic in all
        tensor sizes; CUDA graphs and export: yes.

    Source: DeepSeek-V4's lightning indexer; DeepGEMM's MQA logits.

    Example:
        >>> import torch, dsv4_ops
        >>> q = torch.ones(1, 1, 128).to(torch.float8_e4m3fn)
        >>> k = torch.full((3, 128), 0x38, dtype=torch.uint8)  # the code of 1
        >>> start, stop = torch.tensor([[1], [3]], dtype=torch.int32)
        >>> dsv4_ops.indexer_logits_ragged(
        ...     q, torch.ones(1, 1), k, torch.tensor([1.0, 1.0, 0.5]), start, stop
        ... )
        tensor([[-inf, 128.,  64.]])
    """
    checks = Checks("indexer_logits_ragged")
    check_query(checks, q, weights)
    checks.tensor("k", k, torch.uint8, "num_k", DIM)
    checks.tensor("scales", scales, torch.float32, "num_k")
    checks.tensor("row_start", row_start, torch.int32, "num_tokens")
    checks.tensor("row_stop", row_stop, torch.int32, "num_tokens")
    logits: Tensor = _indexer_logits_ragged(q, weights, k, scales, row_start, row_stop)
    return logits


def check_paged(
    checks: Checks, q: Tensor, weights: Tensor, k_cache: Tensor, *, block_size: int, layout: str
) -> None:
    """Queries, their weights, and a cache of ``layout``."""
    checks.one_of("layout", layout, IndexerLayout.tag, PlainLayout.tag)
    checks.at_least(1, block_size=block_size)
    if layout == IndexerLayout.tag:
        check_query(checks, q, weights)
        checks.pages("k_cache", k_cache, IndexerLayout(block_size))
        return
    checks.floats("q", q, torch.bfloat16, torch.float32)
    check_query(checks, q, weights, q.dtype)
    checks.rows("k_cache", k_cache, block_size)
    checks.tensor("k_cache", k_cache, q.dtype, "num_blocks", "block_size", DIM)


def check_schedule(checks: Checks, schedule: Tensor | None) -> None:
    """A schedule for some number of SMs, if there is one."""
    if schedule is not None:
        checks.tensor("schedule", schedule, torch.int32, "num_sms + 1", 2)


def check_query(
    checks: Checks, q: Tensor, weights: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> None:
    checks.tensor("q", q, dtype, "num_tokens", "num_heads", DIM)
    checks.tensor("weights", weights, torch.float32, "num_tokens", "num_heads")

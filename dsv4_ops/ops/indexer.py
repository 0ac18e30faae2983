"""The lightning indexer: its FP8 key cache, logits, top-k and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.core.tiles import SCHEDULE_KEYS
from dsv4_ops.core.types import IndexerKeys, IndexerQuery
from dsv4_ops.dispatch.choice import check_impl
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.ops.kv_cache import check_quantized_insert

_quantize_and_insert_indexer_k = define_op(
    "indexer",
    "quantize_and_insert_indexer_k(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping, "
    "*, int block_size, str layout) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_blocks"),
    source="vLLM 0.33, the store of its indexer compressor; values that it leaves open decided "
    "here",
)


def quantize_and_insert_indexer_k(
    k: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    layout: str = IndexerLayout.tag,
) -> None:
    """Quantise the indexer key of every token to FP8 and insert it.

    Args:
        k: Keys with RoPE applied, [num_rows, 128], bfloat16, any strides; at least num_tokens rows;
            extra rows are ignored.
        k_cache: Paged cache, [num_blocks, page_bytes], uint8, from ``IndexerLayout.allocate``.
            Blocks must start at multiples of 16 bytes and may have gaps between them.
        slot_mapping: Slot of every token, block * block_size + row, [num_tokens], int64. Tokens
            whose slot is below 0 or past the last block are skipped.
        block_size: Rows per block, 64 for DeepGEMM. At least 1.
        layout: Tag of the cache's layout, "v4_indexer_fp8".

    Returns:
        Nothing.

    Mutates: ``k_cache``: only the 128 codes and the 4 scale bytes of each slot that the call
        writes. The row has one float32 scale, the smallest power of two, at least 2^-22, for which
        amax / scale is at most 448. NaN, infinities and tokens that share a slot have the same
        effects as in ``quantize_and_insert_k_cache``.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, ``block_size`` below
            1, an unknown layout, or several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of the cache; on CUDA our Triton kernel runs, both in
        graphs and in AOTInductor packages; on a CPU, Inductor generates scatters; dynamic in
        num_tokens and num_blocks; CUDA graphs and export: yes.

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
    op = "quantize_and_insert_indexer_k"
    check_quantized_insert(IndexerLayout, op, k, k_cache, slot_mapping, block_size, layout)
    _quantize_and_insert_indexer_k(k, k_cache, slot_mapping, block_size=block_size, layout=layout)


_gather_indexer_k = define_op(
    "indexer",
    "gather_indexer_k(Tensor k_cache, Tensor cu_seq_lens, Tensor block_table, *, "
    "int block_size, SymInt num_rows, str layout) -> (Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_reqs", "num_rows", "num_blocks", "max_blocks"),
    source="vLLM 0.33 cp_gather_indexer_k_quant_cache, with bounds",
    gradient=INTEGERS,
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
    """Gather the indexer keys of all requests, one request after the other.

    DeepGEMM's ragged logits take keys in this form.

    Args:
        k_cache: Paged cache, [num_blocks, page_bytes], uint8, as for
            ``quantize_and_insert_indexer_k``.
        cu_seq_lens: First result row of every request and one past the last row, [num_reqs + 1],
            int32, non-decreasing, from ``prefill_row_bounds``.
        block_table: Physical block of every logical block of this cache, [num_reqs, max_blocks],
            int32, any strides.
        block_size: Rows per block. At least 1.
        num_rows: Capacity of the result in rows. At least 0.
        layout: Tag of the cache's layout, "v4_indexer_fp8".

    Returns:
        ``IndexerKeys(k, scales)``: uint8 [num_rows, 128] e4m3 codes, whose values are
        ``k.view(torch.float8_e4m3fn)``, and float32 [num_rows] scales. Rows that belong to no
        request and rows on absent blocks are zeros.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, an
            unknown layout, or several devices.
        TypeError: a dtype other than those above.

    Compile: on CUDA one Triton kernel of ours; on a CPU, a search and masked loads; dynamic in all
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
    settings: dict[str, Any] = {"block_size": block_size, "num_rows": num_rows, "layout": layout}
    return IndexerKeys(*_gather_indexer_k(k_cache, cu_seq_lens, block_table, **settings))


_paged_mqa_logits_metadata = define_op(
    "indexer",
    "paged_mqa_logits_metadata(Tensor seq_lens, *, int block_size, int num_sms) -> Tensor",
    dynamic=("num_reqs",),
    source="DeepGEMM's get_paged_mqa_logits_metadata",
    gradient=INTEGERS,
)


def paged_mqa_logits_metadata(seq_lens: Tensor, *, block_size: int, num_sms: int) -> Tensor:
    """Divide the indexer's keys of a step among SMs, as DeepGEMM does.

    The keys of each row of queries are divided into splits of 256 keys. Each SM gets a run of
    consecutive splits, in the order of the rows. Run lengths differ by at most one split; longer
    runs come first. DeepGEMM's paged logits need such a schedule; our kernels do not.

    Args:
        seq_lens: Number of keys that each row of queries may see, [num_reqs], int32; negative
            values count as 0. Our ops call DeepGEMM with one row per token. If the shape is
            [num_reqs, next_n], as from ``mtp_seq_lens``, a row is a request, and its length is the
            maximum of the request's lengths. Use this shape to call DeepGEMM yourself with queries
            [num_reqs, next_n, ...]; DeepGEMM then reads keys once per request. DeepGEMM takes the
            last length of a request, which is not the maximum if the request has fewer than next_n
            tokens, so pass DeepGEMM the maximum in all columns.
        block_size: Rows per block: 64, or another divisor of 256. It does not change the schedule.
        num_sms: SMs that run the logits, DeepGEMM's ``get_num_sms()``. At least 1.

    Returns:
        int32 [num_sms + 1, 2], dense: the row and the split at which each SM begins, then
        (num_reqs, 0). An SM's run ends where the next SM's run begins; an SM without work has the
        same entry as the next SM. A run begins in a row that has keys, or after all rows.

        The numbers are those of DeepGEMM's ``get_paged_mqa_logits_metadata`` in vLLM 0.22. Later
        versions of DeepGEMM give the longer runs to the last SMs, but their logits kernels accept
        our schedule too. This op sums in 64 bits, DeepGEMM in 32.

    Mutates: nothing.

    Raises:
        ValueError: wrong shape, numbers out of range, a ``block_size`` that does not divide 256, or
            more than 16383 rows.
        TypeError: a dtype other than int32, or a number that is not an int.

    Compile: decomposes to a prefix sum and one reduction; dynamic in num_reqs; CUDA graphs and
        export: yes. No host synchronisation: a captured graph uses the lengths of each replay.

    Source: DeepGEMM's ``get_paged_mqa_logits_metadata``; only the semantics are the same.

    Example:
        >>> import torch, dsv4_ops
        >>> lens = torch.tensor([1000, 300, 0, 600], dtype=torch.int32)  # 4, 2, 0 and 3 splits
        >>> dsv4_ops.paged_mqa_logits_metadata(lens, block_size=64, num_sms=4).tolist()
        [[0, 0], [0, 3], [1, 1], [3, 1], [4, 0]]
        >>> lens = torch.tensor([[999, 1000], [300, 0], [0, 0], [599, 600]], dtype=torch.int32)
        >>> dsv4_ops.paged_mqa_logits_metadata(lens, block_size=64, num_sms=4).tolist()
        [[0, 0], [0, 3], [1, 1], [3, 1], [4, 0]]
    """
    checks = Checks("paged_mqa_logits_metadata")
    per_token = isinstance(seq_lens, Tensor) and seq_lens.dim() == 2
    columns = ("next_n",) if per_token else ()
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs", *columns)
    checks.at_least(1, block_size=block_size, num_sms=num_sms)
    checks.divisor("block_size", block_size, "the keys of a split", SCHEDULE_KEYS)
    checks.request_limit()
    return _paged_mqa_logits_metadata(seq_lens, block_size=block_size, num_sms=num_sms)


DIM = IndexerLayout.head_dim

PROVIDERS = ("triton", "deep_gemm", "reference")

_indexer_quantize_q = define_op(
    "indexer",
    "indexer_quantize_q(Tensor q, Tensor weights, Tensor positions, "
    "Tensor cos_sin_cache, *, float softmax_scale, bool rope_first=False, "
    "bool interleaved=True) -> (Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_positions"),
    source="vLLM 0.33, rotation and FP8 quantisation of its indexer's queries",
)
_indexer_logits = define_op(
    "indexer",
    "indexer_logits(Tensor q, Tensor weights, Tensor k_cache, Tensor lens, "
    "Tensor req_indices, Tensor block_table, Tensor? schedule=None, *, int block_size, "
    "SymInt num_rows, "
    'str layout, str impl="auto") -> Tensor',
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks", "num_rows"),
    source="DeepSeek-V4's lightning indexer; DeepGEMM's paged MQA logits",
    providers=PROVIDERS,
)
_indexer_logits_ragged = define_op(
    "indexer",
    "indexer_logits_ragged(Tensor q, Tensor weights, Tensor k, Tensor scales, "
    "Tensor row_start, Tensor row_stop) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_k"),
    source="DeepSeek-V4's lightning indexer; DeepGEMM's MQA logits",
)


def indexer_quantize_q(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float | None = None,
    rope_first: bool = False,
    interleaved: bool = True,
) -> IndexerQuery:
    """Rotate the indexer's queries and quantise them to FP8.

    The returned head weights include the scales.

    Args:
        q: Queries without RoPE, [num_tokens, num_heads, 128], bfloat16, any strides.
        weights: Weight of every head, [num_tokens, num_heads], bfloat16 or float32, any strides.
        positions: Absolute position of every token, [num_tokens], int64. Queries at positions below
            0 or past the end of the table are not rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, for the layers with a compressor,
            [num_positions, rope_dim], float32; rope_dim is even and at most 128.
        softmax_scale: Factor applied to all weights, above 0. None means 128^-0.5 * num_heads^-0.5.
        rope_first: Whether the first rope_dim values are rotated (DeepSeek-V3.2, GLM-5) rather than
            the last.
        interleaved: Which values form pairs, as for ``apply_rope``; False for DeepSeek-V3.2.

    Returns:
        ``IndexerQuery(q, weights)``, dense. ``q``, float8_e4m3fn [num_tokens, num_heads, 128],
        holds the queries, rotated as by ``apply_rope``, divided by a scale and rounded to nearest
        even. Each head of a token has one scale. Scales, NaN and infinities are as in
        ``quantize_and_insert_indexer_k``. ``weights``, float32 [num_tokens, num_heads], holds the
        head's weight times the head's scale, then times ``softmax_scale``.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a ``softmax_scale`` out of range, or several devices.
        TypeError: a dtype other than those above.

    Compile: on CUDA our Triton kernel; on a CPU, Inductor generates a loop with the same bits;
        dynamic in num_tokens and num_positions; CUDA graphs and export: yes.

    Source: vLLM 0.33's indexer queries. There is no Hadamard rotation, because it would cancel in
        the product with the keys.

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
    settings: dict[str, Any] = {"rope_first": rope_first, "interleaved": interleaved}
    for name, value in settings.items():
        checks.flag(name, value)
    settings["softmax_scale"] = checked_scale(checks, q, softmax_scale)
    return IndexerQuery(*_indexer_quantize_q(q, weights, positions, cos_sin_cache, **settings))


def check_unquantized(
    checks: Checks, q: Tensor, weights: Tensor, heads: str = "num_heads", prefix: str = ""
) -> None:
    """Check queries before they are quantised, and the weights of their ``heads``.

    ``prefix`` starts the names of the arguments."""
    checks.tensor(f"{prefix}q", q, torch.bfloat16, "num_tokens", heads, DIM)
    checks.tensor(f"{prefix}weights", weights, (torch.bfloat16, torch.float32), "num_tokens", heads)


def checked_scale(checks: Checks, q: Tensor, softmax_scale: float | None) -> float:
    """Return ``softmax_scale``, or the model's scale if ``softmax_scale`` is None."""
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
    """Score the compressed rows that each token may see.

    The op reads the keys from their blocks. To select rows, call ``indexer_select``, which does not
    store the scores.

    Args:
        q: Queries, [num_tokens, num_heads, 128], float8_e4m3fn, any strides; from
            ``indexer_quantize_q``, as are the weights. For the layout "plain", queries are bfloat16
            or float32, rotated by ``apply_rope``.
        weights: Head weights times the scales of the queries, [num_tokens, num_heads], float32, any
            strides. For plain queries, pass the head weights times a softmax_scale;
            ``indexer_quantize_q`` uses 128^-0.5 * num_heads^-0.5.
        k_cache: Paged keys, [num_blocks, page_bytes], uint8, from ``IndexerLayout.allocate``.
            Blocks must start at multiples of 16 bytes and may have gaps between them. For "plain",
            the shape is [num_blocks, block_size, 128], of the dtype of q, with dense rows, as
            ``compress_and_insert`` writes them.
        lens: Number of rows that each token may see, [num_tokens], int32, from ``flatten_decode``;
            or [num_reqs, next_n], from ``mtp_seq_lens``, where entry (b, j) is for token b * next_n
            + j. With either shape, every token is scored by itself; ``indexer_select`` says why.
        req_indices: Request of every token, [num_tokens], int32; requests outside 0..num_reqs-1
            have no rows.
        block_table: Physical block of every logical block of this cache, [num_reqs, max_blocks],
            int32, any strides.
        schedule: DeepGEMM's schedule, [num_sms + 1, 2], int32, from ``paged_mqa_logits_metadata``,
            made once per step. With None, the call makes its own schedule. The schedule must be
            made from exactly the lengths that this call uses: 0 for tokens of no request, and at
            most num_rows and max_blocks * block_size. DeepGEMM does not check the schedule: if it
            was made from other lengths, DeepGEMM reads and writes out of bounds. Other
            implementations ignore the schedule.
        block_size: Rows per block, 64 for DeepGEMM. At least 1.
        num_rows: Capacity of the result in columns. At least 0.
        layout: Tag of the cache's layout, "v4_indexer_fp8" or "plain".
        impl: Implementation: "triton" (our kernel), "deep_gemm", or "reference" (the definition);
            "auto" runs our kernel, unless DeepGEMM is installed and was faster at these sizes on an
            H200.

    Returns:
        float32 [num_tokens, num_rows], dense: sum over heads of weights * relu(q . k), times the
        scale of the key if the key has one. -inf for rows past ``lens`` and for rows on absent
        blocks. Sums are float32; Hopper's FP8 tensor cores keep about 14 bits of a sum of 128
        products.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, or
            several devices.
        TypeError: a dtype other than those above.
        NotImplementedError: ``impl`` does not support the call: DeepGEMM takes 32 or 64 heads and
            blocks of 64 rows of the layout "v4_indexer_fp8".
        ImportError, RuntimeError: ``impl`` is not available here; the message says why.

    Compile: on CUDA one Triton kernel of ours; on CPU, and for the layout "plain" on every device,
        the reference: masked loads that gather a key for every score, and a matrix product.
        DeepGEMM is a call in the graph, and not available in AOTInductor packages. DeepGEMM sums
        the heads in another order, also in float32. Dynamic in all tensor sizes and num_rows; with
        dynamic sizes "auto" runs our kernels; CUDA graphs and export: yes.

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
    checks.by_token("lens", lens, torch.int32)
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    arguments: dict[str, Any] = {"layout": layout, "block_size": block_size}
    _check_schedule(checks, schedule, "lens", lens)
    check_impl(checks.op, PROVIDERS, impl, q.device, {"q": q, **arguments})
    rows = (q, weights, k_cache, lens, req_indices, block_table)
    return _indexer_logits(*rows, schedule, num_rows=num_rows, impl=impl, **arguments)


def indexer_logits_ragged(
    q: Tensor, weights: Tensor, k: Tensor, scales: Tensor, row_start: Tensor, row_stop: Tensor
) -> Tensor:
    """Score gathered keys; each token sees a span of the keys.

    Args:
        q: Queries, [num_tokens, num_heads, 128], float8_e4m3fn, any strides; from
            ``indexer_quantize_q``, as are the weights.
        weights: Head weights times the scales of the queries, [num_tokens, num_heads], float32, any
            strides.
        k: e4m3 codes of the keys, [num_k, 128], uint8, any strides; ``gather_indexer_k`` returns
            codes and scales.
        scales: Scale of every key, [num_k], float32, any strides.
        row_start: First key of every token, [num_tokens], int32; ``prefill_row_bounds`` returns
            both bounds.
        row_stop: One past the last key of every token, [num_tokens], int32.

    Returns:
        float32 [num_tokens, num_k], dense: scores as from ``indexer_logits``; -inf outside of the
        spans.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than those above.

    Compile: on CUDA one Triton kernel of ours; on a CPU, a matrix product and a loop; dynamic in
        all tensor sizes; CUDA graphs and export: yes.

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
    return _indexer_logits_ragged(q, weights, k, scales, row_start, row_stop)


def _check_schedule(checks: Checks, schedule: Tensor | None, name: str, rows: Tensor) -> None:
    """Check DeepGEMM's schedule. With a schedule, ``rows`` must have one entry per token, because
    our call of DeepGEMM scores tokens one by one."""
    checks.optional("schedule", schedule, torch.int32, "num_sms + 1", 2)
    if schedule is not None and rows.dim() == 2:
        raise checks.error(
            "schedule",
            must=f"be None with {name} [num_reqs, next_n]",
            got="a tensor",
            do="It is of tokens: flatten both",
        )


def check_paged(
    checks: Checks, q: Tensor, weights: Tensor, k_cache: Tensor, *, block_size: int, layout: str
) -> None:
    """Check queries, their weights, and a cache of ``layout``."""
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


def check_query(
    checks: Checks, q: Tensor, weights: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> None:
    checks.tensor("q", q, dtype, "num_tokens", "num_heads", DIM)
    checks.tensor("weights", weights, torch.float32, "num_tokens", "num_heads")


_indexer_topk = define_op(
    "indexer",
    "indexer_topk(Tensor logits, Tensor lens, *, int topk) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_rows"),
    source="DeepSeek-V4's lightning indexer; the order of ties and of the result decided here",
)
_indexer_select = define_op(
    "indexer",
    "indexer_select(Tensor q, Tensor weights, Tensor k_cache, Tensor positions, "
    "Tensor req_indices, Tensor block_table, Tensor? schedule=None, *, int block_size, "
    "int compress_ratio, "
    'int topk, str layout, bool slots=False, str impl="auto") -> Tensor',
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks"),
    source="DeepSeek-V4's lightning indexer; the order of ties and of the result decided here",
    providers=PROVIDERS,
)


def indexer_topk(logits: Tensor, lens: Tensor, *, topk: int) -> Tensor:
    """Select the best columns of every row of logits.

    Args:
        logits: Scores, [num_tokens, num_rows], float32, any strides, from ``indexer_logits``.
        lens: Number of leading columns that are candidates, [num_tokens], int32; later columns may
            have any value.
        topk: Columns of the result. At least 0.

    Returns:
        int32 [num_tokens, topk], dense: the columns of the ``topk`` candidates with the highest
        scores, sorted by column number; unused entries are -1. Ties go to the lower column. -0
        equals 0, NaN is below every number, and a score of -inf is no candidate.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``topk`` below 0, or several devices.
        TypeError: a dtype other than those above.

    Compile: on CUDA our Triton kernels (for topk up to 4096); on a CPU, Inductor's loops, and
        torch's topk and sort; dynamic in all tensor sizes; CUDA graphs and export: yes.

    Source: DeepSeek-V4's lightning indexer. Other libraries specify neither order nor ties.

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
    return _indexer_topk(logits, lens, topk=topk)


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
    """Select the compressed rows that each token attends to.

    One call scores and selects, for decodes and prefills.

    Our kernels do not store scores, so memory and launches do not grow with the context. There is
    one exception: on Hopper, with a topk of 2048 or more, our kernels store the scores if their
    workspace takes at most 512 MiB. This workspace takes three times the size of the scores, plus
    32 KiB per token. The reference, which runs for the layout "plain" on every device, gathers keys
    and stores their scores. A token's rows do not depend on other tokens.

    Positions of shape [num_reqs, next_n] are viewed as one row per token, and copied only if they
    are not contiguous. Kernels that read a request's keys once for all tokens of the request were
    slower for large batches or contexts: the L2 cache serves the repeated reads anyway, and each
    token needs its own products and reductions over the heads.

    Args:
        q: Queries, [num_tokens, num_heads, 128], float8_e4m3fn, any strides; from
            ``indexer_quantize_q``, as are the weights. For the layout "plain", queries are bfloat16
            or float32, rotated by ``apply_rope``.
        weights: Head weights times the scales of the queries, [num_tokens, num_heads], float32, any
            strides. For plain queries, pass the head weights, with or without a softmax_scale: a
            common positive factor does not change the selection.
        k_cache: Paged keys, [num_blocks, page_bytes], uint8, from ``IndexerLayout.allocate``.
            Blocks must start at multiples of 16 bytes and may have gaps between them. For "plain",
            the shape is [num_blocks, block_size, 128], of the dtype of q, with dense rows, as
            ``compress_and_insert`` writes them.
        positions: Absolute position of every token, [num_tokens], int64; or [num_reqs, next_n],
            where entry (b, j) is for token b * next_n + j, whose request is in ``req_indices``. A
            token at a negative position selects no row. The result of ``mtp_seq_lens`` minus 1 has
            this shape; if these lengths count compressed rows, pass ``compress_ratio`` 1.
        req_indices: Request of every token, [num_tokens], int32; requests outside 0..num_reqs-1
            have no rows.
        block_table: Physical block of every logical block of this cache, [num_reqs, max_blocks],
            int32, any strides.
        schedule: DeepGEMM's schedule, as for ``indexer_logits``, made from the number of complete
            rows of every token, at most max_blocks * block_size. With None, the call makes its own
            schedule. Must be None with positions [num_reqs, next_n].
        block_size: Rows per block, 64 for DeepGEMM. At least 1.
        compress_ratio: Positions per compressed row, 4. At least 1.
        topk: Rows to select, 512 in DeepSeek-V4-Flash or 1024 in DeepSeek-V4-Pro. At least 0.
        layout: Tag of the cache's layout, "v4_indexer_fp8" or "plain".
        slots: Whether to return cache slots, for ``sparse_mla_decode``, instead of rows of the
            request. This saves the kernel that would translate rows to slots.
        impl: Implementation: "triton" (our kernels), "deep_gemm" (DeepGEMM's logits and our
            selection), or "reference" (the definition); "auto" runs our kernels.

    Returns:
        int32 [num_tokens, topk], dense: row numbers in the request, sorted, for
        ``sparse_mla_prefill``; unused entries are -1. Candidates are the (position + 1) //
        compress_ratio complete rows whose blocks exist. Scores are those of ``indexer_logits``;
        ties and NaN are as in ``indexer_topk``. All candidates are selected if there are at most
        ``topk``. With ``slots``, each row is replaced by its slot, as in
        ``global_topk_indices_and_lens``: block * block_size + row in the block, -1 for no row and
        for slots beyond int32.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, sizes out of range, or
            several devices.
        TypeError: a dtype other than those above.
        NotImplementedError, ImportError, RuntimeError: as ``indexer_logits``.

    Compile: on CUDA our Triton kernels (for topk up to 4096); on CPU, and for the layout "plain" on
        every device, the reference: Inductor's loops, and torch's matrix product, topk and sort.
        DeepGEMM is a call, followed by our kernels, and not available in AOTInductor packages; its
        scores round differently, so other rows may be selected among near ties. Dynamic in all
        tensor sizes; with dynamic sizes "auto" runs our kernels, and a graph for a topk of 2048 or
        more contains kernels that store scores and kernels that do not; the sizes of each call
        decide which of them run. CUDA graphs and export: yes.

    Source: DeepSeek-V4's lightning indexer. Other libraries do not specify the order of ties.

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
    checks.by_token("positions", positions, torch.int64)
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    arguments: dict[str, Any] = {"layout": layout, "block_size": block_size}
    _check_schedule(checks, schedule, "positions", positions)
    check_impl(checks.op, PROVIDERS, impl, q.device, {"q": q, **arguments})
    rows = (q, weights, k_cache, positions, req_indices, block_table)
    sizes = {"compress_ratio": compress_ratio, "topk": topk, "slots": slots}
    return _indexer_select(*rows, schedule, impl=impl, **sizes, **arguments)

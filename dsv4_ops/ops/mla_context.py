"""Dense MLA over chunked contexts: the chunk plan, attention to a chunk, and the merge of partial
results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import plain_int
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.ints import INT64_MAX
from dsv4_ops.core.types import ContextChunks, MergedStates, MlaAttention
from dsv4_ops.dispatch.choice import check_impl
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.reference import mla_context as reference

MERGED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLANS = ("packed", "equal")
LSE_BASES = ("e", "2")
MIN_WORKSPACE_ROWS = 65536
"""Limit of ``mla_workspace_rows``, unless a block per sequence needs more rows."""

_context_chunks = define_op(
    "mla_context",
    "context_chunks(Tensor context_lens, *, int workspace_rows, int max_chunks, "
    "str chunk_plan, int block_size, int cp_world_size, int cp_interleave) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    dynamic=("num_reqs",),
    source="vLLM 0.22 MLACommonMetadataBuilder ('equal'); 'packed' as tensors, without a loop",
    gradient=INTEGERS,
)


def context_chunks(
    context_lens: Tensor,
    *,
    workspace_rows: int,
    max_chunks: int,
    chunk_plan: str = "packed",
    block_size: int = 1,
    cp_world_size: int = 1,
    cp_interleave: int = 1,
) -> ContextChunks:
    """Split the contexts of a batch into chunks that fit the workspace, on the device.

    "packed" lays the contexts end to end and splits wherever the workspace is full, so only the
    last chunk may have space left. "equal" gives every request with a context the same number of
    rows of each chunk, rounded down to whole blocks; then one long context among many short
    contexts needs many chunks.

    With ``cp_world_size`` above 1, each rank gathers its own rows, at most ``workspace_rows``
    divided by the number of ranks, and chunks end between turns of ``cp_interleave`` positions. All
    ranks gather the same number of rows of a request; on ranks that own fewer rows, the last of
    these rows do not exist.

    Args:
        context_lens: Number of tokens of each request in the cache before this step, [num_reqs],
            int32; 0 for decodes and padding. Negative values count as 0.
        workspace_rows: Rows per chunk, on all ranks together; ``mla_workspace_rows`` suggests a
            number. At least cp_world_size * cp_interleave.
        max_chunks: Chunks of the result; ``max_context_chunks`` returns a number that suffices for
            any batch. At least 1.
        chunk_plan: "packed" or "equal".
        block_size: Rows per block of the cache, which "equal" rounds to. At least 1.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1; unused if ``cp_world_size`` is
            1.

    Returns:
        ``ContextChunks``, int32:

        - local_starts [max_chunks, num_reqs]: for each request, the first row that each rank
          gathers, numbered among the request's rows on that rank; cp_world_size times this number
          is the request's first position in the chunk.
        - cu_seq_lens [max_chunks, num_reqs + 1]: start of each request's positions in the chunk,
          and the total number of positions. A request without positions in the chunk has an empty
          range.
        - local_cu_seq_lens [max_chunks, num_reqs + 1]: the same for the rows that a rank gathers;
          equal to ``cu_seq_lens`` if there is one rank.
        - num_chunks [1]: number of chunks of the plan. If num_chunks exceeds max_chunks, the plan
          does not fit and only its first max_chunks chunks are stored. num_chunks is 2**31 - 1 if
          "equal" would give a request less than a block.

        Chunks from num_chunks on are empty.

    Mutates: nothing.

    Raises:
        ValueError: wrong shapes, numbers out of range, or an unknown ``chunk_plan``.
        TypeError: a dtype other than int32, or a number that is not an int.

    Compile: decomposes to prefix sums and pointwise kernels; dynamic in num_reqs; CUDA graphs and
        export: yes. On the CPU the prefix sums call aten.cumsum.

    Source: vLLM 0.22 ``MLACommonMetadataBuilder`` ("equal"); later versions have
        ``plan_mla_context_chunks`` for the same purpose.

    Example:
        >>> import torch, dsv4_ops
        >>> context_lens = torch.tensor([10, 0, 5], dtype=torch.int32)
        >>> chunks = dsv4_ops.context_chunks(context_lens, workspace_rows=12, max_chunks=3)
        >>> chunks.local_starts.tolist()
        [[0, 0, 0], [10, 0, 2], [10, 0, 5]]
        >>> chunks.cu_seq_lens.tolist(), chunks.num_chunks.item()
        ([[0, 10, 10, 12], [0, 0, 0, 3], [0, 0, 0, 0]], 2)
    """
    checks = Checks("context_chunks")
    checks.tensor("context_lens", context_lens, torch.int32, "num_reqs")
    checks.at_least(1, max_chunks=max_chunks)
    plan: dict[str, Any] = {"chunk_plan": chunk_plan, "block_size": block_size}
    plan |= {"cp_world_size": cp_world_size, "cp_interleave": cp_interleave}
    _check_plan(checks, workspace_rows, **plan)
    chunks = {"workspace_rows": workspace_rows, "max_chunks": max_chunks}
    return ContextChunks(*_context_chunks(context_lens, **chunks, **plan))


def plan_context_chunks(
    context_lens: Sequence[int] | Tensor,
    *,
    workspace_rows: int,
    chunk_plan: str = "packed",
    block_size: int = 1,
    cp_world_size: int = 1,
    cp_interleave: int = 1,
) -> list[list[tuple[int, int, int]]]:
    """List the chunks of ``context_chunks`` for lengths on the host.

    Args:
        context_lens: Number of tokens that each request has in the cache, non-negative ints or a
            CPU tensor.
        workspace_rows: Rows per chunk, on all ranks together. At least cp_world_size *
            cp_interleave.
        chunk_plan: "packed" or "equal".
        block_size: Rows per block of the cache, which "equal" rounds to.
        cp_world_size: Ranks that share a sequence.
        cp_interleave: Consecutive positions on one rank.

    Returns:
        For each chunk, a list of ``(request, start, length)``: a request and its positions in the
        chunk. Requests without positions are left out.

    Raises:
        ValueError: a length below 0, numbers out of range, an unknown ``chunk_plan``, or an "equal"
            plan with less than a block per request.
        TypeError: a length or a number that is not an int.

    Example:
        >>> import dsv4_ops
        >>> dsv4_ops.plan_context_chunks([10, 0, 5], workspace_rows=12)
        [[(0, 0, 10), (2, 0, 2)], [(2, 2, 3)]]
    """
    checks = Checks("plan_context_chunks")
    _check_plan(checks, workspace_rows, chunk_plan, block_size, cp_world_size, cp_interleave)
    lens = checks.host_lens("context_lens", context_lens)
    round_ = cp_world_size * reference.local_turn(cp_world_size, cp_interleave)
    plan: list[list[tuple[int, int, int]]] = []
    if chunk_plan == "equal":
        count = sum(length > 0 for length in lens)
        size = _equal_size(checks, workspace_rows, count, block_size, round_)
        return [
            [
                (request, start, min(size, length - start))
                for request, length in enumerate(lens)
                if length > start
            ]
            for start in range(0, max(lens, default=0), size)
        ]
    capacity = 0
    for request, length in enumerate(lens):
        start = 0
        while start < length:
            if capacity == 0:
                plan.append([])
                capacity = workspace_rows // round_
            num_rounds = min(capacity, -(-(length - start) // round_))
            stop = min(start + num_rounds * round_, length)
            plan[-1].append((request, start, stop - start))
            start, capacity = stop, capacity - num_rounds
    return plan


def max_context_chunks(
    *,
    num_reqs: int,
    max_model_len: int,
    workspace_rows: int,
    max_context_tokens: int | None = None,
    chunk_plan: str = "packed",
    block_size: int = 1,
    cp_world_size: int = 1,
    cp_interleave: int = 1,
) -> int:
    """Return an upper bound on the number of chunks, for ``max_chunks``.

    The capacity of the cache does not bound the number of chunks: requests with a common prefix
    share blocks of the cache, but every request gathers the prefix.

    Args:
        num_reqs: Maximum requests of a batch. At least 0.
        max_model_len: Maximum tokens of one context. At least 1.
        workspace_rows: Rows per chunk, on all ranks together. At least cp_world_size *
            cp_interleave.
        max_context_tokens: Maximum tokens of all contexts of a batch, at least 0; None if only the
            other arguments bound this number.
        chunk_plan: "packed" or "equal".
        block_size: Rows per block of the cache, which "equal" rounds to.
        cp_world_size: Ranks that share a sequence.
        cp_interleave: Consecutive positions on one rank.

    Returns:
        An upper bound from the sizes alone, at least 1.

    Raises:
        ValueError: an argument out of range, or an "equal" plan with less than a block per request.
        TypeError: an argument that is not an int.

    Example:
        >>> import dsv4_ops
        >>> dsv4_ops.max_context_chunks(num_reqs=32, max_model_len=131072, workspace_rows=65536)
        64
    """
    checks = Checks("max_context_chunks")
    checks.at_least(0, num_reqs=num_reqs)
    checks.at_least(1, max_model_len=max_model_len)
    _check_plan(checks, workspace_rows, chunk_plan, block_size, cp_world_size, cp_interleave)
    total = num_reqs * max_model_len
    if max_context_tokens is not None:
        checks.at_least(0, most=INT64_MAX, max_context_tokens=max_context_tokens)
        total = min(total, max_context_tokens)
    round_ = cp_world_size * reference.local_turn(cp_world_size, cp_interleave)
    if chunk_plan == "equal":
        size = _equal_size(checks, workspace_rows, min(num_reqs, total), block_size, round_)
        return max(1, -(-min(max_model_len, total) // size))
    whole = num_reqs * -(-max_model_len // round_)
    rounds = min(whole, (total + num_reqs * (round_ - 1)) // round_)
    return max(1, -(-rounds // (workspace_rows // round_)))


def mla_workspace_rows(
    *,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int,
    cp_world_size: int = 1,
    cp_interleave: int = 1,
) -> int:
    """Choose the number of workspace rows that a chunk of contexts is gathered into.

    The function takes eight contexts of maximum length or four blocks per sequence, whichever has
    more rows, limits this to 65536 rows, and returns at least one block per sequence. A row takes
    1152 bytes in bfloat16; the keys and values that ``mla_expand_kv`` makes of a row for 128 heads
    take 64 KiB. With several ranks, allocate ``rows + rows // cp_world_size``: space for the rows
    of all ranks, and for this rank's own rows.

    Args:
        max_model_len: Maximum tokens of a sequence. At least 1.
        max_num_seqs: Maximum sequences of a batch. At least 1.
        block_size: Rows per block of the cache. At least 1.
        cp_world_size: Ranks that share a sequence. At least 1.
        cp_interleave: Consecutive positions on one rank. At least 1.

    Returns:
        The number of rows; with several ranks, a multiple of ``block_size`` and of
        ``cp_world_size * cp_interleave``.

    Raises:
        ValueError: an argument out of range.
        TypeError: an argument that is not an int.

    Example:
        >>> import dsv4_ops
        >>> dsv4_ops.mla_workspace_rows(max_model_len=4096, max_num_seqs=128, block_size=64)
        32768
    """
    checks = Checks("mla_workspace_rows")
    checks.at_least(1, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    checks.at_least(1, block_size=block_size)
    checks.at_least(1, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    preferred = max(8 * max_model_len, 4 * max_num_seqs * block_size)
    rows = max(min(preferred, MIN_WORKSPACE_ROWS), max_num_seqs * block_size)
    if cp_world_size == 1:
        return rows
    align = math.lcm(block_size, cp_world_size * cp_interleave)
    return -(-max(rows, max_num_seqs * align) // align) * align


_merge_attn_states = define_op(
    "mla_context",
    "merge_attn_states(Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, "
    "Tensor suffix_lse, *, str lse_base) -> (Tensor out, Tensor lse)",
    dynamic=("num_tokens",),
    source="vLLM 0.22 merge_attn_states; sides without keys never count",
)


def merge_attn_states(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    *,
    lse_base: str = "e",
) -> MergedStates:
    """Merge attention over two parts of the keys.

    A part whose log-sum-exp is -inf, +inf or NaN has no keys, and its output may have any value.
    Keep the running result of several merges in float32: in bfloat16 each merge rounds the result
    again.

    Args:
        prefix_out: Output over one part, [num_tokens, num_heads, width], bfloat16, float16 or
            float32; any strides.
        prefix_lse: Log-sum-exp of ``prefix_out``, [num_tokens, num_heads], float32.
        suffix_out: Output over the other part, of the same shape.
        suffix_lse: Log-sum-exp of ``suffix_out``, of the same shape.
        lse_base: Base of the log-sum-exps, "e", or "2" as in FlashInfer.

    Returns:
        out: [num_tokens, num_heads, width], the dtype to which the two outputs promote; 0 where
            neither part has keys.
        lse: Log-sum-exp of all keys, [num_tokens, num_heads], float32, in the base of the inputs;
            -inf where neither part has keys.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, or an unknown base.
        TypeError: a dtype other than those above.

    Compile: decomposes to one pointwise kernel; dynamic in num_tokens; CUDA graphs and export: yes.

    Source: vLLM 0.22 ``merge_attn_states``.

    Example:
        >>> import math, torch, dsv4_ops
        >>> out, lse = torch.tensor([[[1.0]]]), torch.tensor([[0.0]])
        >>> merged = dsv4_ops.merge_attn_states(out, lse, out * 5, lse + math.log(3))
        >>> merged.out, merged.lse  # (1 + 3 * 5) / 4, and ln 4
        (tensor([[[4.0000]]]), tensor([[1.3863]]))
    """
    checks = Checks("merge_attn_states")
    checks.one_of("lse_base", lse_base, *LSE_BASES, belongs_to="the log-sum-exps have")
    sides = ("prefix", prefix_out, prefix_lse), ("suffix", suffix_out, suffix_lse)
    for side, out, lse in sides:
        checks.tensor(f"{side}_out", out, MERGED_DTYPES, "num_tokens", "num_heads", "width")
        checks.tensor(f"{side}_lse", lse, torch.float32, "num_tokens", "num_heads")
    return MergedStates(
        *_merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse, lse_base=lse_base)
    )


_merge_states = define_op(
    "mla_context",
    "merge_states(Tensor outs, Tensor lses, *, str lse_base) -> (Tensor out, Tensor lse)",
    dynamic=("num_parts", "num_tokens"),
    source="FlashInfer merge_states; parts without keys never count",
)


def merge_states(outs: Tensor, lses: Tensor, *, lse_base: str = "e") -> MergedStates:
    """Merge attention over any number of parts of the keys.

    Args:
        outs: Output over each part, [num_parts, num_tokens, num_heads, width], bfloat16, float16 or
            float32; any strides.
        lses: Log-sum-exp of each part, [num_parts, num_tokens, num_heads], float32. A part whose
            log-sum-exp is -inf, +inf or NaN has no keys, and its output may have any value.
        lse_base: Base of the log-sum-exps, "e" or "2".

    Returns:
        out: [num_tokens, num_heads, width], the dtype of ``outs``; 0 where no part has keys.
        lse: Log-sum-exp of all keys, [num_tokens, num_heads], float32, in the base of the inputs;
            -inf where no part has keys.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, no part, several devices, or an unknown base.
        TypeError: a dtype other than those above.

    Compile: decomposes to reductions over the parts; dynamic in num_parts and num_tokens; CUDA
        graphs and export: yes.

    Source: FlashInfer ``merge_states``, which has the parts in the second dimension and base 2.

    Example:
        >>> import torch, dsv4_ops
        >>> outs = torch.tensor([8.0, 0.0, 2.0]).view(3, 1, 1, 1)
        >>> lses = torch.tensor([1.0, 3.0, 4.0]).log().view(3, 1, 1)
        >>> dsv4_ops.merge_states(outs, lses)  # (8 + 0 + 8) / 8, and ln 8
        MergedStates(out=tensor([[[2.]]]), lse=tensor([[2.0794]]))
    """
    checks = Checks("merge_states")
    checks.one_of("lse_base", lse_base, *LSE_BASES, belongs_to="the log-sum-exps have")
    checks.tensor("outs", outs, MERGED_DTYPES, "num_parts", "num_tokens", "num_heads", "width")
    checks.tensor("lses", lses, torch.float32, "num_parts", "num_tokens", "num_heads")
    checks.at_least(1, num_parts=outs.shape[0])
    return MergedStates(*_merge_states(outs, lses, lse_base=lse_base))


PREFILL_PROVIDERS = ("triton", "reference")

_mla_prefill = define_op(
    "mla_context",
    "mla_prefill(Tensor q, Tensor k_nope, Tensor k_pe, Tensor v, "
    "Tensor query_start_loc, Tensor cu_seq_lens, *, float softmax_scale, bool causal, "
    'str impl="auto") -> (Tensor out, Tensor lse)',
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens", "num_k", "num_reqs"),
    source="FlashAttention flash_attn_varlen_func as vLLM 0.22 calls it for MLA's prefill; lse "
    "of no key is -inf here",
    providers=PREFILL_PROVIDERS,
)


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    cu_seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    impl: str = "auto",
) -> MlaAttention:
    """Attend to expanded keys and values of ragged requests.

    For the new tokens of a step, pass ``causal=True``, with ``query_start_loc`` as ``cu_seq_lens``.
    For a chunk of the context, pass ``causal=False``, with a row of ``context_chunks``. Merge the
    results with ``merge_attn_states``.

    Args:
        q: Queries, [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], bfloat16, float16
            or float32.
        k_nope: Parts of the keys without RoPE, [num_k, num_heads, qk_nope_head_dim], the dtype of
            q. ``k_nope`` and ``v`` may be views of one tensor.
        k_pe: Rotated parts of the keys, which all heads share, [num_k, qk_rope_head_dim], the dtype
            of q.
        v: Values, [num_k, num_heads, v_head_dim], the dtype of q.
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing. Tokens outside all requests see no key. If the values decrease,
            results are undefined, but every row is written.
        cu_seq_lens: First key of every request and one past the last key, [num_reqs + 1], int32.
            Keys outside all requests may have any value.
        softmax_scale: Scale of q . k.
        causal: Whether the last query of a request sees all of its keys, the query before it one
            key fewer, and so on. Otherwise each query sees all keys.
        impl: "triton" (our kernel, for bfloat16, float16 and at most 128 values each in ``k_nope``,
            ``k_pe`` and ``v``), or "reference" (the definition). "auto" runs our kernel, but the
            reference on a CPU and for calls that our kernel does not support.

    Returns:
        out: [num_tokens, num_heads, v_head_dim], the dtype of q; 0 if the token has no key.
        lse: Natural logarithm of the sum of exp(logit), [num_tokens, num_heads], float32; -inf if
            the token has no key.

        A NaN in a row of one request does not reach other requests.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, or more than 16383 requests.
        TypeError: a dtype other than those above, or a flag that is not a bool.
        NotImplementedError: ``impl`` does not support the call.
        ImportError, RuntimeError: ``impl`` is not available here; the message says why.

    Compile: our Triton kernel in the graph; on the CPU the flash attention of
        ``scaled_dot_product_attention``, with a mask of num_tokens * num_k numbers; dynamic in
        num_tokens, num_k and num_reqs; CUDA graphs and export: yes.

    Source: FlashAttention ``flash_attn_varlen_func``.

    Example:
        >>> import math, torch, dsv4_ops
        >>> q = torch.tensor([[[1.0, 0.0]], [[0.0, math.log(3)]]])
        >>> k_nope, k_pe = torch.zeros(2, 1, 1), torch.tensor([[0.0], [1.0]])
        >>> v, start_loc = torch.tensor([[[1.0]], [[5.0]]]), torch.tensor([0, 2]).int()
        >>> found = dsv4_ops.mla_prefill(
        ...     q, k_nope, k_pe, v, start_loc, start_loc, softmax_scale=1.0, causal=True
        ... )
        >>> found.out.flatten(), found.lse.flatten()  # weights 1, and then 1/4 and 3/4
        (tensor([1.0000, 4.0000]), tensor([0.0000, 1.3863]))
    """
    checks = Checks("mla_prefill")
    checks.above(0, softmax_scale=softmax_scale)
    checks.flag("causal", causal)
    checks.tensor("q", q, MERGED_DTYPES, "num_tokens", "num_heads", "qk_head_dim")
    checks.tensor("k_nope", k_nope, q.dtype, "num_k", "num_heads", "qk_nope_head_dim")
    checks.tensor("k_pe", k_pe, q.dtype, "num_k", "qk_rope_head_dim")
    checks.tensor("v", v, q.dtype, "num_k", "num_heads", "v_head_dim")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.tensor("cu_seq_lens", cu_seq_lens, torch.int32, "num_reqs + 1")
    checks.request_limit()
    width = plain_int(k_nope.shape[2]) + plain_int(k_pe.shape[1])
    if plain_int(q.shape[2]) != width:
        raise checks.error(
            "q",
            must=f"have qk_nope_head_dim + qk_rope_head_dim = {width} columns",
            got=plain_int(q.shape[2]),
            do="Pass [nope | rope] of each head",
        )
    check_impl(checks.op, PREFILL_PROVIDERS, impl, q.device, {"q": q, "k_nope": k_nope, "v": v})
    tensors = (q, k_nope, k_pe, v, query_start_loc, cu_seq_lens)
    settings = {"softmax_scale": softmax_scale, "causal": causal, "impl": impl}
    return MlaAttention(*_mla_prefill(*tensors, **settings))


def _check_plan(
    checks: Checks,
    workspace_rows: int,
    chunk_plan: str,
    block_size: int,
    cp_world_size: int,
    cp_interleave: int,
) -> None:
    checks.one_of("chunk_plan", chunk_plan, *_PLANS, belongs_to="the chunks are read by")
    checks.at_least(1, block_size=block_size, workspace_rows=workspace_rows)
    checks.at_least(1, cp_world_size=cp_world_size, cp_interleave=cp_interleave)
    least = cp_world_size * reference.local_turn(cp_world_size, cp_interleave)
    if workspace_rows < least:
        raise checks.error(
            "workspace_rows",
            must=f"be at least cp_world_size * cp_interleave = {plain_int(least)}",
            got=plain_int(workspace_rows),
            do="Raise it, or lower cp_interleave",
        )


def _equal_size(checks: Checks, rows: int, num_reqs: int, block_size: int, round_: int) -> int:
    """Return the number of positions of every request in a chunk of an "equal" plan: a multiple of
    the block size and of ``round_``, the number of positions in which every rank has one turn."""
    align = math.lcm(block_size, round_)
    least = align * max(num_reqs, 1)
    if rows < least:
        raise checks.error(
            "workspace_rows",
            must=f"be at least {least} for an equal plan of {num_reqs} contexts",
            got=rows,
            do="Raise it, or pass chunk_plan='packed'",
        )
    return rows // max(num_reqs, 1) // align * align

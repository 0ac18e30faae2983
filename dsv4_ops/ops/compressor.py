"""The KV compressor: save states, compress windows, or do both in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.dispatch.define import define_op

_save_compressor_states = define_op(
    "compressor",
    "save_compressor_states(Tensor kv_score, Tensor ape, Tensor(a!) states, Tensor "
    "slot_mapping, Tensor positions, *, int compress_ratio, int block_size) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_state_blocks"),
    source="vLLM 0.33 save_partial_states",
)


def save_compressor_states(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> None:
    """Save the compressor's projections of every token.

    A later step reads these states when it finishes the token's window.

    Args:
        kv_score: Projections of every token, [num_tokens, 2 * width], float32, any strides: kv,
            then score. width is head_dim, or 2 * head_dim for an overlapping compressor.
        ape: Position bias of the scores, [compress_ratio, width], float32.
        states: Paged states, [num_state_blocks, page_bytes / 4], float32, from
            ``StateLayout(block_size, 2 * width).allocate``. Blocks must start at multiples of 16
            bytes and may have gaps between them.
        slot_mapping: Slot of every token in the states, block * block_size + row, [num_tokens],
            int64. Tokens whose slot is below 0 or past the last block are skipped.
        positions: Absolute position of every token, [num_tokens], int64. Tokens at positions below
            0 are skipped.
        compress_ratio: Tokens per window, 4 or 128. At least 1.
        block_size: Rows per block: 4 for C4, 8 for C128. At least 1.

    Returns:
        Nothing.

    Mutates: ``states``: writes the row [kv | score + ape[position % compress_ratio]] to the slot of
        every token, and no other value. kv is copied bit for bit. If two tokens share a slot, the
        slot may hold a mix of their values.

    Raises:
        ValueError: shapes that disagree, states that are not of this layout, sizes below 1, or
            several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of the states; on CUDA our Triton kernel runs, both in
        graphs and in AOTInductor packages; on a CPU, Inductor generates a scatter; dynamic in
        num_tokens and num_state_blocks; CUDA graphs and export: yes. For CUDA graphs, keep the
        states in a ``KVCacheBuffers`` or mark them with ``dsv4_ops.attention.caches.mark_static``.

    Source: vLLM 0.33 ``save_partial_states``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import StateLayout
        >>> layout = StateLayout(block_size=4, width=4)
        >>> states = layout.allocate(num_blocks=2)
        >>> kv_score = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> ape = torch.tensor([[0.0, 0.0], [0.5, -0.5]])
        >>> dsv4_ops.save_compressor_states(
        ...     kv_score, ape, states, torch.tensor([5]), torch.tensor([9]), compress_ratio=2,
        ...     block_size=4
        ... )
        >>> layout.rows(states)[1, 1].tolist()
        [1.0, 2.0, 3.5, 3.5]
    """
    settings = {"compress_ratio": compress_ratio, "block_size": block_size}
    checks = Checks("save_compressor_states")
    checks.at_least(1, compress_ratio=compress_ratio, block_size=block_size)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    checks.tensor("positions", positions, torch.int64, "num_tokens")
    checks.tensor("ape", ape, torch.float32, compress_ratio, "width")
    width = int(checks.sizes["width"])  # a configured size: a constant in compiled code
    checks.tensor("kv_score", kv_score, torch.float32, "num_tokens", 2 * width)
    checks.pages(
        "states", states, StateLayout(block_size, 2 * width), ("num_state_blocks", "state_values")
    )
    _save_compressor_states(kv_score, ape, states, slot_mapping, positions, **settings)


DIMENSIONS = (
    "num_tokens",
    "num_reqs",
    "max_state_blocks",
    "num_state_blocks",
    "num_blocks",
    "num_positions",
)
"""Sizes that may be dynamic in compiled calls of the ops that compress windows."""

_compress_and_insert = define_op(
    "compressor",
    "compress_and_insert(Tensor kv_score, Tensor ape, Tensor states, Tensor "
    "state_block_table, Tensor positions, Tensor req_indices, Tensor norm_weight, "
    "Tensor cos_sin_cache, Tensor(a!) k_cache, Tensor slot_mapping, *, int "
    "compress_ratio, bool overlap, float eps, int state_block_size, int block_size,"
    " str layout) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=DIMENSIONS,
    source="vLLM 0.33 compress, norm, RoPE and store kernels; order of writes made irrelevant",
)


def compress_and_insert(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str = MainLayout.tag,
) -> None:
    """Write the compressed key of every window that a token of this step finishes.

    The token at position p finishes window p // compress_ratio when (p + 1) % compress_ratio is 0.
    The window's key is the sum of its kv rows, weighted per channel by the softmax of the scores.
    RMSNorm and RoPE at the window's first position are then applied to the key. An overlapping
    compressor also sums over the previous window: it takes the left head_dim channels of kv and
    score from the previous window, and the right head_dim channels from the finished window.

    Args:
        kv_score: Projections of every token, [num_tokens, 2 * width], float32, as for
            ``save_compressor_states``. width is head_dim, or 2 * head_dim with ``overlap``.
        ape: Position bias of the scores, [compress_ratio, width], float32.
        states: Paged states, [num_state_blocks, page_bytes / 4], float32, from
            ``StateLayout(state_block_size, 2 * width).allocate``. Not written here.
        state_block_table: Physical block of states for every logical block of state_block_size
            positions, [num_reqs, max_state_blocks], int32, any strides.
        positions: Absolute position of every token, [num_tokens], int64; values outside 0..2**31-2
            mark padding.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        norm_weight: Weight of the RMSNorm, [head_dim], float32. head_dim is 512 for "v4_fp8", 128
            for "v4_indexer_fp8", and the width of a plain cache.
        cos_sin_cache: Cosines and sines of every position, [num_positions, rope_dim], float32. They
            rotate interleaved pairs in the last rope_dim values of a key. Windows past the end of
            the table are not rotated.
        k_cache: "v4_fp8" and "v4_indexer_fp8": [num_blocks, page_bytes], uint8. "plain":
            [num_blocks, block_size, head_dim], bfloat16 or float32, with dense rows.
        slot_mapping: Slot of the row that each token finishes, from ``compressed_slot_mapping``,
            [num_tokens], int64. Tokens that finish no row, and tokens whose slot is below 0 or past
            the last block, are skipped.
        compress_ratio: Tokens per window, 4 or 128. At least 1.
        overlap: Whether windows overlap, so that a key also sums the previous window: True for C4,
            False for C128.
        eps: Added to the mean square in the RMSNorm. Above 0.
        state_block_size: Rows per block of the states: 4 for C4, 8 for C128. At least 1.
        block_size: Rows per block of ``k_cache``: 64 for C4, 2 for C128. At least 1.
        layout: Tag of the cache's layout, "v4_fp8", "v4_indexer_fp8" or "plain".

    Returns:
        Nothing.

    Mutates: ``k_cache``: only the bytes of the slots that the call writes. Arithmetic is float32.
        The FP8 layouts round the row to bfloat16 and store it like ``quantize_and_insert_k_cache``
        or ``quantize_and_insert_indexer_k``. A window also needs the projections of earlier
        positions. For a token at position p, the projections of position p - n come from
        ``kv_score`` if the request's token at that position is n rows earlier in the batch, and
        from ``states`` otherwise. So this op may run before or after ``save_compressor_states``.
        Positions before 0 or on absent blocks get no weight. States that no window needs are not
        read, so NaN values in them do not matter. If two tokens share a slot, the slot may hold a
        mix of their bytes.

    Raises:
        ValueError: shapes that disagree, states or a cache that are not of their layout, sizes
            below 1, ``eps`` not above 0, an unknown layout, or several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of the cache; on CUDA our Triton kernel runs, both in
        graphs and in AOTInductor packages, and its work grows with the number of finished windows;
        on a CPU, Inductor generates reductions and scatters, with scratch memory for one window per
        token; dynamic in num_tokens, num_reqs, max_state_blocks, num_state_blocks, num_blocks and
        num_positions; CUDA graphs and export: yes. Implementations agree within float32 rounding,
        so an FP8 code may differ by one step.

    Source: vLLM 0.33's fused compressor kernels; DeepSeek-V4's compressor.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout, StateLayout
        >>> kv_score = torch.tensor([[1.0, 3.0, 0.0, 0.0], [3.0, 5.0, 0.0, 0.0]])
        >>> k_cache = PlainLayout(block_size=2, width=2, dtype=torch.float32).allocate(1)
        >>> req_indices = torch.tensor([0, 0], dtype=torch.int32)
        >>> dsv4_ops.compress_and_insert(
        ...     kv_score, torch.zeros(2, 2), StateLayout(2, 4).allocate(1),
        ...     torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, 1]), req_indices,
        ...     torch.ones(2), torch.tensor([[1.0, 0.0]]), k_cache, torch.tensor([-1, 1]),
        ...     compress_ratio=2, overlap=False, eps=1e-6, state_block_size=2, block_size=2,
        ...     layout="plain"
        ... )
        >>> k_cache[0, 1]  # (2, 4) over the root of its mean square, 10
        tensor([0.6325, 1.2649])
    """
    source = (kv_score, ape, states, state_block_table)
    norm = (norm_weight, cos_sin_cache)
    tensors = (*source, positions, req_indices, *norm, k_cache, slot_mapping)
    settings: dict[str, Any] = {"compress_ratio": compress_ratio, "overlap": overlap, "eps": eps}
    settings |= {"state_block_size": state_block_size, "block_size": block_size, "layout": layout}
    check_compress("compress_and_insert", *tensors, **settings)
    _compress_and_insert(*tensors, **settings)


def check_compress(
    op: str,
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str,
) -> Checks:
    """Check a call of ``compress_and_insert``, or of an op that does the same work and more."""
    checks = Checks(op)
    checks.at_least(
        1, compress_ratio=compress_ratio, state_block_size=state_block_size, block_size=block_size
    )
    checks.flag("overlap", overlap)
    checks.above(0, eps=eps)
    checks.one_of("layout", layout, MainLayout.tag, IndexerLayout.tag, PlainLayout.tag)
    check_tokens(checks, positions, req_indices, slot_mapping, state_block_table)
    head_dim = _check_cache(checks, k_cache, block_size, layout)
    checks.tensor("norm_weight", norm_weight, torch.float32, head_dim)
    checks.tensor("cos_sin_cache", cos_sin_cache, torch.float32, "num_positions", "rope_dim")
    checks.even("cos_sin_cache", cos_sin_cache, "head_dim", head_dim)
    if int(cos_sin_cache.shape[1]) > 0 and head_dim % 2 != 0:
        raise ValueError(
            f"{op}: norm_weight must have an even size where rows are rotated, got {head_dim}. "
            "Pass a cos_sin_cache without columns, or rows of whole pairs."
        )
    width = 2 * head_dim if overlap else head_dim
    check_states(checks, kv_score, ape, states, (compress_ratio, width, state_block_size))
    return checks


def check_tokens(
    checks: Checks,
    positions: Tensor,
    req_indices: Tensor,
    slot_mapping: Tensor,
    state_block_table: Tensor,
) -> None:
    """Check the tensors that locate the rows of a step."""
    checks.tokens(positions, req_indices)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    checks.tensor(
        "state_block_table", state_block_table, torch.int32, "num_reqs", "max_state_blocks"
    )


def check_states(
    checks: Checks,
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    sizes: tuple[int, int, int],
    prefix: str = "",
) -> None:
    """Check the projections of a compressor and its states.

    ``sizes`` are (compress_ratio, width, state_block_size); ``prefix`` starts the names of the
    arguments."""
    compress_ratio, width, state_block_size = sizes
    checks.tensor(f"{prefix}ape", ape, torch.float32, compress_ratio, width)
    checks.tensor(f"{prefix}kv_score", kv_score, torch.float32, "num_tokens", 2 * width)
    layout = StateLayout(state_block_size, 2 * width)
    dims = (f"num_{prefix}state_blocks", f"{prefix}state_values")
    checks.pages(f"{prefix}states", states, layout, dims, "state_block_size")


def _check_cache(checks: Checks, k_cache: Tensor, block_size: int, layout: str) -> int:
    """Check the cache and return its head_dim."""
    if layout == PlainLayout.tag:
        checks.rows("k_cache", k_cache, block_size)
        checks.apart("k_cache", k_cache)
        return int(k_cache.shape[2])  # a configured size: a constant in compiled code
    kind = MainLayout if layout == MainLayout.tag else IndexerLayout
    checks.pages("k_cache", k_cache, kind(block_size))
    return int(kind.head_dim)


_save_and_compress = define_op(
    "compressor",
    "save_and_compress(Tensor kv_score, Tensor ape, Tensor(a!) states, Tensor "
    "state_block_table, Tensor state_slot_mapping, Tensor positions, Tensor "
    "req_indices, Tensor norm_weight, Tensor cos_sin_cache, Tensor(b!) k_cache, "
    "Tensor slot_mapping, *, int compress_ratio, bool overlap, float eps, int "
    "state_block_size, int block_size, str layout, bool save_first=False) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=DIMENSIONS,
    source="save_compressor_states and compress_and_insert with a launch less",
)


def save_and_compress(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
    overlap: bool,
    eps: float,
    state_block_size: int,
    block_size: int,
    layout: str = MainLayout.tag,
    save_first: bool = False,
) -> None:
    """Run ``save_compressor_states`` and ``compress_and_insert`` at once.

    Without ``save_first``, one call launches one kernel fewer than the two ops. Inputs that both
    ops need are read from memory only once if they fit into the GPU's L2 cache. With
    ``save_first``, the result is that of the two ops in this order.

    Args:
        kv_score: Projections of every token, [num_tokens, 2 * width], float32, as for
            ``save_compressor_states``. width is head_dim, or 2 * head_dim with ``overlap``.
        ape: Position bias of the scores, [compress_ratio, width], float32.
        states: Paged states, [num_state_blocks, page_bytes / 4], float32, from
            ``StateLayout(state_block_size, 2 * width).allocate``.
        state_block_table: Physical block of states for every logical block of state_block_size
            positions, [num_reqs, max_state_blocks], int32, any strides.
        state_slot_mapping: Slot of every token's own row in ``states``, block * state_block_size +
            row, [num_tokens], int64. States with a slot below 0 or past the last block are not
            saved.
        positions: Absolute position of every token, [num_tokens], int64. Tokens at positions
            outside 0..2**31-2 are padding and finish no window. States at positions below 0 are not
            saved.
        req_indices: Request of every token, [num_tokens], int32. Tokens whose request is outside
            0..num_reqs-1 finish no window.
        norm_weight: Weight of the RMSNorm, [head_dim], float32.
        cos_sin_cache: Cosines and sines of every position, [num_positions, rope_dim], float32.
        k_cache: "v4_fp8" and "v4_indexer_fp8": [num_blocks, page_bytes], uint8. "plain":
            [num_blocks, block_size, head_dim], bfloat16 or float32, with dense rows.
        slot_mapping: Slot of the row that each token finishes, from ``compressed_slot_mapping``,
            [num_tokens], int64.
        compress_ratio: Tokens per window, 4 or 128. At least 1.
        overlap: Whether windows overlap, so that a key also sums the previous window: True for C4,
            False for C128.
        eps: Added to the mean square in the RMSNorm. Above 0.
        state_block_size: Rows per block of the states: 4 for C4, 8 for C128. At least 1.
        block_size: Rows per block of ``k_cache``: 64 for C4, 2 for C128. At least 1.
        layout: Tag of the cache's layout, "v4_fp8", "v4_indexer_fp8" or "plain".
        save_first: Whether all states are saved before any window is read. A request then sees the
            states that another request of the call saves to a shared block, as with a prefix cache.
            If no requests share blocks, results are bit-identical with and without ``save_first``.

    Returns:
        Nothing.

    Mutates: ``states``, as ``save_compressor_states`` does, and ``k_cache``, as
        ``compress_and_insert`` does. Without ``save_first``, states and cache are written in no
        fixed order: a window may read a slot before or after this call writes it. If a request
        reuses its state blocks as a ring, and the ring cannot hold a step and the window before it,
        this call overwrites states that a window needs. In this case, call ``compress_and_insert``
        first, then ``save_compressor_states``.

    Raises:
        ValueError: as ``compress_and_insert``, or a state_slot_mapping of another shape.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of states or cache; on CUDA our Triton kernels run,
        both in graphs and in AOTInductor packages: one for windows of up to 32 rows, two for longer
        windows, and one more with ``save_first``; on a CPU, the code of the two ops; dynamic in
        num_tokens, num_reqs, max_state_blocks, num_state_blocks, num_blocks and num_positions; CUDA
        graphs and export: yes. Implementations agree bit for bit in the states, and within float32
        rounding in the rows.

    Source: the two ops; vLLM 0.33 runs them as separate kernels.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout, StateLayout
        >>> kv_score = torch.tensor([[1.0, 3.0, 0.0, 0.0], [3.0, 5.0, 0.0, 0.0]])
        >>> ape = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
        >>> layout = StateLayout(block_size=2, width=4)
        >>> states = layout.allocate(1)
        >>> k_cache = PlainLayout(block_size=2, width=2, dtype=torch.float32).allocate(1)
        >>> dsv4_ops.save_and_compress(
        ...     kv_score, ape, states, torch.tensor([[0]], dtype=torch.int32),
        ...     torch.tensor([-1, 1]), torch.tensor([0, 1]), torch.tensor([0, 0]).int(),
        ...     torch.ones(2), torch.tensor([[1.0, 0.0]]), k_cache, torch.tensor([-1, 1]),
        ...     compress_ratio=2, overlap=False, eps=1e-6, state_block_size=2, block_size=2,
        ...     layout="plain"
        ... )
        >>> layout.rows(states)[0].tolist()
        [[0.0, 0.0, 0.0, 0.0], [3.0, 5.0, 0.5, 0.5]]
        >>> k_cache[0, 1]  # (2, 4) over the root of its mean square, 10
        tensor([0.6325, 1.2649])
    """
    source = (kv_score, ape, states, state_block_table)
    rest = (positions, req_indices, norm_weight, cos_sin_cache, k_cache, slot_mapping)
    settings: dict[str, Any] = {"compress_ratio": compress_ratio, "overlap": overlap, "eps": eps}
    settings |= {"state_block_size": state_block_size, "block_size": block_size, "layout": layout}
    checks = check_compress("save_and_compress", *source, *rest, **settings)
    checks.tensor("state_slot_mapping", state_slot_mapping, torch.int64, "num_tokens")
    checks.flag("save_first", save_first)
    _save_and_compress(*source, state_slot_mapping, *rest, **settings, save_first=save_first)

"""A whole step of the KV compressor: states of its tokens, keys of the windows that they finish."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.types import CompressorStep
from dsv4_ops.meta import compressor_step as meta
from dsv4_ops.ops.compressor import DIMENSIONS, check_compress
from dsv4_ops.reference import compressor_step as reference

_SCHEMA = (
    "(Tensor kv_score, Tensor ape, Tensor{} states, Tensor state_block_table, "
    "Tensor state_slot_mapping, Tensor positions, Tensor req_indices, Tensor norm_weight, "
    "Tensor cos_sin_cache, Tensor{} k_cache, Tensor slot_mapping, *, int compress_ratio, "
    "bool overlap, float eps, int state_block_size, int block_size, str layout) -> {}"
)

_save_and_compress = define_op(
    OpSpec(
        stem="compressor_step",
        schema="save_and_compress" + _SCHEMA.format("(a!)", "(b!)", "()"),
        meta=meta.save_and_compress,
        reference=reference.save_and_compress,
        lowering={"cpu": "decompose", "cuda": "triton"},
        dynamic=DIMENSIONS,
        source="save_compressor_states and compress_and_insert with a launch less",
        providers=("triton", "reference"),
    )
)
_save_and_compress_functional = define_op(
    OpSpec(
        stem="compressor_step",
        schema="save_and_compress_functional" + _SCHEMA.format("", "", "(Tensor, Tensor)"),
        meta=meta.save_and_compress_functional,
        reference=reference.save_and_compress_functional,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=DIMENSIONS,
        source="save_compressor_states and compress_and_insert with a launch less",
    )
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
) -> None:
    """``save_compressor_states`` and ``compress_and_insert`` of one step, with one kernel less;
    what both read comes from memory once, as long as it fits into the GPU's cache.

    Args:
        kv_score: Projections of every token, [num_tokens, 2 * width], float32, as for
            ``save_compressor_states``. width is head_dim, or 2 * head_dim with ``overlap``.
        ape: Position bias of the scores, [compress_ratio, width], float32.
        states: Paged states, [num_state_blocks, page_bytes / 4], float32, from
            ``StateLayout(state_block_size, 2 * width).allocate``.
        state_block_table: Page of the states of every logical block of state_block_size positions,
            [num_reqs, max_state_blocks], int32, any strides.
        state_slot_mapping: Slot of every token's own row in ``states``, page * state_block_size +
            row, [num_tokens], int64. Slots below 0 and past the last page are not saved.
        positions: Absolute position of every token, [num_tokens], int64; outside 0..2**31-2 means
            padding, of which no window is finished; below 0 no state is saved either.
        req_indices: Request of every token, [num_tokens], int32; outside 0..num_reqs-1 none of its
            windows is finished.
        norm_weight: Weight of the RMSNorm, [head_dim], float32.
        cos_sin_cache: Cosines and sines of every position, [num_positions, rope_dim], float32.
        k_cache: "v4_fp8" and "v4_indexer_fp8": [num_blocks, page_bytes], uint8. "plain":
            [num_blocks, block_size, head_dim], bfloat16 or float32, with dense rows.
        slot_mapping: Slot of the row that every token finishes, from ``compressed_slot_mapping``,
            [num_tokens], int64.
        compress_ratio: Tokens per window, 4 or 128. At least 1.
        overlap: Whether the window before counts too: True for C4, False for C128.
        eps: Added to the mean square in the RMSNorm. Above 0.
        state_block_size: Rows per page of the states: 4 for C4, 8 for C128. At least 1.
        block_size: Rows per page of ``k_cache``: 64 for C4, 2 for C128. At least 1.
        layout: Tag of the cache's layout, "v4_fp8", "v4_indexer_fp8" or "plain".

    Returns:
        Nothing.

    Mutates: ``states`` as ``save_compressor_states`` does, and ``k_cache`` as
        ``compress_and_insert`` does. Both at once: where a window reads the state of an earlier
        step from a slot that a token of this step writes (a ring that is too short for a step
        and a window before it), it reads values of either of them. There call
        ``compress_and_insert`` first and ``save_compressor_states`` behind it.

    Raises:
        ValueError: as ``compress_and_insert``, or a state_slot_mapping of another shape.
        TypeError: a dtype other than the ones above.

    Compile: in place, never a copy of states or cache; on CUDA our Triton kernels in the graph and
        in AOTInductor packages, one for windows of up to 32 rows and two for longer ones; on CPU
        the code of both ops; dynamic in num_tokens, num_reqs, max_state_blocks, num_state_blocks,
        num_blocks and num_positions; CUDA graphs and export: yes. States are equal bit for bit
        between executions, rows within float32 rounding.

    Source: both ops; vLLM 0.33 runs them as kernels of their own.

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
    tensors = (
        kv_score,
        ape,
        states,
        state_block_table,
        state_slot_mapping,
        positions,
        req_indices,
        norm_weight,
        cos_sin_cache,
        k_cache,
        slot_mapping,
    )
    settings: dict[str, Any] = {
        "compress_ratio": compress_ratio,
        "overlap": overlap,
        "eps": eps,
        "state_block_size": state_block_size,
        "block_size": block_size,
        "layout": layout,
    }
    _check_step("save_and_compress", *tensors, **settings)
    _save_and_compress(*tensors, **settings)


def save_and_compress_functional(
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
) -> CompressorStep:
    """``save_and_compress`` into copies of states and cache; for tests and for reading.

    Args:
        kv_score: As for ``save_and_compress``, as are the arguments below.
        ape: Position bias of the scores, [compress_ratio, width], float32.
        states: States to copy, [num_state_blocks, page_bytes / 4], float32.
        state_block_table: Page of every logical block of the states, [num_reqs, max_state_blocks],
            int32.
        state_slot_mapping: Slot of every token's own row in the states, [num_tokens], int64.
        positions: Absolute position of every token, [num_tokens], int64.
        req_indices: Request of every token, [num_tokens], int32.
        norm_weight: Weight of the RMSNorm, [head_dim], float32.
        cos_sin_cache: Cosines and sines of every position, [num_positions, rope_dim], float32.
        k_cache: Cache to copy, uint8, or bfloat16 or float32 of a plain one.
        slot_mapping: Slot of the row that every token finishes, [num_tokens], int64.
        compress_ratio: Tokens per window. At least 1.
        overlap: Whether the window before counts too.
        eps: Added to the mean square in the RMSNorm. Above 0.
        state_block_size: Rows per page of the states. At least 1.
        block_size: Rows per page of ``k_cache``. At least 1.
        layout: Tag of the cache's layout, "v4_fp8", "v4_indexer_fp8" or "plain".

    Returns:
        ``states`` and ``k_cache``, new and dense, of the shapes and dtypes of the arguments.

    Mutates: nothing.

    Raises:
        ValueError: as ``save_and_compress``.
        TypeError: as ``save_and_compress``.

    Compile: two copies and ``save_and_compress``, dynamic in the same sizes; CUDA graphs and
        export: yes.

    Source: as ``save_and_compress``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout, StateLayout
        >>> new = dsv4_ops.save_and_compress_functional(
        ...     torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.ones(1, 2),
        ...     StateLayout(1, 4).allocate(1), torch.tensor([[0]], dtype=torch.int32),
        ...     torch.tensor([0]), torch.tensor([0]), torch.tensor([0], dtype=torch.int32),
        ...     torch.ones(2), torch.zeros(0, 2), PlainLayout(1, 2, torch.float32).allocate(1),
        ...     torch.tensor([0]), compress_ratio=1, overlap=False, eps=1e-6, state_block_size=1,
        ...     block_size=1, layout="plain"
        ... )
        >>> new.states[0, :4].tolist(), new.k_cache
        ([3.0, 4.0, 1.0, 1.0], tensor([[[0.8485, 1.1314]]]))
    """
    tensors = (
        kv_score,
        ape,
        states,
        state_block_table,
        state_slot_mapping,
        positions,
        req_indices,
        norm_weight,
        cos_sin_cache,
        k_cache,
        slot_mapping,
    )
    settings: dict[str, Any] = {
        "compress_ratio": compress_ratio,
        "overlap": overlap,
        "eps": eps,
        "state_block_size": state_block_size,
        "block_size": block_size,
        "layout": layout,
    }
    _check_step("save_and_compress_functional", *tensors, **settings)
    return CompressorStep(*_save_and_compress_functional(*tensors, **settings))


def _check_step(
    op: str,
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    *others: Tensor,
    **settings: Any,
) -> None:
    checks = check_compress(op, kv_score, ape, states, state_block_table, *others, **settings)
    checks.tensor("state_slot_mapping", state_slot_mapping, torch.int64, "num_tokens")

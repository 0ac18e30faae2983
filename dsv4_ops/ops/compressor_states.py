"""States of the KV compressor: what the tokens of unfinished windows are projected to."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import StateLayout
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.meta import compressor_states as meta
from dsv4_ops.reference import compressor_states as reference

_SCHEMA = (
    "(Tensor kv_score, Tensor ape, Tensor{} states, Tensor slot_mapping, Tensor positions, *, "
    "int compress_ratio, int block_size) -> {}"
)

_save_compressor_states = define_op(
    OpSpec(
        stem="compressor_states",
        schema="save_compressor_states" + _SCHEMA.format("(a!)", "()"),
        meta=meta.save_compressor_states,
        reference=reference.save_compressor_states,
        lowering={"cpu": "decompose", "cuda": "triton"},
        dynamic=("num_tokens", "num_state_blocks"),
        source="vLLM 0.33 save_partial_states",
        providers=("triton", "reference"),
    )
)
_save_compressor_states_functional = define_op(
    OpSpec(
        stem="compressor_states",
        schema="save_compressor_states_functional" + _SCHEMA.format("", "Tensor"),
        meta=meta.save_compressor_states_functional,
        reference=reference.save_compressor_states_functional,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=("num_tokens", "num_state_blocks"),
        source="vLLM 0.33 save_partial_states",
    )
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
    """Keep what the compressor projects every token to, for the step that finishes its window.

    Args:
        kv_score: Projections of every token, [num_tokens, 2 * width], float32, any strides: kv,
            then score. width is head_dim, or 2 * head_dim for an overlapping compressor.
        ape: Position bias of the scores, [compress_ratio, width], float32.
        states: Paged states, [num_state_blocks, page_bytes / 4], float32, from
            ``StateLayout(block_size, 2 * width).allocate``. Pages may lie apart, at multiples of 16
            bytes.
        slot_mapping: Slot of every token in the states, page * block_size + row, [num_tokens],
            int64. Slots below 0 and past the last page are skipped.
        positions: Absolute position of every token, [num_tokens], int64; below 0 is skipped.
        compress_ratio: Tokens per window, 4 or 128. At least 1.
        block_size: Rows per page: 4 for C4, 8 for C128. At least 1.

    Returns:
        Nothing.

    Mutates: ``states``: of every slot that is written the row [kv | score + ape[position %
        compress_ratio]]; no other value. kv is copied bit for bit. If two tokens have one slot, its
        values are of either of them, not of one alone.

    Raises:
        ValueError: shapes that disagree, states that are not of this layout, sizes below 1, or
            several devices.
        TypeError: a dtype other than the ones above.

    Compile: in place, never a copy of the states; on CUDA our Triton kernel in the graph and in
        AOTInductor packages, on CPU a scatter of Inductor; dynamic in num_tokens and
        num_state_blocks; CUDA graphs and export: yes. Give CUDA graphs states in a
        ``PagedKVCache``, or mark them with ``dsv4_ops.cache.mark_static``.

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
    _check_save(
        "save_compressor_states", kv_score, ape, states, slot_mapping, positions, **settings
    )
    _save_compressor_states(kv_score, ape, states, slot_mapping, positions, **settings)


def save_compressor_states_functional(
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> Tensor:
    """``save_compressor_states`` into a copy of the states; for tests and for reading.

    Args:
        kv_score: As for ``save_compressor_states``, as are the arguments below.
        ape: Position bias of the scores, [compress_ratio, width], float32.
        states: States to copy, [num_state_blocks, page_bytes / 4], float32.
        slot_mapping: Slot of every token in the states, [num_tokens], int64.
        positions: Absolute position of every token, [num_tokens], int64.
        compress_ratio: Tokens per window. At least 1.
        block_size: Rows per page. At least 1.

    Returns:
        The new states, [num_state_blocks, page_bytes / 4], float32, dense.

    Mutates: nothing.

    Raises:
        ValueError: as ``save_compressor_states``.
        TypeError: as ``save_compressor_states``.

    Compile: a copy and ``save_compressor_states``; dynamic in num_tokens and num_state_blocks; CUDA
        graphs and export: yes.

    Source: vLLM 0.33 ``save_partial_states``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import StateLayout
        >>> states = StateLayout(block_size=1, width=2).allocate(num_blocks=1)
        >>> kv_score, ape = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.25]])
        >>> dsv4_ops.save_compressor_states_functional(
        ...     kv_score, ape, states, torch.tensor([0]), torch.tensor([3]), compress_ratio=1,
        ...     block_size=1
        ... )[0, :2]
        tensor([1.0000, 2.2500])
    """
    settings = {"compress_ratio": compress_ratio, "block_size": block_size}
    name = "save_compressor_states_functional"
    _check_save(name, kv_score, ape, states, slot_mapping, positions, **settings)
    written: Tensor = _save_compressor_states_functional(
        kv_score, ape, states, slot_mapping, positions, **settings
    )
    return written


def _check_save(
    op: str,
    kv_score: Tensor,
    ape: Tensor,
    states: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    compress_ratio: int,
    block_size: int,
) -> None:
    checks = Checks(op)
    checks.at_least(1, compress_ratio=compress_ratio, block_size=block_size)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    checks.tensor("positions", positions, torch.int64, "num_tokens")
    checks.tensor("ape", ape, torch.float32, compress_ratio, "width")
    width = int(checks.sizes["width"])  # configuration: a constant in compiled code
    checks.tensor("kv_score", kv_score, torch.float32, "num_tokens", 2 * width)
    checks.pages(
        "states", states, StateLayout(block_size, 2 * width), ("num_state_blocks", "state_values")
    )

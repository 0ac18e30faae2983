"""Lowerings of dense MLA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.torch_compat import symbols_in_sizes
from dsv4_ops.core.types import MlaAttention
from dsv4_ops.lowering.kinds import Choices
from dsv4_ops.reference import mla as reference


def _mla_decode(
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
    kv_lora_rank: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> MlaAttention:
    tensors = (q, kv_cache, seq_lens, req_indices, block_table)
    call, running = reference.start_decode(
        *tensors,
        (q_scale, kv_scale),
        softmax_scale=softmax_scale,
        block_size=block_size,
        kv_lora_rank=kv_lora_rank,
        layout=layout,
    )
    running = _attend(call, running, block_table.shape[1] * block_size)
    return reference.finish_decode(call, running, kv_scale)


def _mla_sparse(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> MlaAttention:
    call, running = reference.start_sparse(
        *(q, kv_cache, indices, lens),
        softmax_scale=softmax_scale,
        block_size=block_size,
        kv_lora_rank=kv_lora_rank,
        layout=layout,
    )
    return reference.finish_decode(call, _attend(call, running, indices.shape[1]), None)


def _attend(call: reference.Decode, running: reference.Running, num_rows: int) -> reference.Running:
    if call.q.device.type == "cpu":
        return _attend_in_loop(call, running, num_rows)
    if isinstance(num_rows, int) and num_rows == 0:
        return running
    # no loop: its condition would synchronise with the host, and break CUDA graphs
    return reference.attend_to(call, running, 0, num_rows)


def _attend_in_loop(
    call: reference.Decode, running: reference.Running, num_rows: int
) -> reference.Running:
    """Loop over the keys, as many per iteration as in the reference, until the token with the most
    keys has attended to all of its keys.

    Memory does not depend on the block table's width, and time depends only on the number of keys
    that exist."""
    from dsv4_ops.lowering._compat import while_loop_op

    stop = pad(call.seq_lens, (0, 1)).amax().clamp(max=num_rows)
    tensors = {name: each for name, each in call._asdict().items() if isinstance(each, Tensor)}
    step = reference.KEYS_AT_A_TIME

    def is_left(start: Tensor, *rest: Tensor) -> Tensor:
        return start < rest[-1]

    def attend(start: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        named: dict[str, Any] = dict(zip(tensors, rest[len(running) :], strict=False))
        part = call._replace(**named)
        state = reference.attend_to(part, reference.Running(*rest[: len(running)]), start, step)
        return start + step, *state

    first = torch.zeros((), dtype=torch.int64, device=call.q.device)
    # Inductor cannot read a symbol from a size that is an expression, such as a sum
    sizes = symbols_in_sizes(*tensors.values())
    operands: Any = (first, *running), (*tensors.values(), *sizes, stop)
    states = while_loop_op(is_left, attend, *operands)
    return reference.Running(*states[1:])


mla_decode = Choices(_mla_decode)
mla_sparse = Choices(_mla_sparse)

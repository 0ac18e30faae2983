"""Launch Hopper's kernel over listed bf16 rows: a tensor, or a copy of rows of paged FP8 caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.tiles import head_tiles
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.arguments import strided
from dsv4_ops.kernels.calls import GatheredCall, empty_results
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.sparse_mla.hopper import support

Results = tuple[Tensor, Tensor, Tensor]
"""``out``, ``max_logits`` and ``lse``."""

_STRIDE_MULTIPLE = 16
"""Triton knows that a row is aligned to 16 bytes if its stride is a multiple of 16 values."""


def _results(*call: Any) -> Results:
    out, lse = empty_results(call[0])
    return out, torch.empty_like(lse), lse


def row_strides(values: Tensor) -> list[int]:
    """Return the strides of all dimensions but the last; 0 for dimensions of size 1."""
    sizes = zip(values.shape[:-1], values.stride()[:-1], strict=True)
    return [0 if isinstance(size, int) and size <= 1 else stride for size, stride in sizes]


def copied(launch: Launcher, values: Tensor) -> Tensor:
    """Return ``values``, or a copy if copies of 16 bytes cannot read them."""
    if values.stride(-1) != 1 or any(stride % _STRIDE_MULTIPLE for stride in row_strides(values)):
        values = values.contiguous()
    return values if launch.is_aligned(values) else values.clone()


def launch_gathered_keys(launch: Launcher, *args: Any, results: Results | None = None) -> Results:
    """Launch up to one program per SM; ``args`` are those of ``GatheredCall``."""
    call = GatheredCall(*args)
    attn_sink, num_tokens, num_heads = call.attn_sink, call.q.shape[0], int(call.q.shape[1])
    out, max_logits, lse = results = _results(*call) if results is None else results
    items = num_tokens * head_tiles(num_heads)
    if items == 0:
        return results
    q, kv = copied(launch, call.q), copied(launch, call.kv)
    launch(support.kernel("gathered"))[(torch.sym_min(items, launch.num_sms(q.device)),)](
        q, *row_strides(q),
        out, lse, max_logits, lse if attn_sink is None else attn_sink.contiguous(),
        kv, *row_strides(kv), kv.shape[0],
        *strided(call.indices, call.lens), call.indices.shape[1], num_tokens, num_heads,
        SOFTMAX_SCALE=float(call.softmax_scale), HAS_SINK=attn_sink is not None,
        num_warps=support.WARPS,
    )  # fmt: skip
    return results


def _call(*args: Any) -> Results:
    with torch.cuda.device_of(args[0]):
        return launch_gathered_keys(EAGER, *args)


hopper_gathered_keys = opaque_op.define(
    "_hopper_gathered_keys",
    f"({opaque_op.fields(GatheredCall)}) -> (Tensor, Tensor, Tensor)",
    _call,
    _results,
)

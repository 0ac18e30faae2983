"""Launch Hopper's kernel that attends to listed bf16 rows. The rows are the caller's tensor, or a
bf16 copy of FP8 rows of paged caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.tiles import head_tiles
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.arguments import copied, row_strides, strided
from dsv4_ops.kernels.common.attention.calls import GatheredCall, empty_results
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.kernels.sparse_mla.hopper.gathered_kernel import hopper_gathered_keys_kernel

Results = tuple[Tensor, Tensor, Tensor]
"""``out``, ``max_logits`` and ``lse``."""


def _results(*call: Any) -> Results:
    out, lse = empty_results(call[0])
    return out, torch.empty_like(lse), lse


def launch_gathered_keys(launch: Launcher, *args: Any, results: Results | None = None) -> Results:
    """Launch up to one program per SM; ``args`` are the fields of ``GatheredCall``."""
    call = GatheredCall(*args)
    attn_sink, num_tokens, num_heads = call.attn_sink, call.q.shape[0], int(call.q.shape[1])
    out, max_logits, lse = results = _results(*call) if results is None else results
    items = num_tokens * head_tiles(num_heads)
    if items == 0:
        return results
    q, kv = copied(launch, call.q), copied(launch, call.kv)
    launch(hopper_gathered_keys_kernel)[(torch.sym_min(items, launch.num_sms(q.device)),)](
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

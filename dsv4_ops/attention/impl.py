"""What runs those ops of a layer that have a choice."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.attention.tensors import LayerInputs
from dsv4_ops.core.choice import (
    AUTO,
    TRITON,
    check_device,
    check_impl,
    impl_for,
    not_ours,
    require,
)
from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES
from dsv4_ops.core.tiles import LARGEST_TOPK
from dsv4_ops.ops.indexer import PROVIDERS as INDEXER_PROVIDERS
from dsv4_ops.ops.sparse_mla import DECODE_PROVIDERS

_OP = "attention_layer"


def attender(spec: LayerSpec) -> str:
    """What attends, in the schedule "decode"."""
    return impl_for(DECODE_PROVIDERS, spec.impl)


def selector(spec: LayerSpec, q: Tensor) -> str:
    """What selects: where bits must not depend on the batch, nothing that its size decides."""
    fixed = spec.batch_invariant and spec.indexer_layout == IndexerLayout.tag
    if spec.impl == AUTO and fixed and q.device.type == "cuda":
        return TRITON
    return impl_for(INDEXER_PROVIDERS, spec.impl)


def check_layer_impl(spec: LayerSpec, kind: str, inputs: LayerInputs, schedule: str) -> None:
    """What the ops would refuse after others have written."""
    impl, q = spec.impl, inputs.q
    check_device(_OP, impl, q.device)
    if impl in LIBRARIES and not torch.compiler.is_compiling():  # a compiler asks before it runs
        require(_OP, impl)
    if impl == TRITON:
        _check_ours(spec, kind, schedule)
    elif impl == FLASH_MLA and schedule == "decode":
        taken = {"layout": spec.layout, "num_splits": 0, "batch_invariant": spec.batch_invariant}
        check_impl(_OP, DECODE_PROVIDERS, impl, q.device, {"q": q, **taken})
    elif impl == DEEP_GEMM and kind == "c4":
        taken = {"layout": spec.indexer_layout, "block_size": spec.page_size(kind)}
        indexer_q = cast(Tensor, inputs.indexer_q)
        check_impl(_OP, INDEXER_PROVIDERS, impl, q.device, {"q": indexer_q, **taken})


def _check_ours(spec: LayerSpec, kind: str, schedule: str) -> None:
    if kind == "c4" and spec.indexer_layout != IndexerLayout.tag:
        not_ours(_OP, TRITON, f"with indexer_layout {spec.indexer_layout!r}")
    if kind == "c4" and spec.attention.index_topk > LARGEST_TOPK:
        not_ours(_OP, TRITON, f"with index_topk above {LARGEST_TOPK}")
    sizes = (spec.dtype, spec.head_dim) == (torch.bfloat16, MainLayout.head_dim)
    if schedule == "decode" and spec.layout != MainLayout.tag and not sizes:
        not_ours(_OP, TRITON, f"with {spec.dtype} rows of {spec.head_dim} values")

"""What runs those ops of a layer that have a choice."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.attention.step import AttentionStep
from dsv4_ops.attention.tensors import LayerInputs
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.ints import known
from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import AUTO, TRITON
from dsv4_ops.core.tiles import (
    LARGEST_TOPK,
    METADATA_COLUMNS,
    PLAN_COLUMNS,
    PROGRAMS,
    is_metadata,
    programs_per_tile,
)
from dsv4_ops.dispatch.choice import check_device, check_impl, impl_for, not_ours, require
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES
from dsv4_ops.ops.indexer import PROVIDERS as INDEXER_PROVIDERS
from dsv4_ops.ops.sparse_mla import DECODE_PROVIDERS, PREFILL_PROVIDERS

_OP = "attention_layer"


def attender(spec: LayerSpec) -> str:
    """What attends, in the schedule "decode"."""
    return impl_for(DECODE_PROVIDERS, spec.impl)


def compressed_table(step: AttentionStep, kind: str) -> Tensor | None:
    """Pages of the compressed rows that such a layer attends to."""
    return {"c4": step.c4.block_table, "c128": step.c128.block_table}.get(kind)


def plan_of(spec: LayerSpec, step: AttentionStep, kind: str) -> Tensor | None:
    """The plan that such a layer goes by, in the schedule "decode": ours is of C128 layers only."""
    if kind == "c128":
        return step.c128.plan
    if spec.sm_parts == 0:
        return None
    return step.c4.plan if kind == "c4" else step.plan


def attender_of_many(spec: LayerSpec, q: Tensor) -> str:
    """What attends, in the schedule "prefill": as ``selector``."""
    return _fixed(spec, q, impl_for(PREFILL_PROVIDERS, spec.impl), spec.layout == MainLayout.tag)


def selector(spec: LayerSpec, q: Tensor) -> str:
    """What selects: where bits must not depend on the batch, nothing that its size decides."""
    has_choice = spec.indexer_layout == IndexerLayout.tag
    return _fixed(spec, q, impl_for(INDEXER_PROVIDERS, spec.impl), has_choice)


def _fixed(spec: LayerSpec, q: Tensor, impl: str, has_choice: bool) -> str:
    """``impl``, or ours where "auto" would choose by the size of the batch and must not."""
    chooses = impl == AUTO and has_choice and q.device.type == "cuda"
    return TRITON if chooses and spec.batch_invariant else impl


def check_layer_impl(
    spec: LayerSpec, kind: str, inputs: LayerInputs, step: AttentionStep, schedule: str
) -> None:
    """What the ops would refuse after others have written."""
    impl, q = spec.impl, inputs.q
    check_device(_OP, impl, q.device)
    if impl in LIBRARIES and not torch.compiler.is_compiling():  # a compiler asks before it runs
        require(_OP, impl)
    if impl == TRITON:
        _check_ours(spec, kind)
    elif impl == FLASH_MLA and schedule == "decode":
        taken = {"layout": spec.layout, "num_splits": 0, "batch_invariant": spec.batch_invariant}
        check_impl(_OP, DECODE_PROVIDERS, impl, q.device, {"q": q, **taken})
    elif impl == FLASH_MLA:
        _check_prefill(spec, kind, q, step)
    elif impl == DEEP_GEMM and kind == "c4":
        taken = {"layout": spec.indexer_layout, "block_size": spec.block_size(kind)}
        indexer_q = cast(Tensor, inputs.indexer_q)
        check_impl(_OP, INDEXER_PROVIDERS, impl, q.device, {"q": indexer_q, **taken})
        _check_schedule(spec, step)
    plan = plan_of(spec, step, kind)
    if schedule == "decode" and plan is not None:
        if spec.sm_parts:
            _check_metadata(spec, q, kind, plan)
        elif isinstance(plan, Tensor) and is_metadata(plan):
            name, advice = "step.c128.plan", "Build each step with the layer's own LayerSpec"
            raise refusal(ValueError, _OP, name, "be None without sm_parts", "metadata", advice)
        else:
            _check_plan(spec, q, plan)


def _check_schedule(spec: LayerSpec, step: AttentionStep) -> None:
    """It is for the SMs of the layer's own specification; each layer makes its own without one."""
    name, schedule, wanted = "step.c4.schedule", step.c4.schedule, spec.schedule_sms
    if schedule is None:
        return
    checks = Checks(_OP)
    checks.tensor(name, schedule, torch.int32, "num_sms + 1", 2)
    if schedule.shape[0] != wanted + 1:
        rule, advice = f"have {wanted + 1} rows", "Build each step with the layer's own LayerSpec"
        raise refusal(ValueError, _OP, name, rule, schedule.shape[0], advice)


def _check_plan(spec: LayerSpec, q: Tensor, plan: Tensor) -> None:
    """It is of a step of as many tokens and heads, and something goes by it. The op would take one
    for fewer tokens, whose last ones then have no programs."""
    name, num_tokens, num_heads = "step.c128.plan", q.shape[0], int(q.shape[1])
    ignored = f"for impl {FLASH_MLA!r}" if spec.impl == FLASH_MLA else ""
    ignored = "with batch_invariant" if spec.batch_invariant else ignored
    if ignored:
        advice = "Build the step with plan_heads=0"
        raise refusal(ValueError, _OP, name, f"be None {ignored}", "a tensor", advice)
    checks = Checks(_OP)
    checks.tensor("inputs.q", q, q.dtype, "num_tokens", "num_heads", "head_dim")
    checks.tensor(name, plan, torch.int32, "num_pieces", PLAN_COLUMNS)
    num_pieces = num_tokens + programs_per_tile(num_heads, PROGRAMS)
    if plan.shape[0] != num_pieces:
        rule = f"have {known(num_pieces)} rows for {known(num_tokens)} tokens of {num_heads} heads"
        advice = f"Build each step with plan_heads={num_heads}"
        raise refusal(ValueError, _OP, name, rule, known(plan.shape[0]), advice)


def _check_metadata(spec: LayerSpec, q: Tensor, kind: str, metadata: Tensor) -> None:
    """It is of a step of as many tokens, and of as many parts."""
    name = "step.plan" if kind == "window" else f"step.{kind}.plan"
    checks = Checks(_OP)
    checks.tensor(name, metadata, torch.int32, "num_rows", METADATA_COLUMNS)
    num_tokens = q.shape[0]
    num_rows = spec.sm_parts + num_tokens + 1
    if metadata.shape[0] != num_rows:
        rule = f"have {known(num_rows)} rows for {known(num_tokens)} tokens"
        advice = "Build each step with the layer's own LayerSpec"
        raise refusal(ValueError, _OP, name, rule, known(metadata.shape[0]), advice)


def _check_prefill(spec: LayerSpec, kind: str, q: Tensor, step: AttentionStep) -> None:
    taken = {
        "q": q,
        "layout": spec.layout,
        "swa_block_table": step.swa_block_table,
        "swa_block_size": spec.attention.swa_block_size,
        "extra_block_table": compressed_table(step, kind),
        "extra_block_size": 1 if kind == "window" else spec.block_size(kind),
    }
    check_impl("sparse_mla_prefill", PREFILL_PROVIDERS, FLASH_MLA, q.device, taken)


def _check_ours(spec: LayerSpec, kind: str) -> None:
    if kind == "c4" and spec.indexer_layout != IndexerLayout.tag:
        not_ours(_OP, TRITON, f"with indexer_layout {spec.indexer_layout!r}")
    if kind == "c4" and spec.attention.index_topk > LARGEST_TOPK:
        not_ours(_OP, TRITON, f"with index_topk above {LARGEST_TOPK}")
    sizes = (spec.dtype, spec.head_dim) == (torch.bfloat16, MainLayout.head_dim)
    if spec.layout != MainLayout.tag and not sizes:
        not_ours(_OP, TRITON, f"with {spec.dtype} rows of {spec.head_dim} values")

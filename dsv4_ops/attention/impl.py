"""Choose an implementation for each op of a layer, and check that the implementation supports the
layer."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dsv4_ops.attention.parallel import ContextParallel
from dsv4_ops.attention.spec import LayerSpec
from dsv4_ops.attention.step import AttentionStep
from dsv4_ops.attention.tensors import LayerCall
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, plain_int
from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.registry import AUTO, TRITON
from dsv4_ops.core.tiles import (
    METADATA_COLUMNS,
    PLAN_COLUMNS,
    PROGRAMS,
    programs_per_tile,
)
from dsv4_ops.dispatch.choice import check_device, check_impl, check_limit, impl_for, require
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES
from dsv4_ops.dispatch.limits import Sizes
from dsv4_ops.ops.indexer import PROVIDERS as INDEXER_PROVIDERS
from dsv4_ops.ops.sparse_mla import DECODE_PROVIDERS, PREFILL_PROVIDERS

_OP = "attention_layer"
_OWN_SPEC = "Build each step with the layer's own LayerSpec"


def decode_impl(spec: LayerSpec) -> str:
    """Return the implementation of attention under the schedule "decode"."""
    return impl_for(DECODE_PROVIDERS, spec.impl)


def compressed_table(step: AttentionStep, kind: str) -> Tensor | None:
    """Return the block table of compressed rows for layers of this kind, or None."""
    return {"c4": step.c4.block_table, "c128": step.c128.block_table}.get(kind)


def flash_mla_plan_of(step: AttentionStep, kind: str) -> Tensor | None:
    """Return FlashMLA's metadata for a layer under the schedule "decode", or None."""
    return {"c4": step.c4, "c128": step.c128}.get(kind, step).flash_mla_plan


def prefill_impl(spec: LayerSpec, q: Tensor) -> str:
    """Return the implementation of attention under the schedule "prefill"."""
    return _fixed(spec, q, impl_for(PREFILL_PROVIDERS, spec.impl), spec.layout == MainLayout.tag)


def indexer_impl(spec: LayerSpec, q: Tensor) -> str:
    """Return the implementation of the indexer's selection."""
    has_choice = spec.indexer_layout == IndexerLayout.tag
    return _fixed(spec, q, impl_for(INDEXER_PROVIDERS, spec.impl), has_choice)


def _fixed(spec: LayerSpec, q: Tensor, impl: str, has_choice: bool) -> str:
    """Return ``impl``, or "triton" if "auto" would choose by batch size but the spec is batch
    invariant."""
    by_size = impl == AUTO and has_choice and q.device.type == "cuda"
    return TRITON if by_size and spec.batch_invariant else impl


def check_layer_impl(layer: LayerCall, schedule: str) -> None:
    """Raise errors that an op would otherwise raise after another op has written to a cache."""
    spec, kind, inputs, _, _, step = layer
    impl, q = spec.impl, inputs.q
    parts = 1 if spec.ranks is None or kind == "window" else spec.ranks.head_parts
    if parts > 1:  # a view with the shape of the gathered queries
        q = q[:, :1].expand(-1, q.shape[1] * parts, -1)
    check_device(_OP, impl, q.device)
    if impl in LIBRARIES and not torch.compiler.is_compiling():  # else the lowering checks
        require(_OP, impl)
    if impl == TRITON:
        _check_ours(layer)
    elif impl == FLASH_MLA and schedule == "decode":
        arguments = {
            "layout": spec.layout,
            "num_splits": 0,
            "batch_invariant": spec.batch_invariant,
        }
        check_impl(_OP, DECODE_PROVIDERS, impl, q.device, {"q": q, **arguments})
    elif impl == FLASH_MLA:
        _check_prefill(spec, kind, q, step)
    elif impl == DEEP_GEMM and kind == "c4":
        arguments = {"layout": spec.indexer_layout, "block_size": spec.block_size(kind)}
        indexer_q = cast(Tensor, inputs.indexer_q)
        check_impl(_OP, INDEXER_PROVIDERS, impl, q.device, {"q": indexer_q, **arguments})
        _check_schedule(spec, step)
    if schedule == "decode":
        _check_plans(spec, q, kind, step, parts)


def _check_plans(spec: LayerSpec, q: Tensor, kind: str, step: AttentionStep, parts: int) -> None:
    """Check our plan and FlashMLA's plan of a layer under the schedule "decode"."""
    metadata = flash_mla_plan_of(step, kind)
    if metadata is not None:
        name = "step.flash_mla_plan" if kind == "window" else f"step.{kind}.flash_mla_plan"
        if not spec.sm_parts:
            raise argument_error(
                _OP, name, must="be None without sm_parts", got="metadata", do=_OWN_SPEC
            )
        _check_metadata(spec, q, name, metadata)
    if kind == "c128" and step.c128.plan is not None:
        _check_plan(spec, q, step.c128.plan, parts)


def check_ranks(ranks: ContextParallel, step: AttentionStep, q: Tensor) -> None:
    """Check that the step was built for a rank, and that the group has the spec's ranks."""
    if step.share is None:
        raise argument_error(
            _OP,
            "step",
            must="be of a rank",
            got="a step of one GPU",
            do=f"{_OWN_SPEC} and a cp_rank",
        )
    ranks.check(_OP, int(q.shape[2]) * q.element_size(), q.device)


def _check_schedule(spec: LayerSpec, step: AttentionStep) -> None:
    """Check that the schedule, if any, is for the SM count of the layer's own spec."""
    name, schedule, num_sms = "step.c4.schedule", step.c4.schedule, spec.schedule_sms
    if schedule is None:
        return
    checks = Checks(_OP)
    checks.tensor(name, schedule, torch.int32, "num_sms + 1", 2)
    if schedule.shape[0] != num_sms + 1:
        raise argument_error(
            _OP, name, must=f"have {num_sms + 1} rows", got=schedule.shape[0], do=_OWN_SPEC
        )


def _check_plan(spec: LayerSpec, q: Tensor, plan: Tensor, parts: int) -> None:
    """Check that the op will use the plan, and that the plan was made for this many tokens and
    heads.

    The op itself accepts a plan for fewer tokens, which leaves the last tokens without work tiles.
    """
    name, num_tokens, num_heads = "step.c128.plan", q.shape[0], int(q.shape[1])
    ignored = f"for impl {FLASH_MLA!r}" if spec.impl == FLASH_MLA else ""
    ignored = "with batch_invariant" if spec.batch_invariant else ignored
    if ignored:
        raise argument_error(
            _OP,
            name,
            must=f"be None {ignored}",
            got="a tensor",
            do="Build the step with plan_heads=0",
        )
    checks = Checks(_OP)
    checks.tensor("inputs.q", q, q.dtype, "num_tokens", "num_heads", "head_dim")
    checks.tensor(name, plan, torch.int32, "num_work_tiles", PLAN_COLUMNS)
    num_tiles = num_tokens + programs_per_tile(num_heads, PROGRAMS)
    if plan.shape[0] != num_tiles:
        raise argument_error(
            _OP,
            name,
            must=f"have {plain_int(num_tiles)} rows for {plain_int(num_tokens)} tokens "
            f"of {num_heads} heads",
            got=plain_int(plan.shape[0]),
            do=f"Build each step with plan_heads={num_heads // parts}",
        )


def _check_metadata(spec: LayerSpec, q: Tensor, name: str, metadata: Tensor) -> None:
    """Check that the metadata is for this many tokens and SM parts."""
    checks = Checks(_OP)
    checks.tensor(name, metadata, torch.int32, "num_rows", METADATA_COLUMNS)
    num_tokens = q.shape[0]
    num_rows = spec.sm_parts + num_tokens + 1
    if metadata.shape[0] != num_rows:
        raise argument_error(
            _OP,
            name,
            must=f"have {plain_int(num_rows)} rows for {plain_int(num_tokens)} tokens",
            got=plain_int(metadata.shape[0]),
            do=_OWN_SPEC,
        )


def _check_prefill(spec: LayerSpec, kind: str, q: Tensor, step: AttentionStep) -> None:
    arguments = {
        "q": q,
        "layout": spec.layout,
        "swa_block_table": step.swa_block_table,
        "swa_block_size": spec.attention.swa_block_size,
        "extra_block_table": compressed_table(step, kind),
        "extra_block_size": 1 if kind == "window" else spec.block_size(kind),
    }
    check_impl("sparse_mla_prefill", PREFILL_PROVIDERS, FLASH_MLA, q.device, arguments)


def _check_ours(layer: LayerCall) -> None:
    """Check that our kernels support the layer's queries and its indexer."""
    spec, kind, inputs, *_ = layer
    if kind == "c4":
        arguments = {"layout": spec.indexer_layout, "topk": spec.attention.index_topk}
        arguments["q"] = inputs.indexer_q
        check_limit("indexer_select", INDEXER_PROVIDERS, TRITON, arguments, _OP)
    q = Sizes((inputs.q.shape[0], inputs.q.shape[1], spec.head_dim), spec.dtype)
    check_limit("sparse_mla_decode", DECODE_PROVIDERS, TRITON, {"q": q}, _OP)

"""Checks that the sparse MLA ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.choice import check_impl
from dsv4_ops.core.ints import known
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.tiles import METADATA_COLUMNS, PLAN_COLUMNS, is_metadata
from dsv4_ops.core.types import FlashMlaPlan


def check_decode(
    op: str,
    q: Tensor,
    softmax_scale: float,
    providers: tuple[str, ...],
    impl: str,
    *,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
) -> Checks:
    """Checks of ``op``, its layout and queries checked, and what it runs with."""
    checks = check_queries(op, q, layout)
    check_splits(checks, num_splits, batch_invariant)
    taken = {"layout": layout, "num_splits": num_splits, "batch_invariant": batch_invariant}
    check_impl(op, providers, impl, q.device, {"q": q, **taken})
    checks.above(0, softmax_scale=softmax_scale)
    return checks


def check_queries(op: str, q: Tensor, layout: str) -> Checks:
    checks = Checks(op)
    checks.one_of("layout", layout, MainLayout.tag, "plain")
    if layout == MainLayout.tag:
        checks.tensor("q", q, torch.bfloat16, "num_tokens", "num_heads", MainLayout.head_dim)
    else:
        checks.floats("q", q, torch.bfloat16, torch.float32)
        checks.tensor("q", q, q.dtype, "num_tokens", "num_heads", "width")
    return checks


def check_splits(checks: Checks, num_splits: int, batch_invariant: bool) -> None:
    """The settings that decide how keys are cut."""
    checks.at_least(0, num_splits=num_splits)
    checks.flag("batch_invariant", batch_invariant)


def check_plan(
    checks: Checks,
    plan: Tensor | FlashMlaPlan | None,
    num_splits: int,
    batch_invariant: bool,
    impl: str,
    widths: tuple[int, int],
) -> Tensor | None:
    """The plan as the op takes it, if there is one; nothing else decides then, and it is one of
    those that ``impl`` goes by."""
    if plan is None:
        return None
    if isinstance(plan, FlashMlaPlan):
        _check_flash_mla_plan(checks, plan, impl, widths)
        plan = plan.schedule
    elif isinstance(plan, Tensor) and is_metadata(plan):
        _check_goes_to_flash_mla(checks, impl, "one of flash_mla_metadata")
        checks.tensor("plan", plan, torch.int32, "num_rows", METADATA_COLUMNS)
        rows_of_splits = checks.sizes["num_tokens"] + 1
        if plan.shape[0] <= rows_of_splits:
            rule = f"have more than {known(rows_of_splits)} rows for as many tokens"
            advice = "Make it with flash_mla_metadata of the lens of this call"
            raise refusal(ValueError, checks.op, "plan", rule, known(plan.shape[0]), advice)
    else:
        if impl == "flash_mla":
            raise refusal(
                ValueError,
                checks.op,
                "plan",
                "be one of flash_mla_metadata or flash_mla_plan for impl 'flash_mla'",
                "another",
                "Make it with one of these, or leave it out",
            )
        checks.tensor("plan", plan, torch.int32, "num_pieces", PLAN_COLUMNS)
        checks.rows_for_tokens("plan", plan)
    checks.without("num_splits", num_splits, 0, "a plan")
    checks.without("batch_invariant", batch_invariant, False, "a plan")
    return plan


def _check_goes_to_flash_mla(checks: Checks, impl: str, actual: str) -> None:
    if impl not in ("auto", "flash_mla"):
        rule = f"be a tensor of sparse_mla_plan for impl {impl!r}"
        advice = "Pass impl='flash_mla', or leave it out"
        raise refusal(ValueError, checks.op, "plan", rule, actual, advice)


def _check_flash_mla_plan(
    checks: Checks, plan: FlashMlaPlan, impl: str, widths: tuple[int, int]
) -> None:
    """It was made for such a call: FlashMLA would read past the lists of another."""
    _check_goes_to_flash_mla(checks, impl, "a FlashMlaPlan")
    checks.tensor("plan.schedule", plan.schedule, torch.int32, "size")
    sizes = {
        "num_tokens": checks.sizes["num_tokens"],
        "num_heads": checks.sizes["num_heads"],
        "swa_width": widths[0],
        "extra_width": widths[1],
    }
    for name, size in sizes.items():
        if getattr(plan, name) != size:
            raise refusal(
                ValueError,
                checks.op,
                "plan",
                f"be made for {name} = {known(size)}",
                f"one for {known(getattr(plan, name))}",
                "Make one of flash_mla_plan for every size of batch",
            )


def check_cache(
    checks: Checks, source: str, q: Tensor, cache: Tensor, block_size: int, layout: str
) -> None:
    """One of the two caches."""
    size_name, blocks = f"{source}_block_size", f"num_{source}_blocks"
    checks.at_least(1, **{size_name: block_size})
    if layout == MainLayout.tag:
        dims = (blocks, f"{source}_page_bytes")
        checks.pages(f"{source}_cache", cache, MainLayout(block_size), dims, size_name)
        return
    checks.rows(f"{source}_cache", cache, block_size, (blocks, size_name, "width"), size_name)
    checks.tensor(f"{source}_cache", cache, q.dtype, blocks, size_name, "width")


def check_lists(checks: Checks, source: str, indices: Tensor, lens: Tensor) -> None:
    """Slots of one of the two caches and how many count."""
    checks.tensor(f"{source}_indices", indices, torch.int32, "num_tokens", f"{source}_width")
    checks.tensor(f"{source}_lens", lens, torch.int32, "num_tokens")
    checks.at_least(1, **{f"{source}_width": indices.shape[1]})


def check_none(checks: Checks, *extra: Tensor | None) -> None:
    """All three of the extra cache are None."""
    names = ("extra_cache", "extra_indices", "extra_lens")
    missing = next(name for name, value in zip(names, extra, strict=True) if value is None)
    for name, value in zip(names, extra, strict=True):
        if value is not None:
            checks.comes_with(name, missing, None)


def check_sink(checks: Checks, attn_sink: Tensor | None) -> None:
    """The sink, if there is one."""
    if attn_sink is not None:
        checks.tensor("attn_sink", attn_sink, torch.float32, "num_heads")


def check_turn(
    checks: Checks, q: Tensor, positions: Tensor | None, cos_sin_cache: Tensor | None
) -> None:
    """What the output is rotated back by, if it is."""
    if positions is not None and cos_sin_cache is not None:
        checks.rotation(positions, cos_sin_cache)
        checks.even("cos_sin_cache", cos_sin_cache, "width", q.shape[2])
    elif positions is not None:
        checks.comes_with("positions", "cos_sin_cache", cos_sin_cache)
    elif cos_sin_cache is not None:
        checks.comes_with("cos_sin_cache", "positions", positions)

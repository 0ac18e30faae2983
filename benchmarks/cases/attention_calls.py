"""The calls of sparse MLA that benchmarks measure."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.cases.attention_draws import C4, C128, PAGE, PAGE_128, PAGES, WINDOW
from benchmarks.harness.work import Args, ours_on
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.types import SparseMla, SparseMlaGathered
from dsv4_ops.kernels.common.attention.calls import PrefillCall

SCALE = MainLayout.head_dim**-0.5


def settings(extra_block_size: int) -> dict[str, Any]:
    """Keyword arguments of a decode."""
    sizes = {"swa_block_size": PAGE, "extra_block_size": extra_block_size}
    how = {"num_splits": 0, "batch_invariant": False}
    return {"softmax_scale": SCALE, "layout": MainLayout.tag, **sizes, **how}


def prefill_settings(ratio: int) -> dict[str, Any]:
    """Keyword arguments of a prefill."""
    sizes = {"swa_block_size": PAGE, "extra_block_size": PAGES[ratio]}
    tokens = {"window_size": WINDOW, "compress_ratio": ratio}
    return {"softmax_scale": SCALE, "layout": MainLayout.tag, **sizes, **tokens}


def decode(*tensors: Any, **chosen: Any) -> SparseMla:
    given = {**settings(PAGE), "impl": ours_on(tensors[0]), **chosen}
    return dsv4_ops.sparse_mla_decode(*tensors, **given)


def prefill(ratio: int, *tensors: Any, **chosen: Any) -> SparseMla:
    """Run a prefill. By default the op selects one of our variants: no library is faster here."""
    return dsv4_ops.sparse_mla_prefill(*tensors, **{**prefill_settings(ratio), **chosen})


PREFILLS = {ratio: functools.partial(prefill, ratio) for ratio in (C4, C128)}


def prefill_by_copy(ratio: int, *tensors: Any) -> SparseMla:
    """Run a prefill over a bf16 copy of the rows, a variant that no ``impl`` forces."""
    launch, kernels = _kernels("launcher"), _kernels("sparse_mla.prefill")
    call = PrefillCall(*tensors, **prefill_settings(ratio))
    with torch.cuda.device_of(tensors[0]):
        return SparseMla(*kernels.attend_to_copy(launch.EAGER, 1, call, None))


def on_hopper(q: Tensor) -> bool:
    """Return whether our Gluon kernels run these queries over FP8 caches."""
    try:
        return bool(_kernels("common.hopper.support").runs(_kernels("launcher").EAGER, q, True))
    except ImportError:  # triton is not installed
        return False


def _kernels(module: str) -> Any:
    """Import a module of kernels at its first use, because the module imports triton."""
    return importlib.import_module(f"dsv4_ops.kernels.{module}")


def gathered(*tensors: Any, **chosen: Any) -> SparseMlaGathered:
    """Attend to gathered rows. By default the op selects our kernel: no library is faster here."""
    return dsv4_ops.sparse_mla_gathered(*tensors, softmax_scale=SCALE, **chosen)


def decode_paged(*tensors: Any, **chosen: Any) -> SparseMla:
    given = {**settings(PAGE_128), "impl": ours_on(tensors[0]), **chosen}
    return dsv4_ops.sparse_mla_decode_paged(*tensors, **given)


def plan_and_decode(*tensors: Any) -> SparseMla:
    return decode(*tensors, plan_of(tensors, 6))


def plan_and_decode_paged(*tensors: Any) -> SparseMla:
    return decode_paged(*tensors, plan_of(tensors, 5))


def plan_of(args: Args, lens: int) -> Tensor:
    """Make a plan; ``args[lens]`` has the number of compressed rows of every token."""
    plan: Tensor = dsv4_ops.sparse_mla_plan(args[3], args[lens], num_heads=args[0].shape[1])
    return plan

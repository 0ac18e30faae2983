"""Sparse MLA by kernels in Gluon, on Hopper: where they run, and how a graph calls them.

Their loads, their dequantisation and their matrix products have warps of their own, which plain
Triton does not express. Inductor knows no Gluon kernel: compiled code calls an op that launches
it, and an AOTInductor package holds its binary (``kernels/aot``), so that it needs nothing else.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

from torch import Tensor

from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.launcher import Launcher

CAPABILITY = (9, 0)
"""Compute capability of the matrix unit that the kernels are made for."""

WARPS = 4
"""Warps of the first of their three partitions."""


def runs(launch: Launcher, q: Tensor, coded: bool) -> bool:
    """Whether such a call has a Gluon kernel: over FP8 caches or listed rows, on Hopper."""
    if INTERPRETED or not coded or launch.capability(q.device) != CAPABILITY:
        return False
    return kernels() is not None


class Kernels(NamedTuple):
    """The kernels of decode, of prefill from FP8 pages, over listed bf16 rows, and of decode of
    dense MLA."""

    split: Any
    prefill: Any
    gathered: Any
    mla: Any


@functools.cache
def kernels() -> Kernels | None:
    """None with a triton that has no such Gluon."""
    try:
        return Kernels(*map(_kernel, Kernels._fields))
    except (ImportError, AttributeError, TypeError):
        return None


def kernel(name: str) -> Any:
    """One of ``Kernels``, where ``runs`` has said that there are."""
    found = kernels()
    assert found is not None
    return getattr(found, name)


def _kernel(name: str) -> Any:
    if name == "mla":
        module = importlib.import_module("dsv4_ops.kernels.mla.hopper.decode_kernel")
        return module.hopper_mla_decode_kernel
    phase = "decode" if name == "split" else name
    module = importlib.import_module(f"dsv4_ops.kernels.sparse_mla.hopper.{phase}_kernel")
    return getattr(module, f"hopper_{name}_keys_kernel")

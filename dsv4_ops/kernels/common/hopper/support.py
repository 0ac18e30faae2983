"""Which calls the Gluon kernels for Hopper take, and how to get one.

Their loads, their dequantisation and their matrix products run in separate warps, which plain
Triton cannot express. Inductor cannot compile Gluon: a graph calls an op that launches the kernel,
and an AOTInductor package contains its binary (``kernels/aot``).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

from torch import Tensor

from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.launcher import Launcher

CAPABILITY = (9, 0)
"""Compute capability that the kernels are written for."""

WARPS = 4
"""Warps of the default partition."""


def runs(launch: Launcher, q: Tensor, coded: bool) -> bool:
    """Whether a Gluon kernel takes the call: FP8 caches or listed rows, on Hopper."""
    if INTERPRETED or not coded or launch.capability(q.device) != CAPABILITY:
        return False
    return kernels() is not None


class Kernels(NamedTuple):
    """Sparse MLA decode, prefill from FP8 pages, attention to listed bf16 rows, and dense MLA
    decode. A package launches a kernel by its name here."""

    split: Any
    prefill: Any
    gathered: Any
    mla: Any


_KERNELS = {
    "split": "sparse_mla.hopper.decode_kernel.hopper_split_keys_kernel",
    "prefill": "sparse_mla.hopper.prefill_kernel.hopper_prefill_keys_kernel",
    "gathered": "sparse_mla.hopper.gathered_kernel.hopper_gathered_keys_kernel",
    "mla": "mla.hopper.decode_kernel.hopper_mla_decode_kernel",
}
"""Where each kernel is: imported at its first use, as not every Triton can."""


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels, or None if this Triton has no suitable Gluon."""
    try:
        return Kernels(*map(_kernel, Kernels._fields))
    except (ImportError, AttributeError, TypeError):
        return None


def kernel(name: str) -> Any:
    """Return one of ``Kernels``; ``runs`` must have been true."""
    all_kernels = kernels()
    assert all_kernels is not None
    return getattr(all_kernels, name)


def _kernel(name: str) -> Any:
    module, _, function = _KERNELS[name].rpartition(".")
    return getattr(importlib.import_module(f"dsv4_ops.kernels.{module}"), function)

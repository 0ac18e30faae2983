"""Which calls the Gluon kernels for Hopper support.

Their loads, their dequantisation and their matrix products run in separate warps, which plain
Triton cannot express. Inductor cannot compile Gluon: a graph calls an op that launches the kernel,
and an AOTInductor package contains its binary (``kernels/aot``).
"""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.launcher import Launcher

WARPS = 4
"""Warps of the default partition."""


def runs(launch: Launcher, q: Tensor, coded: bool) -> bool:
    """Whether a Gluon kernel takes the call: FP8 caches or listed rows, on Hopper."""
    return coded and not INTERPRETED and launch.target(q.device).is_hopper

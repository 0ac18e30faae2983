"""Decide which calls run in the Gluon kernels for Hopper.

These kernels load, dequantise and multiply in separate warps, which plain Triton cannot express.
Inductor cannot compile Gluon, so a graph calls an op that launches the kernel, and an AOTInductor
package contains the kernel's binary (``kernels/aot``).
"""

from __future__ import annotations

from torch import Tensor

from dsv4_ops.kernels.common.triton_compat import INTERPRETED
from dsv4_ops.kernels.launcher import Launcher

WARPS = 4
"""Warps of the default partition."""


def runs(launch: Launcher, q: Tensor, coded: bool) -> bool:
    """Return whether the call runs in a Gluon kernel. ``coded``: whether a Gluon kernel can read
    the rows."""
    return coded and not INTERPRETED and launch.target(q.device).is_hopper

"""How kernels are launched: eagerly, traced into a graph, or packed into a package."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import CACHE_ALIGNMENT
from dsv4_ops.core.target import Target, capability_of, target_of
from dsv4_ops.core.tiles import PROGRAMS
from dsv4_ops.kernels.common.triton_compat import (
    FUSION,
    INTERPRETED,
    takes_options_in_graphs,
)


class Launcher:
    """Properties of the device and context of a launch; ``launcher(kernel)[grid](...)`` launches.

    Args:
        wrap: Wraps a kernel in an object that takes a grid.
        opaque_gluon: Whether Gluon kernels, which Inductor does not compile, must be called through
            ops that a graph keeps whole.
        aligns_inputs: Whether misaligned inputs are copied later, because their addresses are
            unknown here.
        capability: Compute capability reported for tensors that are not on a GPU.
        num_sms: SMs reported for them.
    """

    def __init__(
        self,
        wrap: Callable[[Any], Any],
        *,
        opaque_gluon: bool = False,
        aligns_inputs: bool = False,
        capability: tuple[int, int] | None = None,
        num_sms: int = PROGRAMS,
    ) -> None:
        self.wrap, self.opaque_gluon, self.aligns_inputs = wrap, opaque_gluon, aligns_inputs
        self._capability, self._num_sms = capability, num_sms

    def __call__(self, kernel: Any) -> Any:
        return self.wrap(kernel)

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        """Return the compute capability; None on AMD, whose numbers look alike."""
        if device.type != "cuda":
            return self._capability
        return capability_of(device)

    def target(self, device: torch.device) -> Target:
        """Return what the GPU offers to kernels."""
        return target_of(self.capability(device))

    def converts_codes(self, device: torch.device) -> bool:
        """Return whether kernels convert e4m3 codes, and do not compute with integers. Triton's
        interpreter is wrong about conversions."""
        return not INTERPRETED and self.target(device).converts_codes

    def num_sms(self, device: torch.device) -> int:
        """Return the number of SMs."""
        if device.type != "cuda":
            return self._num_sms
        return torch.cuda.get_device_properties(device).multi_processor_count

    def is_aligned(self, values: Tensor) -> bool:
        """Return whether copies of 16 bytes can start at the address of ``values``."""
        return self.aligns_inputs or values.data_ptr() % CACHE_ALIGNMENT == 0

    def predicated(self, flag: Any) -> Launcher:
        """Return a launcher with empty grids if ``flag`` is 0; it is 0 or 1, and may be
        symbolic."""
        predicated = copy.copy(self)
        predicated.wrap = lambda kernel: _Predicated(self.wrap(kernel), flag)
        return predicated


class _Predicated:
    """A kernel whose grid is multiplied by 0 or 1."""

    def __init__(self, kernel: Any, flag: Any) -> None:
        self.kernel, self.flag = kernel, flag

    def __getitem__(self, grid: Sequence[Any]) -> Any:
        return self.kernel[(grid[0] * self.flag, *grid[1:])]


class _Fused:
    """A kernel that is compiled with ``FUSION``, whatever Triton's default is."""

    __slots__ = ("kernel",)

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **FUSION)


def _wrap_triton(kernel: Any) -> Any:
    wrapped = torch.library.wrap_triton(kernel)
    return _Fused(wrapped) if takes_options_in_graphs() else wrapped


EAGER = Launcher(_Fused)
"""Launch now."""

TRACED = Launcher(_wrap_triton, opaque_gluon=True)
"""Trace launches into a graph; Inductor compiles the kernels."""

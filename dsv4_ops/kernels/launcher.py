"""Launch kernels eagerly, trace them into a graph, or put them into a package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import CACHE_ALIGNMENT
from dsv4_ops.core.target import Target, capability_of, target_of
from dsv4_ops.core.tiles import PROGRAMS
from dsv4_ops.kernels.common.dependent_launch import waits
from dsv4_ops.kernels.common.triton_compat import (
    FUSION,
    INTERPRETED,
    name_alike,
    takes_options_in_graphs,
)

_CPU = torch.device("cpu")


class Launcher:
    """Launch kernels: ``launcher(kernel)[grid](...)``. Report properties of the device.

    Args:
        wrap: Wraps a kernel in an object that takes a grid.
        opaque_gluon: Whether Gluon kernels, which Inductor does not compile, must be called through
            ops that a graph keeps whole.
        aligns_inputs: Whether misaligned inputs are copied later, because their addresses are
            unknown here.
        capability: Compute capability reported for tensors that are not on a GPU.
        num_sms: SMs reported for tensors that are not on a GPU.
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
        return self.wrap(name_alike(kernel))

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        """Return the compute capability; None on an AMD GPU, for which torch reports numbers with
        another meaning."""
        if device.type != "cuda":
            return self._capability
        return capability_of(device)

    def target(self, device: torch.device) -> Target:
        """Return the properties of the GPU on which tiles and launches depend."""
        return target_of(self.capability(device))

    def converts_codes(self, device: torch.device) -> bool:
        """Return whether kernels let Triton convert e4m3 codes. Otherwise kernels compute with
        integers, as in Triton's interpreter, which converts wrongly."""
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
        """Return a launcher whose grids are empty if ``flag`` is 0. ``flag`` is 0 or 1, and may be
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


class _WithOptions:
    """A kernel whose launches have the options of ``options_of``."""

    __slots__ = ("kernel", "launched")

    def __init__(self, kernel: Any, launched: Any = None) -> None:
        self.kernel, self.launched = kernel, launched or kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self.launched[grid]
        return lambda *args, **given: launch(*args, **options_of(self.kernel, args), **given)


def options_of(kernel: Any, args: Sequence[Any]) -> dict[str, Any]:
    """Return Triton's options for a kernel on the device of its first tensor."""
    device = next((each.device for each in args if isinstance(each, Tensor)), _CPU)
    return FUSION | dependent(kernel, target_of(capability_of(device)))


def dependent(kernel: Any, target: Target) -> dict[str, bool]:
    """Return the option that starts a kernel before the previous kernel has ended; nothing if the
    kernel does not wait, or the GPU has no dependent launches."""
    return {"launch_pdl": True} if target.dependent_launch and waits(kernel) else {}


def _wrap_triton(kernel: Any) -> Any:
    wrapped = torch.library.wrap_triton(kernel)
    return _WithOptions(kernel, wrapped) if takes_options_in_graphs() else wrapped


EAGER = Launcher(_WithOptions)
"""Launch now."""

TRACED = Launcher(_wrap_triton, opaque_gluon=True)
"""Trace launches into a graph; Inductor compiles the kernels."""

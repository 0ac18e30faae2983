"""How a launcher meets its kernel: called at once, or traced into a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv4_ops.kernels.common.triton_compat import FUSION, INTERPRETED, takes_options_in_graphs

Launch = Callable[[Any], Any]
"""``at_once``, ``traced``, ``packaged.packaged`` for an AOTInductor package, or
``torch.library.wrap_triton``."""

EMULATE = INTERPRETED
"""Under TRITON_INTERPRET=1 the e4m3 cast is done in integers."""


def at_once(kernel: Any) -> Any:
    """The kernel, to be called as it is."""
    return _Fused(kernel)


def traced(kernel: Any) -> Any:
    """The kernel as a graph keeps it. Launchers of kernels that Inductor does not know ask for this
    function, and trace an op instead."""
    wrapped = torch.library.wrap_triton(kernel)
    return _Fused(wrapped) if takes_options_in_graphs() else wrapped


class _Fused:
    """A kernel that is compiled with ``FUSION`` whatever Triton's default is."""

    __slots__ = ("kernel",)

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **FUSION)


class Where:
    """A launch that happens if a number is 1 and not if it is 0, which may be a symbol: of no
    program."""

    def __init__(self, base: Launch, wanted: Any) -> None:
        self.base, self.wanted = base, wanted

    def __call__(self, kernel: Any) -> Any:
        return _Counted(self.base(kernel), self.wanted)


class _Counted:
    def __init__(self, kernel: Any, wanted: Any) -> None:
        self.kernel, self.wanted = kernel, wanted

    def __getitem__(self, grid: Sequence[Any]) -> Any:
        return self.kernel[(grid[0] * self.wanted, *grid[1:])]

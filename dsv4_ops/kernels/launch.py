"""How a launcher meets its kernel: called at once, or traced into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton import knobs

Launch = Callable[[Any], Any]
"""``at_once``, ``traced``, ``packaged.packaged`` for an AOTInductor package, or
``torch.library.wrap_triton``."""

EMULATE = bool(knobs.runtime.interpret)
"""Under TRITON_INTERPRET=1 the e4m3 cast is done in integers."""


def at_once(kernel: Any) -> Any:
    """The kernel, to be called as it is."""
    return kernel


def traced(kernel: Any) -> Any:
    """The kernel as a graph keeps it. Launchers of kernels that Inductor does not know ask for this
    function, and trace an op instead."""
    return torch.library.wrap_triton(kernel)

"""How a launcher meets its kernel: called at once, or traced into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs

Launch = Callable[[Any], Any]
"""The identity, or ``torch.library.wrap_triton``."""

EMULATE = bool(knobs.runtime.interpret)
"""Under TRITON_INTERPRET=1 the e4m3 cast is done in integers."""

"""Ops that a release of Inductor compiles only with a setting; docs/limits.md tells users."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

BUGS: dict[str, dict[str, Any]] = {
    # with uniforms, of symbolic sizes: 2.11's analysis of tiles ends in an assertion on a GPU
    "verify_draft": {"triton.coalesce_tiling_analysis": False}
}


def mended(name: str) -> AbstractContextManager[Any]:
    """Inductor's settings that the op needs on a GPU with this release."""
    settings = BUGS.get(name) if torch.__version__ < "2.13" else None
    return torch._inductor.config.patch(settings) if settings else nullcontext()

"""Settings that ops need with some releases of Inductor; docs/limits.md lists them for users."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

BUGS: dict[str, dict[str, Any]] = {
    # with uniforms and symbolic sizes, torch 2.11's tiling analysis fails an assertion on a GPU
    "verify_draft": {"triton.coalesce_tiling_analysis": False}
}


def mended(name: str) -> AbstractContextManager[Any]:
    """Apply the settings of Inductor that the op needs on a GPU with this release."""
    settings = BUGS.get(name) if torch.__version__ < "2.13" else None
    return torch._inductor.config.patch(settings) if settings else nullcontext()

"""Run A100 code on a Hopper card: PTX of sm_80, which ptxas compiles for the card. Tests check the
results, which an A100 would compute too."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor.runtime.hints import DeviceProperties
from triton import knobs
from triton.backends.compiler import Language
from triton.runtime import JITFunction, driver

from dsv4_ops.kernels.launch_plans import PLANS

CAPABILITY = (8, 0)
TARGET = 80


def _capability(device: Any = None) -> tuple[int, int]:
    return CAPABILITY


def _stages(
    backend: Any = None,
    stages: Any = None,
    options: Any = None,
    language: Any = None,
    capability: Any = None,
    *,
    card: int,
) -> tuple[str, str] | None:
    """Replace the last stages of Triton's compiler. Since 3.7 Triton also calls this hook without
    arguments, to get a text for the kernels' cache key."""
    if backend is None:
        return "sm_80", "sm_80"
    if language != Language.TRITON:
        raise AssertionError("Hopper's kernels were called on an A100")
    stages["ptx"] = lambda source, metadata: backend.make_ptx(source, metadata, options, TARGET)
    stages["cubin"] = lambda source, metadata: backend.make_cubin(source, metadata, options, card)
    return None


def _forget() -> None:
    """Unload this process's kernels, because Triton's table of kernels ignores the target."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels must finish before Triton unloads them
    torch._dynamo.reset()
    PLANS.plans.clear()
    vars(DeviceProperties)["create"].__func__.cache_clear()  # Inductor's cache holds the capability
    for each in gc.get_objects():
        if type(each) is JITFunction:
            each.device_caches.clear()


@contextlib.contextmanager
def as_an_a100(folder: Path) -> Iterator[None]:
    """Report capability 8.0 to all callers, and let Triton compile for sm_80.

    ptxas compiles the PTX for the card in this machine, as the driver would. Compiled code goes to
    ``folder``. Inductor's compile workers are not patched.
    """
    target = driver.active.get_current_target()  # the real target, before the patch
    _forget()
    hook = functools.partial(_stages, card=target.arch)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with (
        mock.patch.object(torch.cuda, "get_device_capability", _capability),
        mock.patch.dict("os.environ", environment),
        torch._inductor.config.patch(compile_threads=1, force_disable_caches=True),
        knobs.runtime.scope(),
        knobs.cache.scope(),
    ):
        knobs.cache.dir = str(folder / "triton")
        knobs.runtime.override_arch = f"sm{TARGET}"
        knobs.runtime.add_stages_inspection_hook = hook
        yield
    _forget()

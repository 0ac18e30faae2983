"""Settings of the whole test run, made before anything imports torch."""

import gc
import os
from typing import Any

import pytest

# A compile makes a million objects, few of them garbage: looking for it takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)
# A crashed compile leaves Inductor's worker pool waiting for minutes at exit; one thread has no
# pool.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Threads that spin between loops take the core from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores among them
    os.environ["OMP_NUM_THREADS"] = "1"  # also in what tests start

    import torch
    from torch._inductor import config, cpp_builder

    torch.set_num_threads(1)
    config.cpp.threads = 2  # generated loops stay parallel, as they are without workers

    # of long functions g++ makes the same results with -O2, in a quarter of the time
    _flags = cpp_builder._get_optimization_cflags

    def _quicker(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compiler, linker = _flags(*args, **kwargs)
        return ["O2" if flag == "O3" else flag for flag in compiler], linker

    cpp_builder._get_optimization_cflags = _quicker


@pytest.fixture(autouse=True)
def _ours_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that loads FlashMLA or DeepGEMM as a peer leaves it loaded: ``impl="auto"`` takes ours
    in all tests but those of the choice."""
    if "providers" not in request.node.nodeid:
        from dsv4_ops.core import choice

        monkeypatch.setattr(choice, "RULES", ())

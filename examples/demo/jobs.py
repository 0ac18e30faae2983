"""Long measurements in parallel processes, each of which keeps about one core busy."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.models import (
    HEAVY,
    SLIDING,
    SPARSE,
    small_dsa_model,
    small_mla_model,
    small_model,
)
from dsv4_ops.testing.text import prompts
from examples.demo import measure, ours, stock
from examples.demo.measure import Captured, Failed, Graphs, attempt
from examples.demo.ours import Package
from examples.demo.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
NUM_REQUESTS = 2
PROMPT_LENGTH = 100  # 64 steps pass token 128, where a window of keys and a C128 window end
COUNT_BACKEND = "eager"
BACKEND = "inductor"
JOB_SECONDS = 1200
_ENVIRONMENT = {
    # the demo's own process already tests the compiler's vector instructions; this saves 10 s
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    # code that calls a package's kernels has no loops to optimise; this saves 10 s
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
}
_YIELDING = ("count-stock",)
"""Jobs that leave the cores to other jobs, because the package takes longest and the demo waits for
it."""

# Two kernels per layer unroll the iterations: the released number, 20, takes 15 s more to compile.
SINKHORN_ITERATIONS = 3
LAYERS_IN_TURN = (SPARSE, HEAVY, SLIDING)
"""Kinds of V4's layers. The first two together run all ops, because every kind has a window."""
LAYERS = 2


def small_v4(*, num_hidden_layers: int, **changed: Any) -> Any:
    """Build a small DeepSeek-V4 whose layers have the kinds of ``LAYERS_IN_TURN``, repeated."""
    kinds = list(islice(cycle(LAYERS_IN_TURN), num_hidden_layers))
    return small_model(layer_types=kinds, hc_sinkhorn_iters=SINKHORN_ITERATIONS, **changed)


MODELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "v4": (f"DeepSeek-V4 with {SINKHORN_ITERATIONS} Sinkhorn iterations", small_v4),
    "v3": ("DeepSeek-V3", small_mla_model),
    "v32": ("DeepSeek-V3.2", small_dsa_model),
}
"""By ``--model``: a name for the table, and a function that builds a small model."""


@dataclass(frozen=True)
class Work:
    """A run: the model's layers, its device, its key in ``MODELS``, and the decode steps."""

    device: torch.device
    layers: int
    steps: int
    of: str = "v4"
    enough: int | None = None
    """Number of graphs of stock Hugging Face after which the demo stops counting."""
    package: bool = True
    """Whether to build an AOTInductor package."""
    folder: Path | None = None
    """Folder of the package; None for a temporary folder."""

    @property
    def backend(self) -> str:
        """Backend of ``torch.compile`` for our step. On a CPU, Inductor compiles the step only
        once: for the package, if the run builds one."""
        return COUNT_BACKEND if self.package and self.device.type == "cpu" else BACKEND

    def model(self) -> Any:
        """Build the model without an end token, so that requests run all steps, in ``generate``
        too."""
        make = MODELS[self.of][1]
        return make(device=self.device, num_hidden_layers=self.layers, eos_token_id=None)

    def prompts(self) -> Tensor:
        """int64 [NUM_REQUESTS, PROMPT_LENGTH]."""
        return torch.tensor(prompts(NUM_REQUESTS, PROMPT_LENGTH), device=self.device)

    def ours(self, model: Any) -> ours.Ours:
        """Patch ``model`` in the reference mode, and make a cache for all steps."""
        from dsv4_ops.integrations import transformers as v4

        patched = v4.patch(model, kv="fp32", precision="reference")
        return ours.Ours(patched, self.prompts(), max_cache_len=PROMPT_LENGTH + self.steps)


def count_stock(work: Work, progress: Progress) -> Graphs:
    """Count the graphs that stock Hugging Face compiles while it decodes."""
    return measure.count_graphs(
        stock.Stock(work.model(), work.prompts()),
        work.steps,
        backend=COUNT_BACKEND,
        enough=work.enough,
        progress=lambda text: progress.say(f"  stock Hugging Face, {text}"),
    )


def compile_ours(work: Work, progress: Progress) -> Graphs:
    """Count the graphs that the patched model compiles while it decodes."""
    return measure.count_graphs(
        work.ours(work.model()), work.steps, backend=work.backend, progress=progress.say
    )


def build_package(work: Work, progress: Progress) -> Package:
    """Build the AOTInductor package of our decode step."""
    with TemporaryDirectory() as folder:
        side = work.ours(work.model())
        return ours.package(side, work.steps, work.folder or Path(folder), progress.say)


def capture_stock(work: Work, progress: Progress) -> Captured:
    """Capture the decode step of stock Hugging Face in a CUDA graph. A failed capture may leave its
    process unusable."""
    return measure.capture(stock.Stock(work.model(), work.prompts()), work.steps)


JOBS: dict[str, tuple[Callable[[Work, Progress], Any], type]] = {
    "count-stock": (count_stock, Graphs),
    "compile": (compile_ours, Graphs),
    "capture-stock": (capture_stock, Captured),
    "package": (build_package, Package),
}
"""The functions that the processes run, by name."""


def arguments(work: Work, job: str | None = None) -> list[str]:
    """Return Python's arguments to run the demo of ``work``, or one job of it."""
    options = [f"--model={work.of}", f"--steps={work.steps}", f"--layers={work.layers}"]
    options += [f"--device={work.device}", f"--stock-graphs={work.enough or 0}"]
    options += [] if work.package else ["--fast"]
    return ["-m", "examples.demo", *options, *([f"--job={job}"] if job else [])]


class Job:
    """A job in a process of its own. As a context manager, it stops the process at the block's end.

    Args:
        name: One of ``JOBS``.
        work: The run.
        progress: The demo's progress; the job's lines show the time since the same start.
    """

    def __init__(self, name: str, work: Work, progress: Progress) -> None:
        self.made = JOBS[name][1]
        folder = [f"--folder={work.folder}"] if work.folder else []
        # no limit for the package, which the demo's own process also runs, with all its threads
        threads = {} if name == "package" else {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *arguments(work, name), f"--since={progress.since}", *folder],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT, **threads},
            cwd=ROOT,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def result(self) -> Any:
        """Wait for the result; return ``Failed`` if the job raised or ended without one."""

        def wait() -> dict[str, Any]:
            out, _ = self.process.communicate(timeout=JOB_SECONDS)
            if not out.strip():
                raise RuntimeError(f"its process ended with {self.process.returncode}")
            found: dict[str, Any] = json.loads(out.splitlines()[-1])
            return found

        found = attempt(wait)
        if isinstance(found, Failed):
            return found
        return Failed(**found) if "error" in found else self.made(**found)


def run_job(name: str, work: Work, progress: Progress, *, attempted: bool) -> None:
    """Run a job, and print its result, or its error, as JSON."""
    warnings.simplefilter("ignore", FutureWarning)  # a warning of torch about itself, in an export
    if attempted and name in _YIELDING:
        os.nice(19)
    if name == "package":
        gc.disable()  # an AOTInductor compilation makes little garbage

    def call() -> Any:
        return JOBS[name][0](work, progress)

    print(json.dumps(asdict(attempt(call) if attempted else call())))

"""The patched model: decode steps from a paged cache, and the AOTInductor package of a step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from examples.demo.measure import cpu_seconds

PACKAGE = "decode.pt2"
RUNNER = Path(__file__).with_name("package_process.py")
_RUNNER_SECONDS = 300
# for two C++ files, precompiled headers take more time than they save
_SETTINGS = {"aot_inductor.precompile_headers": False}


class Ours:
    """A patched model with a ``PagedCache`` in which all requests decode.

    Args:
        model: The patched model.
        prompts: int64 [num_requests, length], on the device of the model.
        max_cache_len: Maximum tokens of a request.
    """

    def __init__(self, model: Any, prompts: Tensor, max_cache_len: int) -> None:
        from dsv4_ops.integrations import transformers as v4

        self.model, self.prompts = model, prompts
        num_requests = len(prompts)
        self.cache = v4.PagedCache.for_model(
            model, max_batch_size=num_requests, max_cache_len=max_cache_len
        )
        self.rows = torch.arange(num_requests, dtype=torch.int32, device=prompts.device)
        self.starts = torch.arange(num_requests + 1, dtype=torch.int32, device=prompts.device)
        self.seq_lens = torch.zeros_like(self.rows)

        def step(batch: v4.StepBatch, cache: v4.CacheTensors) -> Tensor:
            return v4.decode_step(model, batch, cache, state_rings=False)

        self.step: Callable[..., Tensor] = step

    def start(self) -> Tensor:
        """Prefill the prompts into the empty cache; return the logits of their last tokens."""
        from dsv4_ops.integrations import transformers as v4

        self.cache.reset()
        length = self.prompts.shape[1]
        self.seq_lens.fill_(length)
        batch = v4.StepBatch(
            self.prompts.flatten(), self.starts * length, self.seq_lens.clone(), self.rows
        )
        logits = v4.prefill_step(self.model, batch, self.cache.tensors)
        self.cache.raise_if_dropped()
        return logits

    def arguments(self, tokens: Tensor) -> tuple[Any, ...]:
        """Return the arguments of ``step`` for the next tokens; every call advances by one step."""
        from dsv4_ops.integrations import transformers as v4

        self.seq_lens += 1
        batch = v4.StepBatch(tokens, self.starts, self.seq_lens, self.rows)
        return batch, self.cache.tensors


@dataclass(frozen=True)
class Package:
    """An AOTInductor package of a decode step, and its results in a separate process."""

    megabytes: float
    seconds: float
    """CPU seconds to export, compile and write the package."""
    tokens: list[list[int]]
    imported: list[str]
    """Modules of dsv4_ops and transformers that the process imported; the list should be empty."""


@torch.no_grad()
def package(
    side: Ours, steps: int, folder: Path, progress: Callable[[str], None] = lambda _: None
) -> Package:
    """Export and compile the decode step of ``side``, and decode with the package in a new process
    that cannot import dsv4_ops or transformers.

    Args:
        side: The side to compile.
        steps: Decode steps.
        folder: Folder of the package.
        progress: Reports each phase.

    Raises:
        RuntimeError: the new process failed.
        Exception: an error of export or compilation.
    """
    from dsv4_ops.integrations import transformers as v4

    path, inputs = folder / PACKAGE, folder / "inputs.pt"
    with decoding_process(path, inputs) as process:
        start = cpu_seconds()
        with torch._inductor.config.patch(_SETTINGS), _compilers_at_once():
            v4.export_decode(side.model, side.cache, path=path)
        seconds = cpu_seconds() - start
        progress("dsv4_ops: decode with the package, in a process with torch only")
        logits = side.start()
        batch, _ = side.arguments(logits.argmax(-1))
        torch.save({"inputs": v4.decode_inputs(batch, side.cache), "steps": steps}, inputs)
        found = decoded(process)
    first = logits.argmax(-1).tolist()
    tokens = [[token, *row] for token, row in zip(first, found["tokens"], strict=True)]
    return Package(path.stat().st_size / 1e6, seconds, tokens, found["imported"])


@contextmanager
def _compilers_at_once() -> Iterator[None]:
    """Compile the two C++ files of a package in parallel; Inductor compiles them one by one."""
    from torch._inductor.cpp_builder import CppBuilder

    build = CppBuilder.build
    begun: list[Future[None]] = []

    def begin(builder: CppBuilder) -> None:
        if builder.get_target_file_path().endswith((".wrapper.o", ".kernel.o")):
            begun.append(pool.submit(build, builder))
            return
        for each in begun:  # wait for all object files before the linker runs
            each.result()
        build(builder)

    with ThreadPoolExecutor() as pool, patch.object(CppBuilder, "build", begin):
        yield


def packaged_step(side: Ours, path: Path) -> Callable[..., Tensor]:
    """Return a function that runs the package with the arguments of the step of ``side``."""
    from dsv4_ops.integrations import transformers as v4

    run = torch._inductor.aoti_load_package(str(path))

    def step(batch: v4.StepBatch, _: v4.CacheTensors) -> Tensor:
        logits: Tensor = run(*v4.decode_inputs(batch, side.cache))
        return logits

    return step


def decoding_process(package_path: Path, inputs: Path) -> subprocess.Popen[str]:
    """Start ``package_process.py``, which imports torch while the files are being made."""
    command = [sys.executable, "-I", str(RUNNER), str(package_path), str(inputs)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=inputs.parent
    )


def decoded(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let the process decode; return its tokens and its imports.

    Raises:
        RuntimeError: the process failed.
    """
    out, errors = process.communicate("decode\n", timeout=_RUNNER_SECONDS)
    if process.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process of the package ended with {process.returncode}: {last}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result

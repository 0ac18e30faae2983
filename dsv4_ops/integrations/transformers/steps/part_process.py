"""A process that compiles parts of a step for another process (``part_processes``).

The process reads jobs from its standard input until the end of the input. It writes one answer when
it is ready, and one per job: the bytes of the part, or None and the reason.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import sys
import time
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from threading import Thread
from typing import Any

_STEPS = "dsv4_ops.integrations.transformers.steps.compiled"
_MODULES = ("torch._dynamo", "torch._inductor.compile_fx", "triton", _STEPS)
"""Modules to import before the first job arrives, because their import takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A part to compile.

    Attributes:
        name: Name of the part.
        call: Function and arguments of the part, as ``calls.packed`` wrote them.
        described: Result of ``compiled.described_call``.
        settings: Settings of ``torch.compile``.
        environment: Result of ``precompiled.environment`` for these settings.
        device: Device of the step.
        state: Result of ``precompiled.state`` for this device.
        precision: Result of ``torch.get_float32_matmul_precision``.
    """

    name: str
    call: bytes
    described: str
    settings: dict[str, Any]
    environment: str
    device: Any
    state: tuple[Any, ...]
    precision: str


def compiled_part(job: Job) -> bytes:
    """Compile a part.

    Raises:
        RuntimeError: a trace in this process would read other settings or another call than a trace
            in the process that sent the job; or the part cannot be saved.
    """
    import torch

    from dsv4_ops.core.checks import checks_are_done
    from dsv4_ops.integrations.transformers.compile_cache import kernel_files, precompiled
    from dsv4_ops.integrations.transformers.compile_cache.calls import unpacked
    from dsv4_ops.integrations.transformers.steps import compiled

    log, lines = logging.getLogger(precompiled.__name__), BufferingHandler(1000)
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    kernel_files.agree_with_workers()
    torch.set_float32_matmul_precision(job.precision)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    with torch.no_grad(), compiled.traces_for_all_sizes():
        call = unpacked(job.call)
        found = {
            "environment": precompiled.environment(job.settings),
            "state": precompiled.state(job.device),
            "described": compiled.described_call(call),
        }
        for name, each in found.items():
            if each != getattr(job, name):
                raise RuntimeError(f"{name} differs: {each} is not {getattr(job, name)}")
        with checks_are_done():
            made = precompiled.compiled(compiled.part_named(job.name), call, job.settings)
    if made is None:
        raise RuntimeError(lines.buffer[-1].getMessage())
    return made[1]


def _answer(job: Job) -> tuple[bytes | None, str]:
    try:
        return compiled_part(job), ""
    except Exception as error:  # the process that sent the job then compiles the part
        return None, f"{type(error).__name__}: {error}"


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Serve jobs. Other output goes to stderr, because answers use the standard output."""
    # a parent that is killed in the middle of a job cannot end this process
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        for name in _MODULES:
            importlib.import_module(name)
        answer: Any = "ready"
        while True:
            pickle.dump(answer, answers)
            answers.flush()
            try:
                job = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            answer = _answer(job)

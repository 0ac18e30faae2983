"""Compile the parts of a step side by side, in processes of their own.

A process costs seconds until it has imported torch, and a CUDA context on the GPU. So processes
start only if a part is missing, and end with the step that started them.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.steps.part_process import Job

_log = logging.getLogger(__name__)

_PROGRAM = (
    "import sys; sys.path[:] = {!r}; "
    "from dsv4_ops.integrations.transformers.steps.part_process import main; main()"
)
_VARIABLE = "DSV4_OPS_COMPILE_PROCESSES"
_MOST = 4
"""Maximum number of processes. The released models have four kinds of layers."""
_CORES = 4
"""Number of cores per process. The caller and its compile workers need most of them."""
_BYTES = 1 << 30
"""Free memory of the GPU per process, for a CUDA context."""
_SECONDS = 120
"""Maximum time to wait for a part. After this time, the caller compiles the part itself."""

_Answer = Future[bytes | None]
_Queue = SimpleQueue[tuple[Job, _Answer] | None]


def num_processes(device: torch.device) -> int:
    """Return the number of processes that the machine and the GPU have space for, but at most
    DSV4_OPS_COMPILE_PROCESSES. Return 0 without a GPU, on fewer than 8 cores, in a frozen program,
    or if TORCHINDUCTOR_COMPILE_THREADS is 1."""
    from dsv4_ops.lowering.workers import available_cores, compile_workers

    is_frozen = getattr(sys, "frozen", False)  # sys.executable is then no interpreter
    if device.type != "cuda" or is_frozen or compile_workers() is None:
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    most = available_cores() // _CORES
    allowed = os.environ.get(_VARIABLE) or str(_MOST)
    if allowed != "off" and not allowed.isdecimal():
        raise argument_error(
            "compile_step",
            _VARIABLE,
            must="be a number of processes, or off",
            got=repr(allowed),
            do="Set it to 0 for none, or unset it",
        )
    limit = 0 if allowed == "off" else int(allowed)
    return 0 if most < 2 else min(limit, _MOST, most, free // _BYTES)


class PartProcesses:
    """Processes that compile parts, each one part at a time.

    Args:
        device: Device of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._processes: list[subprocess.Popen[bytes]] | None = None
        self._answers: dict[str, _Answer] = {}
        self._queue: _Queue = SimpleQueue()

    def are_allowed(self) -> bool:
        """Whether processes run or could start."""
        return bool(self._processes) or num_processes(self._device) > 0

    def start(self) -> bool:
        """Start the processes, unless they run; they import torch in the background. Return whether
        there are any processes."""
        if self._processes is None:
            self._processes = []
            try:
                for _ in range(num_processes(self._device)):
                    self._processes.append(_started())
                    args = self._processes[-1], self._queue
                    Thread(target=_serve, args=args, daemon=True).start()
            # Python's path is unknown, or there is no memory left for a process or a thread
            except (OSError, TypeError, RuntimeError) as error:
                _log.info("a process did not start: %s", error)
        return bool(self._processes)

    def send(self, jobs: Mapping[str, Job]) -> None:
        """Send jobs by key; ``take`` returns their parts."""
        _log.info("%d processes compile %d parts", len(self._processes or ()), len(jobs))
        for key, job in jobs.items():
            self._answers[key] = _Answer()
            self._queue.put((job, self._answers[key]))

    def take(self, key: str) -> bytes | None:
        """Wait for a part, and return its bytes. Return None if no process has begun the part, or
        if the process could not compile it, has ended, or takes too long."""
        answer = self._answers.pop(key, None)
        if answer is None or answer.cancel():
            return None
        try:
            return answer.result(_SECONDS)
        except TimeoutError:
            return None

    def close(self) -> None:
        """End the processes."""
        for process in self._processes or ():
            self._queue.put(None)
            _kill(process)
            process.wait()
        self._processes, self._queue = None, SimpleQueue()
        self._answers.clear()


def _serve(process: Any, queue: _Queue) -> None:
    """Let a process compile jobs until ``close``, or until the process ends."""
    answer = None
    try:
        pickle.load(process.stdout)  # the process is ready
        while (entry := queue.get()) is not None:
            job, answer = entry
            if not answer.set_running_or_notify_cancel():
                continue
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            part, reason = pickle.load(process.stdout)
            if reason:
                _log.info("no process compiled %s: %s", job.name, reason)
            answer.set_result(part)
    except Exception as error:
        _log.info(
            "process %d for parts has ended (%s: %s)", process.pid, type(error).__name__, error
        )
        if answer is not None and answer.running():
            answer.set_result(None)
    finally:
        with suppress(OSError):  # a pipe of a process that has ended
            process.stdin.close()
        process.stdout.close()


def _started() -> subprocess.Popen[bytes]:
    # workers of its own would take longer to start than the few kernels of a part to compile
    workers = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(list(map(str, sys.path)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | workers,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, and the C compiler that it may run."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()

"""Measure greedy decoding: tokens, speed, graphs, host syncs, capture.

A ``Side`` is a model with its cache: stock or ours. This file treats the two sides alike.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UP_STEPS = 3
"""Decode steps before a timing or a capture starts."""
CHUNK_STEPS = 5
"""Decode steps between two readings of the clock."""


class Side(Protocol):
    """A model and its cache, which decode a batch of prompts."""

    prompts: Tensor
    """int64 [num_requests, length]."""
    step: Callable[..., Tensor]
    """Compute logits [num_requests, vocabulary] from the arguments of a decode step."""

    def start(self) -> Tensor:
        """Prefill the prompts into an empty cache; return the logits of their last tokens."""

    def arguments(self, tokens: Tensor) -> tuple[Any, ...]:
        """Return the arguments of ``step`` for the next token of every request, int64
        [num_requests]."""


@dataclass(frozen=True)
class Unmeasured:
    """Why a measurement was not tried."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The error of a measurement that raised."""

    error: str
    """Type and message."""


@dataclass(frozen=True)
class Decoded:
    """Results of the prefill and of every step of a run."""

    tokens: list[list[int]]
    """Greedy tokens of every request."""
    logits: Tensor
    """float32 [steps + 1, num_requests, vocabulary], on the CPU."""


@dataclass(frozen=True)
class Graphs:
    """Result of a compilation of a decode step with ``fullgraph=True``."""

    backend: str
    graphs: int
    breaks: int
    recompiles: int
    """Number of graphs after the first step's graph."""
    limit: int
    """Number of recompiles that torch allows by default."""
    fails_at: int | None
    """Number of the decode step (the first is 1) that raised at the default recompile limit."""
    seconds: float
    """CPU seconds, because other processes run at the same time."""
    tokens: list[list[int]]
    stopped_at: int | None = None
    """Number of the decode step at which the count stopped; None if all steps ran."""


@dataclass(frozen=True)
class Captured:
    """Greedy tokens of steps that replay one CUDA graph."""

    tokens: list[list[int]]


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, or ``Failed`` with the first line of its error."""
    try:
        return call()
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return Failed(f"{type(error).__name__}: {lines[0]}"[:300])


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its compilers."""
    return sum(os.times()[:4])


@torch.no_grad()
def decode(side: Side, steps: int, step: Callable[..., Tensor] | None = None) -> Decoded:
    """Decode greedily from the prompts; ``step`` replaces the step of ``side``."""
    run = step or side.step
    logits = [side.start()]
    for _ in range(steps):
        logits.append(run(*side.arguments(logits[-1].argmax(-1))).clone())
    stacked = torch.stack(logits).float().cpu()
    return Decoded(tokens=_tokens(stacked), logits=stacked)


@torch.no_grad()
def tokens_per_second(side: Side, steps: int, step: Callable[..., Tensor] | None = None) -> float:
    """Return the tokens per second of decode steps, after the prefill and a warm-up.

    The speed is the best of several chunks of steps, because other processes may use the machine.
    Tokens stay on the device.
    """
    run = step or side.step
    logits = side.start()
    for _ in range(WARM_UP_STEPS):
        logits = run(*side.arguments(logits.argmax(-1)))
    speeds = []
    for _ in range(max(1, (steps - WARM_UP_STEPS) // CHUNK_STEPS)):
        _finish(logits.device)
        start = time.perf_counter()
        for _ in range(CHUNK_STEPS):
            logits = run(*side.arguments(logits.argmax(-1)))
        _finish(logits.device)
        speeds.append(len(logits) * CHUNK_STEPS / (time.perf_counter() - start))
    return max(speeds)


@torch.no_grad()
def count_graphs(
    side: Side,
    steps: int,
    *,
    backend: str,
    limit: int = 256,
    enough: int | None = None,
    compiled: Callable[..., Tensor] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Graphs:
    """Compile the step of ``side`` with ``fullgraph=True``, and count graphs while it decodes.

    The run starts with torch's recompile limit; if torch raises, the run continues with ``limit``.

    Args:
        side: The side to compile.
        steps: Decode steps.
        backend: Backend of ``torch.compile``; the number of graphs does not depend on it.
        limit: Maximum number of graphs.
        enough: Number of graphs after which to stop; None runs all steps.
        compiled: The result of ``torch.compile(side.step, ...)``, if the caller needs it later.
        progress: Prints a line for every graph.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    run = compiled or torch.compile(side.step, fullgraph=True, backend=backend)
    torch._dynamo.reset()
    default, fails_at, stopped_at, counts = config.recompile_limit, None, None, []
    start = cpu_seconds()
    with ExitStack() as stack, _quiet_dynamo(), _counted() as counters:
        logits = [side.start()]
        for number in range(1, steps + 1):
            arguments = side.arguments(logits[-1].argmax(-1))
            try:
                result = run(*arguments)
            except FailOnRecompileLimitHit:
                fails_at = number
                reached = f"step {number} reaches torch's recompile limit of {default}"
                progress(f"{reached}; counting goes on with {limit}")
                changed: dict[str, Any] = {
                    "recompile_limit": limit,
                    "accumulated_recompile_limit": limit,
                }
                stack.enter_context(config.patch(**changed))
                result = run(*arguments)
            logits.append(result.clone())
            counts.append(counters["stats"]["unique_graphs"])
            if counts[-1:] != counts[-2:-1]:
                progress(f"step {number}: {counts[-1]} graphs")
            if counts[-1] == enough and number < steps:
                stopped_at = number
                break
        breaks = sum(counters["graph_break"].values())
    return Graphs(
        backend=backend,
        graphs=counts[-1],
        breaks=breaks,
        recompiles=counts[-1] - counts[0],
        limit=default,
        fails_at=fails_at,
        seconds=cpu_seconds() - start,
        tokens=_tokens(torch.stack(logits)),
        stopped_at=stopped_at,
    )


@torch.no_grad()
def host_syncs(side: Side, steps: int, step: Callable[..., Tensor] | None = None) -> float:
    """Return the host synchronisations per decode step that CUDA reports; the tokens stay on the
    device."""
    run = step or side.step
    logits = side.start()
    for _ in range(WARM_UP_STEPS):
        logits = run(*side.arguments(logits.argmax(-1)))
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps - WARM_UP_STEPS):
                logits = run(*side.arguments(logits.argmax(-1)))
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    found = [entry for entry in caught if "synchroniz" in str(entry.message)]
    return len(found) / (steps - WARM_UP_STEPS)


@torch.no_grad()
def capture(side: Side, steps: int, step: Callable[..., Tensor] | None = None) -> Captured:
    """Capture one decode step in a CUDA graph, and replay the graph for the other steps.

    The first steps run without a graph. Before a replay, only the tensors among the arguments get
    new values, in place.

    Raises:
        RuntimeError: the step cannot be captured.
    """
    run = step or side.step
    logits = [side.start()]
    with _side_stream():
        for _ in range(min(WARM_UP_STEPS, steps)):
            logits.append(run(*side.arguments(logits[-1].argmax(-1))).clone())
    arguments = side.arguments(logits[-1].argmax(-1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(*arguments)
    while len(logits) <= steps:
        graph.replay()
        logits.append(result.clone())
        if len(logits) <= steps:
            _renew(arguments, side.arguments(logits[-1].argmax(-1)))
    return Captured(tokens=_tokens(torch.stack(logits)))


def _renew(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    from torch.utils import _pytree as pytree

    for was, now in zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True):
        if isinstance(was, Tensor) and was.data_ptr() != now.data_ptr():
            was.copy_(now)


def _tokens(logits: Tensor) -> list[list[int]]:
    tokens: list[list[int]] = logits.argmax(-1).T.tolist()
    return tokens


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def _counted() -> Iterator[Any]:
    from torch._dynamo.utils import counters

    counters.clear()
    yield counters


@contextmanager
def _quiet_dynamo() -> Iterator[None]:
    """Suppress the warning at the recompile limit, which is reported as a result."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

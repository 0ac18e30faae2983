"""Continuous batching over a ``PagedCache``: which tokens of which requests a step computes.

The device runs one step of fixed shape over and over; everything that changes is decided here, on
the host, and reaches the device as the values of four small tensors (``StepBatch``). Policy:

- decodes first, one token each; prompts fill the rest of the step's token budget in chunks;
- first come, first served; a request starts once there are a row and blocks for all that it stores;
- a request that grows into a block that is not there preempts the youngest one: that one gives its
  blocks back, waits at the head of the queue, and later computes its tokens again.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from dsv4_ops.integrations.transformers import OutOfBlocks, PagedCache, StepBatch


@dataclass(eq=False)
class Request:
    """A request: its prompt and state."""

    name: int
    prompt: list[int]
    max_new: int
    output: list[int] = field(default_factory=list)
    stored: int = 0  # tokens that the cache holds
    preempted: int = 0
    status: str = "waiting"  # then "running", and in the end "finished" or "cancelled"

    @property
    def tokens(self) -> list[int]:
        """All known tokens; those after ``stored`` are not computed yet."""
        return self.prompt + self.output

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while decoding."""
        return len(self.prompt) + len(self.output) - self.stored


@dataclass(frozen=True)
class Plan:
    """A step. ``counts``: tokens of each request; ``samples``: the requests whose next token this
    step gives, with the row of the logits that says it."""

    batch: StepBatch
    counts: dict[Request, int]
    samples: list[tuple[Request, int]]


class Scheduler:
    """Requests in, steps out.

    Args:
        cache: With ``num_blocks`` for a shared pool. A step has ``max_batch_size`` requests.
        num_tokens: Tokens of a step, padding included; at least one more than requests, so that
            prompts make progress beside any number of decodes.
        stop: Token that ends an output early.
    """

    def __init__(self, cache: PagedCache, *, num_tokens: int, stop: int | None = None) -> None:
        if num_tokens <= cache.max_batch_size:
            raise ValueError(
                f"Scheduler: num_tokens must be more than the {cache.max_batch_size} rows of the "
                f"cache, got {num_tokens}."
            )
        self.cache, self.num_tokens, self.stop = cache, num_tokens, stop
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.waits_for_blocks = 0  # steps in which the head of the queue did
        self.preemptions = 0

    def submit(self, request: Request) -> None:
        """Queue a request; raise if it could never fit."""
        most = min(self.cache.max_cache_len, self.cache.num_blocks * self._block)
        length = len(request.prompt) + request.max_new
        if not request.prompt or request.max_new < 1 or length > most:
            raise ValueError(
                f"submit: a request must have a prompt and an output of together at most {most} "
                f"tokens, got {len(request.prompt)} and {request.max_new}."
            )
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request; a finished one stays as it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._release(request)
        else:
            return
        request.status = "cancelled"

    def plan(self) -> Plan | None:
        """Plan the next step, or return None if there is none. Follow it with ``commit``."""
        counts: dict[Request, int] = {}
        for request in [r for r in self.running if r.left == 1]:  # preempts only those after it
            if self._reserve(request):
                counts[request] = 1
        budget = self.num_tokens - len(counts)
        for request in [r for r in self.running if r not in counts]:
            budget -= self._chunk(request, budget, counts)
        while budget and self.waiting and self._start():
            budget -= self._chunk(self.running[-1], budget, counts)
        return self._as_plan(counts) if counts else None

    def commit(self, plan: Plan, next_tokens: list[int]) -> list[Request]:
        """Take the results of a step, ``next_tokens`` of every row of its logits; return the
        requests that it finished."""
        for request, count in plan.counts.items():
            request.stored += count
        finished = []
        for request, row in plan.samples:
            request.output.append(next_tokens[row])
            if len(request.output) == request.max_new or request.output[-1] == self.stop:
                self._release(request)
                request.status = "finished"
                finished.append(request)
        return finished

    @property
    def _block(self) -> int:
        return self.cache.spec.layers.attention.block_tokens

    def _chunk(self, request: Request, budget: int, counts: dict[Request, int]) -> int:
        count = min(budget, request.left, self.cache.max_chunk)
        if count:
            counts[request] = count
        return count

    def _start(self) -> bool:
        """Admit the head of the queue if there is capacity."""
        request = self.waiting[0]
        try:
            self.cache.add(request.name, len(request.tokens))
        except OutOfBlocks:
            self.waits_for_blocks += len(self.running) < self.cache.max_batch_size
            return False
        request.status = "running"
        self.running.append(self.waiting.popleft())
        return True

    def _reserve(self, request: Request) -> bool:
        """Reserve a block for the next token; False if ``request`` was preempted."""
        while request.status == "running":
            with suppress(OutOfBlocks):
                self.cache.reserve(request.name, request.stored + 1)
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status, request.stored = "waiting", 0
        request.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.free(request.name)

    def _as_plan(self, counts: dict[Request, int]) -> Plan:
        tokens, starts, lens, rows, samples = [], [0], [], [], []
        for request, count in counts.items():
            tokens += request.tokens[request.stored : request.stored + count]
            starts.append(len(tokens))
            lens.append(request.stored + count)
            rows.append(self.cache.requests[request.name])
            if count == request.left:
                samples.append((request, len(tokens) - 1))
        padding = self.cache.max_batch_size - len(rows)
        batch = StepBatch(
            torch.tensor(tokens + [0] * (self.num_tokens - len(tokens))),
            _int32(starts + starts[-1:] * padding),
            _int32(lens + [0] * padding),
            _int32(rows + [-1] * padding),
        )
        move = self.cache.device
        return Plan(
            StepBatch(*(tensor.to(move) for tensor in vars(batch).values())), counts, samples
        )


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)

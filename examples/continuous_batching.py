"""To serve a model, use ``generate_batch``, ``dsv4_ops serve`` or vLLM (docs/engines.md).

This scheduler is an example to read. It decides which tokens of which requests a step computes.
The device repeats one step of fixed shape, whose inputs are four small tensors with the decisions:

- Decodes come first, one token each; chunks of prompts fill the rest of the step.
- Requests start in the order of their arrival, when a row and blocks for their tokens are free.
- If no block is left for a request's next token, the youngest request is preempted: it gives its
  row and blocks back, waits at the head of the queue, and computes all of its tokens again.
"""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import torch

from dsv4_ops.integrations.transformers import OutOfBlocks, PagedCache, StepBatch


@dataclass(eq=False)
class Request:
    """A text that grows to ``length`` tokens; the cache holds the first ``stored`` of them."""

    name: int
    tokens: list[int]
    length: int
    stored: int = 0

    @property
    def left(self) -> int:
        """Number of tokens to compute before the next token can be chosen: 1 in a decode."""
        return len(self.tokens) - self.stored


class Scheduler:
    """Plans steps of ``num_tokens`` tokens for requests that share the blocks of a cache."""

    def __init__(self, cache: PagedCache, num_tokens: int) -> None:
        self.cache, self.num_tokens = cache, num_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.counts: dict[Request, int] = {}  # tokens of each request in the planned step

    def plan(self) -> StepBatch | None:
        """Return the next step, or None if no request runs. Pass its next tokens to ``commit``."""
        self.counts = {}
        for request in sorted(self.running, key=lambda each: each.left > 1):  # decodes first
            if request in self.running and self._reserve(request):
                self._count(request)
        with suppress(OutOfBlocks):  # then the first of the queue waits
            while self.waiting and sum(self.counts.values()) < self.num_tokens:
                self.cache.add(self.waiting[0].name, len(self.waiting[0].tokens))
                self.running.append(self.waiting.popleft())
                self._count(self.running[-1])
        return self._batch() if self.counts else None

    def commit(self, next_tokens: list[int]) -> None:
        """Add the next token of each request in the step, and free the requests that end."""
        row = -1
        for request, count in self.counts.items():
            row += count
            request.stored += count
            if request.left == 0:
                request.tokens.append(next_tokens[row])
            if len(request.tokens) == request.length:
                self.running.remove(request)
                self.cache.free(request.name)

    def _reserve(self, request: Request) -> bool:
        """Reserve blocks for the request's tokens; return False if the request is preempted."""
        wanted = request.name, len(request.tokens)
        while self.cache.lacking_blocks(*wanted) > self.cache.num_free_blocks:
            youngest = self.running.pop()
            self.cache.free(youngest.name)
            youngest.stored = 0
            self.waiting.appendleft(youngest)
            if youngest is request:
                return False
        self.cache.reserve(*wanted)
        return True

    def _count(self, request: Request) -> None:
        room = self.num_tokens - sum(self.counts.values())
        if count := min(room, request.left, self.cache.max_chunk):
            self.counts[request] = count

    def _batch(self) -> StepBatch:
        tokens, starts, lens, rows = [], [0], [], []
        for request, count in self.counts.items():
            lens.append(request.stored + count)
            tokens += request.tokens[request.stored : lens[-1]]
            starts.append(len(tokens))
            rows.append(self.cache.requests[request.name])
        padding = self.cache.max_batch_size - len(rows)
        values = (starts + starts[-1:] * padding, lens + [0] * padding, rows + [-1] * padding)
        ids = torch.tensor(tokens + [0] * (self.num_tokens - len(tokens)))
        batch = (ids, *(torch.tensor(each, dtype=torch.int32) for each in values))
        return StepBatch(*(each.to(self.cache.device) for each in batch))

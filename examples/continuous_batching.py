"""A scheduler for continuous batching over a ``PagedCache``, written for readers: it decides which
tokens of which requests a step computes.

To serve a model, use ``model.generate_batch(prompts)``, ``python -m dsv4_ops serve MODEL`` or vLLM
(docs/engines.md).

The device repeats one step of fixed shape. The scheduler decides on the host, by these rules, and
its decisions reach the device as the values of four small tensors (``StepBatch``):

- Decodes come first, one token each; chunks of prompts fill the rest of the step.
- Requests start in the order of their arrival, when a row and blocks for their tokens are free.
- If no block is left for a request's next token, the youngest request is preempted: it gives its
  row and blocks back, waits at the head of the queue, and computes all of its tokens again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from dsv4_ops.integrations.transformers import OutOfBlocks, PagedCache, StepBatch


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens that were generated after it."""

    name: int
    prompt: list[int]
    max_new: int
    output: list[int] = field(default_factory=list)
    stored: int = 0  # tokens that the cache holds

    @property
    def tokens(self) -> list[int]:
        """All known tokens; those after ``stored`` are not computed yet."""
        return self.prompt + self.output

    @property
    def left(self) -> int:
        """Number of tokens to compute before the next token can be chosen: 1 while decoding."""
        return len(self.prompt) + len(self.output) - self.stored


class Scheduler:
    """Plans steps for requests.

    Args:
        cache: A cache with ``num_blocks`` shared blocks, enough for the longest request.
        num_tokens: Number of tokens of a step, more than the cache has rows.
    """

    def __init__(self, cache: PagedCache, num_tokens: int) -> None:
        self.cache, self.num_tokens = cache, num_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.counts: dict[Request, int] = {}  # tokens of each request in the planned step

    def plan(self) -> StepBatch | None:
        """Return the next step, or None without requests. Pass its results to ``commit``."""
        self.counts = {}
        for request in [each for each in self.running if each.left == 1]:
            if request in self.running and self._reserve(request):
                self.counts[request] = 1
        for request in [each for each in self.running if each not in self.counts]:
            self._take_chunk(request)
        while self.waiting and sum(self.counts.values()) < self.num_tokens and self._start():
            self._take_chunk(self.running[-1])
        return self._batch() if self.counts else None

    def commit(self, next_tokens: list[int]) -> list[Request]:
        """Add the next token of each request in the step; return the requests that have ended."""
        row, ended = -1, []
        for request, count in self.counts.items():
            row += count
            is_whole = count == request.left
            request.stored += count
            if is_whole:
                request.output.append(next_tokens[row])
            if len(request.output) == request.max_new:
                self._release(request)
                ended.append(request)
        return ended

    def _take_chunk(self, request: Request) -> None:
        room = self.num_tokens - sum(self.counts.values())
        count = min(room, request.left, self.cache.max_chunk)
        if count:
            self.counts[request] = count

    def _start(self) -> bool:
        """Start the first request of the queue if a row and blocks are free for its tokens."""
        try:
            self.cache.add(self.waiting[0].name, len(self.waiting[0].tokens))
        except OutOfBlocks:
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _reserve(self, request: Request) -> bool:
        """Reserve a block for the next token; return False if the request itself is preempted."""
        tokens = request.stored + 1
        while self.cache.lacking_blocks(request.name, tokens) > self.cache.num_free_blocks:
            youngest = self.running[-1]
            self._release(youngest)
            youngest.stored = 0
            self.waiting.appendleft(youngest)
            if youngest is request:
                return False
        self.cache.reserve(request.name, tokens)
        return True

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.free(request.name)

    def _batch(self) -> StepBatch:
        tokens, starts, lens, rows = [], [0], [], []
        for request, count in self.counts.items():
            tokens += request.tokens[request.stored : request.stored + count]
            starts.append(len(tokens))
            lens.append(request.stored + count)
            rows.append(self.cache.requests[request.name])
        padding = self.cache.max_batch_size - len(rows)
        values = (starts + starts[-1:] * padding, lens + [0] * padding, rows + [-1] * padding)
        ids = torch.tensor(tokens + [0] * (self.num_tokens - len(tokens)))
        batch = (ids, *(torch.tensor(each, dtype=torch.int32) for each in values))
        return StepBatch(*(each.to(self.cache.device) for each in batch))

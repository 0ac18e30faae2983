"""Run many decode steps of one graph while requests arrive, end and are preempted.

A preempted request loses its blocks, and starts again later. Prompts run one token per step. At
the end, the last logits of one preempted request are compared with its logits when it runs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

_PREEMPTED, _LONGEST = 0.03, 200


@dataclass
class _Request:
    name: int
    tokens: list[int]
    done: int = 0


class Soak:
    """Runs requests that come and go; ``step`` returns the logits of ``batch``."""

    def __init__(self, cache: Any, batch: Any, step: Any) -> None:
        self.cache, self.batch, self.step = cache, batch, step
        self.slots = len(batch.rows)
        self.arrivals = self.preemptions = self.tokens = 0

    def run(self, steps: int) -> float:
        """Run the steps; return the error of one request's logits, relative to their norm."""
        random, waiting, running = Random(1), list[_Request](), list[_Request]()
        longest = max(min(_LONGEST, steps // 4, self.cache.max_cache_len), 2)
        watched, found = self._arrived(random, longest, longest), None
        waiting.append(watched)
        was_preempted = False
        for _ in range(steps):
            if len(waiting) < self.slots:
                waiting.append(self._arrived(random, 2, longest))
            while waiting and len(running) < self.slots:
                running.append(waiting.pop(0))
                self.cache.add(running[-1].name, len(running[-1].tokens))
            logits = self._step(running)
            if watched in running and watched.done == longest:
                found = logits[running.index(watched)].clone()
            half_done = watched in running and watched.done == longest // 2
            lost = [each for each in running if random.random() < _PREEMPTED and each != watched]
            if half_done and not was_preempted:
                lost.append(watched)
                was_preempted = True
            for each in lost:
                each.done = 0
                waiting.append(each)
            self.preemptions += len(lost)
            ended = [each for each in running if each.done == len(each.tokens)]
            for each in (*lost, *(one for one in ended if one not in lost)):
                self.cache.free(each.name)
                running.remove(each)
        for each in running:
            self.cache.free(each.name)
        if found is None:
            raise RuntimeError(f"soak: the first request does not end in {steps} steps")
        alone = self._alone(watched)
        return float((found - alone).norm() / alone.norm())

    def _arrived(self, random: Random, least: int, most: int) -> _Request:
        self.arrivals += 1
        tokens = [random.randrange(3, 250) for _ in range(random.randint(least, most))]
        return _Request(self.arrivals, tokens)

    def _alone(self, request: _Request) -> Tensor:
        request.done = 0
        self.cache.add(request.name, len(request.tokens))
        logits = self._step([request])
        while request.done < len(request.tokens):
            logits = self._step([request])
        self.cache.free(request.name)
        return logits[0].clone()

    def _step(self, running: Sequence[_Request]) -> Tensor:
        """Run a step with the next token of each request, and padding in the rest of the batch."""
        count, padding = len(running), [0] * (self.slots - len(running))
        tokens = [each.tokens[each.done] for each in running] + padding
        for each in running:
            each.done += 1
        rows = [self.cache.requests[each.name] for each in running] + [-1] * len(padding)
        values = (
            (self.batch.tokens, tokens),
            (self.batch.query_start_loc, [min(n, count) for n in range(self.slots + 1)]),
            (self.batch.seq_lens, [each.done for each in running] + padding),
            (self.batch.rows, rows),
        )
        for tensor, new in values:
            tensor.copy_(torch.tensor(new, dtype=tensor.dtype))
        self.tokens += count
        logits: Tensor = self.step()
        return logits

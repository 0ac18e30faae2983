"""Server traffic: arrival times, lengths and cancellations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from continuous_batching.scheduler import Request
from dsv4_ops.testing.text import BOS, real_text


@dataclass(frozen=True)
class Workload:
    """Poisson arrivals; log-normal lengths of prompts and outputs; some users leave before they are
    served.

    Medians and spreads (``sigma``, of the logarithm) keep the shape of traces of chats, scaled to
    what a small cache holds: most requests are short, a few ten times as long. Some prompts bring a
    document with them: nearly a block of 256 tokens, which their outputs then overflow.
    """

    per_step: float = 0.13
    prompt_median: float = 20.0
    prompt_sigma: float = 1.0
    documents: float = 0.2
    document_median: float = 235.0
    document_sigma: float = 0.1
    output_median: float = 16.0
    output_sigma: float = 0.9
    most_prompt: int = 340
    most_output: int = 160
    cancelled: float = 0.1
    patience: int = 60

    def arrivals(self, seed: int) -> Iterator[tuple[float, Request, float | None]]:
        """Yield forever: arrival step, request, and cancellation step or None."""
        rng, text = Random(seed), real_text(100_000).encode()
        step, name = 0.0, 0
        while True:
            step += rng.expovariate(self.per_step)
            kind = "document" if rng.random() < self.documents else "prompt"
            median, sigma = getattr(self, f"{kind}_median"), getattr(self, f"{kind}_sigma")
            length = _length(rng, median, sigma, self.most_prompt)
            start = rng.randrange(len(text) - length)
            prompt = [BOS, *text[start : start + length - 1]]
            output = _length(rng, self.output_median, self.output_sigma, self.most_output)
            leaves = step + rng.random() * self.patience if rng.random() < self.cancelled else None
            yield step, Request(name, prompt, output), leaves
            name += 1


def _length(rng: Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))

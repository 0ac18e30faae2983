"""Fuzz a step: hypothesis splits requests into ragged steps, and no split may change a token's
logits.

Whatever a scheduler does - chunks, decodes, padding, idle requests, garbage in padding - the logits
of a token depend only on the text up to this token. So this script samples schedules, with chunks
around critical sizes (1, the ratio 4, the window and ratio 128), runs them, and compares the logits
of each token with one forward of Hugging Face's model. To test your own step, replace ``step``.

The script then fuzzes a step with a planted bug: hypothesis finds the bug, and shrinks the schedule
to the shortest one that fails.

    python examples/06_fuzz_your_model.py --examples 20
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import Tensor

from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model

REQUESTS, LENGTH = 2, 136
CLOSE = 1e-4  # tolerance of logits, whose standard deviation is one
SETTINGS = settings(
    deadline=None, database=None, derandomize=True, report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
)  # fmt: skip
Step = Callable[[object, v4.StepBatch, v4.CacheTensors], Tensor]


@dataclass(frozen=True)
class Sampled:
    """A step: the tokens of each request, the padding tokens after them, and the values that fill
    the padding."""

    counts: tuple[int, ...]
    padding: int = 0
    garbage: int = 0


def schedules(max_chunk: int) -> st.SearchStrategy[list[Sampled]]:
    """Return a strategy for steps with chunks of at most ``max_chunk`` tokens."""
    edges = sorted({min(size, max_chunk) for size in (0, 1, 2, 3, 4, 5, 7, 127, 128, 129)})
    counts = st.tuples(*[st.sampled_from(edges)] * REQUESTS)
    garbage = st.sampled_from([0, -1, 7, 2**31 - 1, -(2**31)])
    return st.lists(st.builds(Sampled, counts, st.integers(0, 2), garbage), min_size=1, max_size=5)


class Check:
    """Compares a model's step with Hugging Face's logits."""

    def __init__(self, step: Step, device: str) -> None:
        self.step, self.device, self.ran = step, device, 0
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(0, 256, (REQUESTS, LENGTH), generator=generator).to(device)
        stock = small_model(device=device)
        self.expected = stock(self.text, use_cache=False).logits
        self.model = v4.patch(stock, kv="fp32", precision="reference")
        self.cache = v4.PagedCache.for_model(stock, max_batch_size=REQUESTS, max_cache_len=LENGTH)

    @torch.no_grad()
    def schedule(self, steps: list[Sampled]) -> None:
        """Run ``steps``, beginning with empty requests; raise at the first wrong token."""
        self.ran += 1
        done = [0] * REQUESTS
        for sampled in steps:
            counts = [min(n, LENGTH - d) for n, d in zip(sampled.counts, done, strict=True)]
            logits = self.step(self.model, self.batch(counts, done, sampled), self.cache.tensors)
            place = 0
            for request, count in enumerate(counts):
                for token in range(done[request], done[request] + count):
                    apart = (logits[place] - self.expected[request, token]).abs().max().item()
                    assert apart <= CLOSE, (
                        f"request {request}, token {token} is off by {apart:.2g} in {steps}"
                    )
                    place += 1
                done[request] += count
        self.cache.raise_if_dropped()

    def batch(self, counts: list[int], done: list[int], sampled: Sampled) -> v4.StepBatch:
        """Return the next tokens of every request; a request may have none."""
        starts, lens, rows, tokens = [0], [], [], []
        for request, count in enumerate(counts):
            tokens += self.text[request, done[request] : done[request] + count].tolist()
            starts.append(len(tokens))
            lens.append(done[request] + count)
            rows.append(request)
        for _ in range(sampled.padding):  # a row that the cache does not have marks padding
            tokens.append(sampled.garbage)
            starts.append(len(tokens))
            lens.append(sampled.garbage)
            rows.append(sampled.garbage if sampled.garbage not in rows else -1)
        tokens += [0] * (not tokens)
        return v4.StepBatch(
            torch.tensor(tokens, device=self.device),
            *(torch.tensor(x, dtype=torch.int32, device=self.device) for x in (starts, lens, rows)),
        )

    def fuzz(self, examples: int, max_chunk: int) -> str | None:
        """Return the failure of the shortest schedule that hypothesis finds, or None."""

        @settings(SETTINGS, max_examples=examples)
        @given(schedules(max_chunk))
        def run(steps: list[Sampled]) -> None:
            self.schedule(steps)

        try:
            run()
        except AssertionError as error:
            return str(error).splitlines()[0]
        return None


def forgetful(model: object, batch: v4.StepBatch, cache: v4.CacheTensors) -> Tensor:
    """Run a step with the planted bug: clear the states, which hold incomplete groups of 4."""
    for layer in cache.layers:
        if layer.states is not None:
            layer.states.zero_()
    return v4.decode_step(model, batch, cache)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=bounded_int(1), default=12, help="schedules to draw")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"drawing {args.examples} schedules for decode_step", flush=True)
    good = Check(v4.decode_step, args.device)
    wrong = good.fuzz(args.examples, max_chunk=129)
    print(f"  {good.ran} schedules ran: {wrong or 'every token as it should be'}", flush=True)
    print("the same for a step with a bug", flush=True)
    bad = Check(forgetful, args.device)
    found = bad.fuzz(100, max_chunk=5)
    print(f"  {bad.ran} schedules ran, the last ones to shrink it: {found}")
    if wrong or not found:
        print("FAILED: " + (wrong or "the planted bug was not found"))
        return 1
    print(
        f"shown: {good.ran} schedules of decode_step are right; the planted bug shrinks to: {found}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

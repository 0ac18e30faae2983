"""Show how continuous batching works. To serve a model, use an engine of docs/engines.md instead.

The scheduler in ``continuous_batching.py`` is short enough to read. Requests come and go, and
blocks run out, so that requests wait, or are preempted and start again. One compiled step of fixed
shape serves every batch. At the end each request runs again alone, and all its logits must have the
same bits.

    python examples/05_continuous_batching.py
    python examples/05_continuous_batching.py --requests 60
    python examples/05_continuous_batching.py --eager          # no compiler
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from random import Random

# idle threads must not spin: they would take the core from the compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from continuous_batching import Request, Scheduler
from torch import Tensor
from torch._dynamo.utils import counters

from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.text import real_text

# the number of tokens in a step must be a multiple of 8: PyTorch's eager kernels round a tensor's
# last numbers differently if they do not fill a SIMD vector
TOKENS = 16
SIZES = {"max_batch_size": 6, "max_cache_len": 512, "max_chunk": TOKENS, "num_blocks": 4}


def run(
    scheduler: Scheduler, requests: list[Request], step: Callable[[v4.StepBatch], Tensor]
) -> tuple[dict[int, list[Tensor]], int]:
    """Run requests that arrive one by one, every four steps; return the logits of each request,
    and the number of preemptions."""
    logits: dict[int, list[Tensor]] = {request.name: [] for request in requests}
    arriving, number, preempted = list(requests), 0, 0
    while arriving or scheduler.waiting or scheduler.running:
        if arriving and number % 4 == 0:
            scheduler.waiting.append(arriving.pop(0))
        before = len(scheduler.running)
        batch = scheduler.plan()
        preempted += before > len(scheduler.running)
        number += 1
        if batch is None:
            continue
        results, row = step(batch), -1
        for request, count in scheduler.counts.items():
            row += count
            if count == request.left:
                logits[request.name].append(results[row].clone())
        scheduler.commit(results.argmax(-1).tolist())
    return logits, preempted


def sampled(count: int, seed: int) -> list[Request]:
    """Sample short prompts, and documents whose answers need another block."""
    random, text = Random(seed), real_text(100_000).encode()
    requests = []
    for name in range(count):
        length = random.choice((random.randint(1, 30), random.randint(246, 256)))
        start = random.randrange(len(text) - length)
        prompt, new = [*text[start : start + length]], random.randint(1, 30)
        requests.append(Request(name, prompt, length + new))
    return requests


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=bounded_int(1), default=24)
    parser.add_argument("--seed", type=bounded_int(0), default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = small_model(device=args.device)
    model = v4.patch(model, kv="fp32", precision="reference", batch_invariant=True)
    cache = v4.PagedCache.for_model(model, **SIZES)
    decode: Callable[..., Tensor] = v4.decode_step
    if not args.eager:
        decode = torch.compile(v4.decode_step, fullgraph=True, dynamic=False)
        print("the first step compiles: minutes, unless Inductor's cache has it", flush=True)

    def step(batch: v4.StepBatch) -> Tensor:
        return decode(model, batch, cache.tensors)

    requests, again = (sampled(args.requests, args.seed) for _ in range(2))
    logits, preempted = run(Scheduler(cache, TOKENS), requests, step)
    print(f"{len(requests)} requests have ended; one was preempted {preempted} times", flush=True)
    cache.raise_if_dropped()
    differ = 0
    for request in again:
        alone, _ = run(Scheduler(cache, TOKENS), [request], step)
        pairs = zip(alone[request.name], logits[request.name], strict=True)
        differ += not all(torch.equal(*pair) for pair in pairs)
    graphs, free = counters["stats"]["unique_graphs"], cache.num_free_blocks
    print(
        f"shown: {graphs} graphs for all steps, {free} of {cache.num_blocks} blocks free again, "
        f"{differ} of {len(requests)} requests differ in a bit from each alone"
    )
    return int(bool(differ) or free != cache.num_blocks or graphs != (not args.eager))


if __name__ == "__main__":
    raise SystemExit(main())

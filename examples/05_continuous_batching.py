"""Continuous batching: requests come and go, one compiled step of fixed shape serves them all.

This teaches what an engine does. To serve a model, use ``model.generate_batch(prompts)``,
``python -m dsv4_ops serve MODEL``, or an engine such as vLLM (docs/engines.md).

Requests arrive at random (Poisson), with log-normal lengths; some are cancelled; blocks run out,
and then requests wait or are preempted and start again. The scheduler, in ``continuous_batching/``,
puts decodes first and fills the rest of each step's token budget with chunks of prompts. Whatever
the batch is, the device runs the same graph: nothing is ever compiled again.

    python examples/05_continuous_batching.py                  # 200 steps
    python examples/05_continuous_batching.py --steps 1000 --check --plot blocks.png
    python examples/05_continuous_batching.py --eager          # no compiler

``--check`` runs every finished request again, alone, and compares the bits of all logits.
"""

from __future__ import annotations

import argparse
import os
import time

# waiting threads that spin would take the core from the compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from continuous_batching.engine import Engine
from continuous_batching.report import Record
from continuous_batching.scheduler import Request, Scheduler
from continuous_batching.workload import Workload
from torch._dynamo.utils import counters

# of a step: requests, tokens; of a request: tokens. PyTorch's eager kernels round the last numbers
# of a tensor otherwise where these do not fill a vector, so that bits need a multiple of 8 tokens.
ROWS, TOKENS, MAX_LEN = 6, 16, 512
BLOCKS = 4  # of 256 tokens: not enough for six requests


def serve(engine: Engine, args: argparse.Namespace) -> tuple[Record, Scheduler]:
    """Run ``args.steps`` steps with arrivals, then until all requests have finished."""
    scheduler, record, leaving = engine.scheduler(), Record(), []
    arrivals = Workload(per_step=args.rate).arrivals(args.seed)
    arrival, request, leaves = next(arrivals)
    number, begun = 0, None
    while number < args.steps or scheduler.running or scheduler.waiting:
        while arrival <= number < args.steps:
            scheduler.submit(request)
            record.requests.append(request)
            leaving += [] if leaves is None else [(leaves, request)]
            arrival, request, leaves = next(arrivals)
        for gives_up, gone in leaving:
            if gives_up <= number:
                scheduler.cancel(gone)  # nothing, if it has ended
        plan = scheduler.plan()
        if plan is not None:
            record.finished += engine.run(scheduler, plan)
            record.tokens += sum(plan.counts.values()) if begun else 0
            begun = begun or time.perf_counter()  # the first step compiles
        record.after_step(scheduler)
        number += 1
        if number % args.every == 0:
            print(record.line(scheduler), flush=True)
    record.seconds = time.perf_counter() - (begun or time.perf_counter())
    return record, scheduler


def differ_alone(engine: Engine, finished: list[Request], every: int) -> tuple[int, int]:
    """Run each request alone in steps of the same shape. How many get another token, and how many
    another bit in any of their logits."""
    shared, tokens, bits = engine.digests or {}, 0, 0
    for place, request in enumerate(finished, 1):
        engine.digests = {}
        scheduler, alone = engine.scheduler(), Request(0, request.prompt, request.max_new)
        scheduler.submit(alone)
        while (plan := scheduler.plan()) is not None:
            engine.run(scheduler, plan)
        tokens += alone.output != request.output
        bits += engine.digests[0] != shared[request.name]
        if place % every == 0:
            print(f"ran {place} of {len(finished)} requests alone", flush=True)
    return tokens, bits


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps in which requests arrive")
    parser.add_argument("--rate", type=float, default=0.13, help="requests per step")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--every", type=int, default=50, help="steps between lines")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--check", action="store_true", help="run every request again, alone")
    parser.add_argument("--plot", help="picture of blocks and queue, needs matplotlib")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    sizes = {
        "max_batch_size": ROWS,
        "max_cache_len": MAX_LEN,
        "max_chunk": TOKENS,
        "num_blocks": BLOCKS,
    }
    engine = Engine(sizes, TOKENS, device=args.device, eager=args.eager, digests=args.check)
    if not args.eager:
        print(
            "the first step compiles: a minute or two, unless Inductor's cache has it", flush=True
        )
    record, scheduler = serve(engine, args)
    print(record.summary(scheduler))
    engine.cache.raise_if_dropped()
    if args.plot:
        record.plot(args.plot, BLOCKS)
        print(f"plot: {args.plot}")
    failed, free = [], engine.cache.num_free_blocks
    if free != BLOCKS or engine.cache.requests:
        failed.append(f"{BLOCKS - free} blocks leaked")
    if record.growth() > 20:
        failed.append("memory grows")
    checked = ""
    if args.check:
        tokens, bits = differ_alone(engine, record.finished, args.every)
        checked = f", logits of {len(record.finished)} requests bit-equal to each alone"
        if not record.finished:
            failed.append("no request finished")
        if tokens or bits:
            failed.append(f"alone {tokens} requests get other tokens, {bits} other bits")
    graphs = counters["stats"]["unique_graphs"]
    if graphs != (not args.eager):
        failed.append(f"{graphs} graphs")
    if failed:
        print("FAILED: " + "; ".join(failed))
        return 1
    made = "eager" if args.eager else f"graphs = {graphs}, recompiles = {graphs - 1}"
    print(
        f"shown: {len(record.blocks)} steps of changing batches, {made}, no block leaked{checked}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Show where a decode step spends its time: a trace for Perfetto, and two tables.

The first table splits eager steps by stage: hooks on the modules of the patched Hugging Face model
assign every moment to the innermost running stage. A compiled step fuses kernels across stages, so
the second table lists kernels by name. Open the trace at https://ui.perfetto.dev.

    python examples/07_trace.py --trace trace.json
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# idle threads must not spin: they would take the core from the compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from step_stages import REST, Stages, finish, kernel_seconds, name_kernels
from torch.profiler import ProfilerActivity, profile, record_function

from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model

ROWS, TOKENS, LENGTH = 6, 16, 200  # requests and tokens of a step; earlier tokens of a request


def decode_batch(cache: v4.PagedCache) -> v4.StepBatch:
    """Make a token for each of four requests; the other requests and tokens are padding."""
    for request in range(4):
        cache.add(request, num_tokens=LENGTH)
    cache.seq_lens.fill_(LENGTH)  # as if earlier steps had filled the rows
    values = ([0, 1, 2, 3, 4, 4, 4], [LENGTH] * 4 + [0, 0], [0, 1, 2, 3, -1, -1])
    rest = (torch.tensor(value, dtype=torch.int32, device=cache.device) for value in values)
    return v4.StepBatch(torch.zeros(TOKENS, dtype=torch.int64, device=cache.device), *rest)


def timed(call: Callable[[], Any], args: argparse.Namespace) -> float:
    """Return the mean seconds of a call, after a warm-up."""
    call()
    finish(args.device)
    begun = time.perf_counter()
    for _ in range(args.steps):
        call()
    finish(args.device)
    return (time.perf_counter() - begun) / args.steps


def table(title: str, seconds: Counter[str], steps: int, rows: int) -> None:
    total = sum(seconds.values())
    print(f"{title}: {total / steps * 1e3:.2f} ms per step")
    for name, value in seconds.most_common(rows):
        print(f"  {value / total:6.1%} {value / steps * 1e3:8.3f} ms  {name}")


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=Path("trace.json"))
    parser.add_argument("--steps", type=bounded_int(1), default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = small_model(device=args.device)
    v4.patch(model, kv="fp32", precision="reference", batch_invariant=True)
    sizes = {"max_batch_size": ROWS, "max_cache_len": 512, "max_chunk": TOKENS, "num_blocks": 4}
    cache = v4.PagedCache.for_model(model, **sizes)
    batch, activities = decode_batch(cache), [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if args.device == "cuda" else []
    print("compiling: a minute or two, unless Inductor's cache has it", flush=True)
    step = torch.compile(v4.decode_step, fullgraph=True, dynamic=False)
    step(model, batch, cache.tensors)  # before the hooks, which would become part of the graph
    steps, compiled = range(args.steps), timed(lambda: step(model, batch, cache.tensors), args)
    name_kernels()
    with profile(activities=activities) as profiler:
        for number in steps:
            with record_function(f"compiled step {number}"):
                step(model, batch, cache.tensors)
                finish(args.device)
        stages = Stages(model)
        for number in steps:
            with record_function(f"eager step {number}"):
                stages.run(model, batch, cache)
    cache.raise_if_dropped()
    profiler.export_chrome_trace(str(args.trace))
    stages.seconds.clear()  # the profiler slowed these stages down
    for _ in steps:
        stages.run(model, batch, cache)
    total = sum(stages.seconds.values())
    table("eager, by stage", stages.seconds, args.steps, rows=8)
    kernels = kernel_seconds(profiler, args.device)
    table("compiled, by kernel, under the profiler", kernels, args.steps, rows=12)
    if len(stages.seconds) != 6 or len(kernels) < 10:
        print("FAILED: a stage is missing, or the kernels are")
        return 1
    print(
        f"shown: of an eager step of {total / args.steps * 1e3:.1f} ms, most is "
        f"{stages.seconds.most_common(1)[0][0]}, and {stages.seconds[REST] / total:.1%} metadata; "
        f"a compiled one takes {compiled * 1e3:.1f} ms; "
        f"trace: {args.trace}, {args.trace.stat().st_size / 1e6:.1f} MB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

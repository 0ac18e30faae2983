"""Compare the attention kernels of this checkout with those of another, on one GPU in one run.

    git worktree add /tmp/before v0.1.0
    python -m benchmarks.compare /tmp/before

Each round runs both checkouts, one after the other in processes of their own, so that neither
clock nor temperature favours one. Points are called through the public functions only, which
checkouts of any age have. Prints the median over rounds, microseconds, and the ratio.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, REPLAYS, SETS = 3, 60, 4
"""Processes for each checkout, replays in each, and sets of inputs that replays rotate through."""

BLOCK, HEAD_DIM, WINDOW = 64, 512, 128
DECODES = ((1, 64, 512), (8, 64, 512), (64, 64, 512), (64, 128, 1024))
"""Tokens, heads and selected rows of decodes with index matrices."""
PAGED = (64, 64, 512)
"""Tokens, heads and compressed rows of a decode with block tables."""
PREFILLS = ((512, 64, 512), (2048, 64, 0))
"""Tokens, heads and selected rows of prefills; 0: all compressed rows, of ratio 128."""
PREFIX = 32768
"""Positions before the tokens of a prefill."""


def main(argv: list[str] | None = None) -> int:
    """Run both checkouts in turns and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args(argv)
    here = Path(__file__).resolve().parents[1]
    trees = {"other": arguments.other.resolve(), "this": here}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
        for name, tree in trees.items():
            for point, microseconds in _run(tree).items():
                times[name].setdefault(point, []).append(microseconds)
    print("| point | other, us | this, us | this / other |\n| --- | --- | --- | --- |")
    for point, before in times["other"].items():
        old, new = statistics.median(before), statistics.median(times["this"][point])
        print(f"| {point} | {old:.2f} | {new:.2f} | {new / old:.3f} |")
    return 0


def _run(tree: Path) -> dict[str, float]:
    """Time the points with the package of ``tree``."""
    done = subprocess.run(
        [sys.executable, __file__, "--points"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def time_points() -> dict[str, float]:
    """Microseconds of every point with the package that this process imports."""
    import torch

    import dsv4_ops

    torch.manual_seed(0)
    scale = HEAD_DIM**-0.5

    def queries(tokens: int, heads: int) -> Any:
        return torch.randn(tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def cache(rows: int, block_size: int) -> Any:
        layout = dsv4_ops.core.layout.MainLayout(block_size)
        blocks = -(-rows // block_size)
        made = torch.zeros(blocks, layout.page_bytes, dtype=torch.uint8, device="cuda")
        keys = torch.randn(blocks * block_size, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        slots = torch.arange(blocks * block_size, device="cuda")
        dsv4_ops.quantize_and_insert_k_cache(keys, made, slots, block_size=block_size)
        return made

    def lists(tokens: int, width: int, rows: int) -> tuple[Any, Any]:
        indices = torch.randint(rows, (tokens, width), device="cuda", dtype=torch.int32)
        return indices, torch.full((tokens,), width, device="cuda", dtype=torch.int32)

    def table(requests: int, blocks: int) -> Any:
        order = torch.randperm(requests * blocks, device="cuda", dtype=torch.int32)
        return order.view(requests, blocks)

    def decode(tokens: int, heads: int, selected: int) -> Callable[[], Any]:
        rows = 65536
        q, swa, extra = queries(tokens, heads), cache(rows, BLOCK), cache(rows, BLOCK)
        window, more = lists(tokens, WINDOW, rows), lists(tokens, selected, rows)
        return lambda: dsv4_ops.sparse_mla_decode(
            q,
            swa,
            *window,
            extra,
            *more,
            softmax_scale=scale,
            swa_block_size=BLOCK,
            extra_block_size=BLOCK,
        )

    def paged(tokens: int, heads: int, compressed: int) -> Callable[[], Any]:
        block, rows = 2, 65536
        q, swa, extra = queries(tokens, heads), cache(rows, BLOCK), cache(tokens * compressed, 2)
        window = lists(tokens, WINDOW, rows)
        lens = torch.randint(1, compressed + 1, (tokens,), device="cuda", dtype=torch.int32)
        requests = torch.arange(tokens, device="cuda", dtype=torch.int32)
        blocks = table(tokens, compressed // block)
        return lambda: dsv4_ops.sparse_mla_decode_paged(
            q,
            swa,
            *window,
            extra,
            lens,
            requests,
            blocks,
            softmax_scale=scale,
            swa_block_size=BLOCK,
            extra_block_size=block,
        )

    def prefill(tokens: int, heads: int, selected: int) -> Callable[[], Any]:
        ratio, block = (4, 64) if selected else (128, 2)
        end = PREFIX + tokens
        q, swa, extra = queries(tokens, heads), cache(end, BLOCK), cache(end // ratio, block)
        positions = torch.arange(PREFIX, end, device="cuda")
        requests = torch.zeros(tokens, device="cuda", dtype=torch.int32)
        topk = lists(tokens, selected, PREFIX // ratio)[0] if selected else None
        tables = table(1, swa.shape[0]), table(1, extra.shape[0])
        return lambda: dsv4_ops.sparse_mla_prefill(
            q,
            swa,
            positions,
            requests,
            tables[0],
            extra,
            tables[1],
            topk,
            softmax_scale=scale,
            window_size=WINDOW,
            compress_ratio=ratio,
            swa_block_size=BLOCK,
            extra_block_size=block,
        )

    points: dict[str, Callable[[], Callable[[], Any]]] = {}
    for form in DECODES:
        points["decode {}x{}, 128+{}".format(*form)] = functools.partial(decode, *form)
    points["ragged paged decode {}x{}, 128+{}".format(*PAGED)] = functools.partial(paged, *PAGED)
    for form in PREFILLS:
        points["prefill {}x{}, top {}".format(*form)] = functools.partial(prefill, *form)
    return {point: _replayed([make() for _ in range(SETS)]) for point, make in points.items()}


def _replayed(calls: list[Callable[[], Any]]) -> float:
    """Median microseconds of a replay, with L2 emptied before each."""
    import torch

    graphs = []
    for call in calls:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    flushed = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for number in range(REPLAYS):
        flushed.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[number % len(graphs)].replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(start.elapsed_time(stop)))
    return statistics.median(times)


if __name__ == "__main__":
    if sys.argv[1:] == ["--points"]:
        print(json.dumps(time_points()))
    else:
        sys.exit(main())

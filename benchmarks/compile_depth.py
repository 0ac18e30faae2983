"""Time to compile a decode step by kind of layer, for models of several depths:

    python -m benchmarks.compile_depth --backend aot_eager
    python -m benchmarks.compile_depth --device cuda

Each row is a model of small layers of the released kinds, in a process whose folder of compiled
code is empty; then the same in another process with the file that the first wrote, and that folder
empty again, as after a restart of a container. On a GPU the
compiled step is also captured as one CUDA graph, and replayed. Seconds are those of the first step
and of ``compile_step``; CPU seconds include those of compilers that were started.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import HEAVY, SLIDING, SPARSE, small_model

REQUESTS = 2


def model_of(layers: int, device: str) -> torch.nn.Module:
    """Two window layers, then layers with a compressor by turns; the first three with a hash."""
    types = [*[SLIDING, SLIDING, *[SPARSE, HEAVY] * layers][: layers - 1], SPARSE]
    mlps = ["hash_moe"] * 3 + ["moe"] * (layers - 3)
    model = small_model(
        dtype=torch.bfloat16, device=device, layer_types=types, mlp_layer_types=mlps
    )
    patched: torch.nn.Module = v4.patch(model)
    return patched


def batch_of(device: str) -> v4.StepBatch:
    """The first token of every request."""
    starts, lens, rows = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in (range(REQUESTS + 1), [1] * REQUESTS, range(REQUESTS))
    )
    return v4.StepBatch(torch.arange(2, 2 + REQUESTS, device=device), starts, lens, rows)


def measure(layers: int, mode: str, file: Path | None, args: argparse.Namespace) -> str:
    """A line of the table."""
    start = "warm" if file is not None and file.is_file() else "cold"
    model, batch = model_of(layers, args.device), batch_of(args.device)
    caches = []
    for _ in range(2):
        cache = v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=256)
        for request in range(REQUESTS):
            cache.add(request, num_tokens=1)
        caches.append(cache)
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    step = v4.compile_step(model, mode=mode, backend=args.backend, cache_file=file)
    logits = step(batch, caches[0])
    cpu, wall = sum(os.times()[:4]) - cpu, time.perf_counter() - wall
    graphs = counters["stats"]["unique_graphs"]
    # behind it: eager kernels would be compiled before the step asks for them
    expected = v4.decode_step(model, batch, caches[1])
    found = float((logits.float() - expected.float()).norm() / expected.float().norm())
    cells = [layers, mode, start, graphs]
    cells += [f"{cpu:.1f}", f"{wall:.1f}", f"{found:.1e}", replayed(step, batch, caches[0])]
    return "| " + " | ".join(map(str, cells)) + " |"


def replayed(step: v4.CompiledStep, batch: v4.StepBatch, cache: v4.PagedCache) -> str:
    """Milliseconds of a replay of the step as one CUDA graph."""
    if cache.device.type != "cuda":
        return "-"
    with torch.no_grad():
        step(batch, cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(batch, cache)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(100):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return f"{begin.elapsed_time(end) / 100:.3f}"


@contextmanager
def code_folder(file: Path | None) -> Iterator[None]:
    """An empty folder of compiled code, at the same place for all processes with a file."""
    folder = Path(f"{file}.code" if file is not None else tempfile.mkdtemp())
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    yield
    shutil.rmtree(folder, ignore_errors=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 43])
    parser.add_argument("--modes", nargs="+", default=["regional"], choices=("regional", "whole"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--row", action="store_true", help="one row, in this process")
    parser.add_argument("--file", type=Path, help="the file of a row")
    args = parser.parse_args()
    if args.row:
        with code_folder(args.file):
            print(measure(args.layers[0], args.modes[0], args.file, args), flush=True)
        return
    print("| layers | mode | cache | graphs | CPU s | s | error | replay ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    inductor = args.backend == "inductor"
    for layers in args.layers:
        for mode in args.modes:
            with tempfile.TemporaryDirectory() as folder:
                row = ["--row", "--layers", str(layers), "--modes", mode]
                row += ["--backend", args.backend, "--device", args.device]
                row += ["--file", str(Path(folder) / "step.cache")] if inductor else []
                for _ in range(2 if inductor else 1):
                    command = [sys.executable, "-m", "benchmarks.compile_depth", *row]
                    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

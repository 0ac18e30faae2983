"""Benchmark the server: clients that stream greedy answers at the same time.

Layers have the sizes of DeepSeek-V4-Flash in the released precision, and random weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks.harness import clients
from benchmarks.harness.options import chosen_device, size, sizes
from benchmarks.harness.report import Report
from benchmarks.harness.steps import flash_config
from benchmarks.run import BenchError


@dataclass(kw_only=True)
class ServeRow:
    """Clients that begin at the same time. Times of a client are medians."""

    layers: int
    compile: str | None  # backend of the steps
    graphs: bool  # whether CUDA graphs run the steps
    requests: int  # clients
    tokens: int  # new tokens of a client
    context: int  # tokens of a prompt
    start_s: float  # from the model on the device until the server listens
    first_ms: float | None = None  # until a client has its first token
    token_ms: float | None = None  # per token of a client after its first
    tokens_per_s: float | None = None  # of all clients


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=size, help="default: 20; 4 on a CPU")
    add("--clients", type=sizes, default=(1, 8, 32), help="default: 1,8,32")
    add("--prompt", type=size, default=200, metavar="N", help="tokens; default: %(default)s")
    add("--new", type=size, default=64, metavar="N", help="tokens; default: %(default)s")
    add("--compile", metavar="BACKEND", help="of torch.compile; default: eager steps")
    add("--no-graphs", action="store_true", help="run the steps without CUDA graphs")


def run(options: argparse.Namespace) -> None:
    from dsv4_ops.integrations import transformers as v4
    from dsv4_ops.integrations.transformers.serving import Server
    from dsv4_ops.testing.released_model import released_model
    from dsv4_ops.testing.tokenizer import write_tokenizer

    device = chosen_device(options)
    small = device.type == "cpu"
    layers = options.layers or (4 if small else 20)
    config = flash_config(layers, small=small, eos_token_id=None)
    output = Report(options, device)
    with torch.no_grad():
        model = v4.patch(released_model(config, device=device))
    model.generation_config.eos_token_id = None
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Server, "_load", return_value=model),
    ):
        Path(folder, "config.json").write_text(json.dumps(config))
        write_tokenizer(folder, config["vocab_size"])
        began = time.perf_counter()
        say = functools.partial(print, file=sys.stderr, flush=True)
        server = Server(
            folder, port=0, quantized=True, device=device.type, compile=options.compile,
            max_cache_len=options.prompt + options.new, max_requests=max(options.clients),
            graphs=not options.no_graphs, on_progress=say,
        )  # fmt: skip
        url, started = server.start(), time.perf_counter() - began
        rows = [
            ServeRow(
                layers=layers, compile=options.compile, graphs=server.manager.steps.captures,
                requests=number, tokens=options.new, context=options.prompt,
                start_s=started,
            )
            for number in options.clients
        ]  # fmt: skip
        try:
            for row in rows:
                _measure(row, url, folder)
                say(row)
                output.add(row)
        finally:
            server.stop()
    note = "Clients run in another process. The first answers of each number of clients warm up."
    kind = "small layers" if small else "layers of Flash's sizes"
    output.finish(f"The server with {layers} {kind}", note)


def _measure(row: ServeRow, url: str, model: str) -> None:
    arguments = (clients.__file__, url, model, row.requests, row.context, row.tokens)
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"serve: {done.stderr.strip().splitlines()[-1]}")
    times, seconds = json.loads(done.stdout)
    row.first_ms = 1e3 * median(first for first, _ in times)
    row.token_ms = 1e3 * median(last - first for first, last in times) / max(row.tokens - 1, 1)
    row.tokens_per_s = row.requests * row.tokens / seconds

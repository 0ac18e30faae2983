"""Benchmark how a process starts: the times of a model's first steps, and then of steps of other
sizes; or the times of the first calls of ``generate``.

Layers have the sizes of DeepSeek-V4-Flash, or of V3, in the released precision. Every start is a
process. The cold start begins with empty folders of compiled code, and fills them for the warm
starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.harness.options import chosen_device, size, sizes
from benchmarks.harness.report import Report
from benchmarks.harness.steps import flash_config, step_batch, v3_config
from benchmarks.harness.timing import Capture, wait
from benchmarks.run import BenchError, WrongResult
from dsv4_ops.cli.options import bounded_int

_FOLDERS = ("HOME", "TMPDIR", "XDG_CACHE_HOME")
"""Variables that name folders in which torch, Triton and dsv4_ops keep compiled code by default."""
_MOST_ERROR, _MOST_TOKEN_ERROR = 0.05, 0.5
"""Maximum error of compiled logits, relative to the norm of a token's eager logits (in bfloat16),
as the median over tokens and for each token. Near ties of routers may fall differently."""
_CHECKED = 5  # steps


@dataclass(kw_only=True)
class StartRow:
    """One phase of a start."""

    start: str
    phase: str
    layers: int
    seconds: float | None = None  # wall time of the phase
    graphs: int | None = None  # graphs that this process compiled in the phase
    clock_ms: float | None = None  # median wall time of the step after the phase
    step_ms: float | None = None  # median time of that step in a CUDA graph
    token_ms: float | None = None  # time of one more token of ``generate``


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=("flash", "v3"), default="flash", help="default: %(default)s")
    add("--layers", type=size, help="default: 20; 3 on a CPU")
    add("--prefills", type=sizes, help="tokens; default: 1000,517,1; 48,17,1 on a CPU")
    add("--batches", type=sizes, help="requests; default: 8,1,2,32; 2,1 on a CPU")
    add("--warm", type=bounded_int(0), default=1, metavar="N", help="starts; default: %(default)s")
    add("--generate", type=size, metavar="N", help="call generate for N tokens, in place of steps")
    add("--backend", help="of torch.compile; default: inductor; aot_eager on a CPU")
    add("--fixed", action="store_true", help="compile each size by itself, with dynamic=False")
    add("--cache-file", action="store_true", help="starts share only cache_file, not the folders")
    add("--child", metavar="NAME", help=argparse.SUPPRESS)
    add("--files", metavar="DIR", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    device = chosen_device(options)
    small = device.type == "cpu"
    options.layers = options.layers or (3 if small else 20)
    options.prefills = options.prefills or ((48, 17, 1) if small else (1000, 517, 1))
    options.batches = options.batches or ((2, 1) if small else (8, 1, 2, 32))
    options.backend = options.backend or ("aot_eager" if small else "inductor")
    if options.child:
        for row in _phases(options, device):
            print(json.dumps(asdict(row)), flush=True)
        return
    output = Report(options, device)
    with tempfile.TemporaryDirectory() as files:
        for number in range(1 + options.warm):
            folder = f"{files}/{number if options.cache_file else 0}"
            os.makedirs(folder, exist_ok=True)
            environment = os.environ | dict.fromkeys(_FOLDERS, folder)
            name = f"warm {number}" if number else "cold"
            more = ["--files", files] if options.cache_file else []
            _follow(options, ["--child", name, *more], environment, output)
    kind = "small layers" if small else f"layers of the sizes of {options.model}"
    output.finish(f"Starts of {options.layers} {kind}", *_NOTES)


def _follow(
    options: argparse.Namespace, child: list[str], environment: dict[str, str], output: Report
) -> None:
    """Run one start; write each row as soon as it is measured."""
    command = [sys.executable, *shlex.split(options.command)[1:], *child]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                row = StartRow(**json.loads(line))
                output.add(row)
                print(row, file=sys.stderr, flush=True)
    if process.returncode:
        raise BenchError(f"start: the {child[1]} start failed; its output is above")


def _phases(options: argparse.Namespace, device: torch.device) -> Any:
    """Yield the rows of a start's phases in this process."""
    began = time.perf_counter()
    import dsv4_ops.integrations.transformers as v4
    from dsv4_ops.testing.released_model import released_model

    layers, small = options.layers, device.type == "cpu"
    make = v3_config if options.model == "v3" else flash_config
    config = make(layers, small=small)
    model = v4.patch(released_model(config, device=device))

    def row(phase: str, seconds: float, graphs: int, **times: float | None) -> StartRow:
        return StartRow(
            start=options.child, phase=phase, layers=layers, seconds=seconds, graphs=graphs, **times
        )

    wait(device)
    if options.generate:
        yield row("build and patch", time.perf_counter() - began, 0)
        yield from _generated(options, model, row)
        return
    most = max(options.batches)
    longest = max(1 << (max(options.prefills) - 1).bit_length(), 64)
    cache = v4.PagedCache.for_model(
        model, max_batch_size=most, max_cache_len=8 * longest, max_chunk=longest
    )
    steps = Steps(v4, model, cache, options)
    wait(device)
    yield row("build and patch", time.perf_counter() - began, 0)
    for tokens in options.prefills:
        seconds, graphs = steps.first(steps.prefill, [tokens])
        clock_ms = steps.clock_ms(steps.prefill, [tokens])
        yield row(f"prefill of {tokens}", seconds, graphs, clock_ms=clock_ms)
    for requests in options.batches:
        seconds, graphs = steps.first(steps.decode, [1] * requests)
        steps.check(requests)
        clock_ms = steps.clock_ms(steps.decode, [1] * requests)
        step_ms = steps.captured_ms(requests) if device.type == "cuda" else None
        phase = f"decode of {requests}"
        yield row(phase, seconds, graphs, clock_ms=clock_ms, step_ms=step_ms)


def _generated(
    options: argparse.Namespace, model: Any, row: Callable[..., StartRow]
) -> Iterator[StartRow]:
    """Time ``generate`` after the longest prompt: for all batch sizes, then all of them again."""
    prompt, new, device = max(options.prefills), options.generate, model.device
    more: dict[str, Any] = {}
    if device.type == "cpu":
        from transformers import CompileConfig

        more["compile_config"] = CompileConfig(backend=options.backend)
        more["compile_config"]._compile_all_devices = True

    def seconds(requests: int, count: int) -> float:
        ids = torch.randint(3, 250, (requests, prompt), device=device)
        began = time.perf_counter()
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
        texts = model.generate(ids, max_new_tokens=count, **settings)
        wait(device)
        if texts.shape[1] != prompt + count:
            raise WrongResult(f"start: a text has {texts.shape[1] - prompt} of {count} tokens")
        return time.perf_counter() - began

    for name in ("", " again"):
        for requests in options.batches:
            graphs, first = _graphs(), seconds(requests, new)
            token_ms = None
            if name:
                for _ in range(2):  # another batch size may have replaced the cache and its graphs
                    seconds(requests, new)
                token_ms = 1e3 * (seconds(requests, 2 * new) - seconds(requests, new)) / new
            phase = f"generate of {requests}{name}"
            yield row(phase, first, _graphs() - graphs, token_ms=token_ms)


class Steps:
    """The compiled steps of a model, and the requests that they extend."""

    def __init__(self, v4: Any, model: Any, cache: Any, options: argparse.Namespace) -> None:
        self.v4, self.model, self.cache = v4, model, cache
        settings = {"mode": "regional", "dynamic": not options.fixed, "backend": options.backend}
        self.prefill, self.decode = (
            v4.compile_step(model, step, **settings, cache_file=file)
            for step, file in zip((v4.prefill_step, v4.decode_step), _files(options), strict=True)
        )
        length = cache.max_cache_len
        self.rows = [cache.add(number, length) for number in range(cache.max_batch_size)]
        self.lens = [0] * len(self.rows)

    def first(self, step: Callable[..., Any], counts: Sequence[int]) -> tuple[float, int]:
        """Run a step; return its seconds, and the number of graphs that it compiled."""
        batch, graphs = self.batch(counts), _graphs()
        return self._seconds(step, batch), _graphs() - graphs

    def _seconds(self, step: Callable[..., Any], batch: Any) -> float:
        began = time.perf_counter()
        step(batch, self.cache)
        wait(self.cache.device)
        return time.perf_counter() - began

    def batch(self, counts: Sequence[int]) -> Any:
        """Make the next ``counts`` tokens of the first requests."""
        for number, count in enumerate(counts):
            self.lens[number] += count
        given = [each[: len(counts)] for each in (self.lens, self.rows)]
        return step_batch(counts, given[0], self.cache.device, given[1])

    def check(self, requests: int) -> None:
        """Raise if the logits of steps differ from those of eager steps of the same tokens."""
        found = []
        for _ in range(_CHECKED):
            batch = self.batch([1] * requests)
            expected = self.v4.decode_step(self.model, batch, self.cache).float()
            difference = self.decode(batch, self.cache).float() - expected
            found.append(difference.norm(dim=1) / expected.norm(dim=1))
        errors = torch.cat(found)
        middle, most = float(errors.median()), float(errors.max())  # NaN if one is
        if not (middle < _MOST_ERROR and most < _MOST_TOKEN_ERROR):
            off = f"{middle:.3f}, a token by {most:.3f}"
            raise WrongResult(f"start: a compiled decode of {requests} is off by {off}")

    def clock_ms(self, step: Callable[..., Any], counts: Sequence[int]) -> float:
        """Repeat the step at the same positions, and return its median wall time."""
        batch = self.batch(counts)
        return 1e3 * median(self._seconds(step, batch) for _ in range(5))

    def captured_ms(self, requests: int) -> float:
        """Return the median time of the step in a CUDA graph."""
        batch = self.batch([1] * requests)
        return Capture([lambda: self.decode(batch, self.cache)]).device_us().median / 1e3


def _files(options: argparse.Namespace) -> Sequence[str | None]:
    """Return the ``cache_file`` of prefills, and that of decodes."""
    names = ("prefill.parts", "decode.parts")
    return [f"{options.files}/{name}" if options.files else None for name in names]


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


_NOTES = (
    "seconds: wall time of the phase. graphs: number that this process compiled; on a GPU, others "
    "compile some, too. With another backend than Inductor, a warm start compiles again.",
    "clock_ms: median wall time of later steps of that size, launched one by one.",
    "token_ms: time of one more token, from a call of twice as many tokens.",
    "step_ms: median over replays of a CUDA graph of the step; checked against the eager step.",
)

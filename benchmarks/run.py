"""Benchmarks: ``python -m benchmarks NAME``.

Each benchmark checks its results before it times anything; ``python -m benchmarks report FILE``
prints a table of stored rows.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

BENCHES = {
    "metadata": "decode metadata of one step: compiled, eager, and beside vLLM's builders",
    "kv_cache": "cache inserts and gathers: compiled, eager, and beside vLLM's",
    "sparse_mla": "sparse attention, decode and prefill: against its roofline and FlashMLA",
    "mla": "dense MLA decode: against its roofline and FlashMLA",
    "mla_model": "DeepSeek-V3 and V3.2: decode steps, and prefills with and without contexts",
    "context_parallel": "ranks that share a cache: each way to combine, layers of V3 and V4",
    "indexer": "the lightning indexer, decode: against its roofline and DeepGEMM",
    "linear": "FP8 linear layers: against a copy of their weights, and bf16",
    "experts": "routed experts in FP4 and FP8: against a copy of their weights, and bf16",
    "compressor": "the KV compressor, decode and prefill: against its roofline",
    "model": "a decode step of a whole model: patched, and Hugging Face's own",
    "start": "from a model on the device to its first tokens: cold, warm, and at other sizes",
    "flash": "the whole of DeepSeek-V4-Flash on several GPUs: decode, prefill, start",
    "memory": "what weights, caches, steps and graphs take: computed, and by the allocator",
    "layer": "an attention layer, decode: against its roofline and baselines",
    "serve": "the server: concurrent clients that stream answers",
    "precision": "logits of every mode of a patched model: beside float32 Hugging Face's",
}
"""Benchmarks (names of modules), and what they measure. The function ``run`` of a module
writes rows and a table to ``options.out``, ``CASES`` are the groups to choose from, and
``add_options`` adds the benchmark's own options."""


class BenchError(RuntimeError):
    """Ends a benchmark with a message and an exit status."""

    status = 2


class WrongResult(BenchError):
    """A result differs from its reference: the case is not timed, and the run fails."""

    status = 1


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; return the exit status: 0, 1 (wrong result), 2 (bad arguments) or 130."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed the error or the help
        return stop.code if isinstance(stop.code, int) else 2
    options.command = "python -m benchmarks " + shlex.join(_recorded(arguments))
    try:
        _module(options.bench).run(options)
    except BenchError as error:
        print(f"bench {options.bench}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"bench {options.bench}: interrupted", file=sys.stderr)
        return 130
    return 0


def _recorded(arguments: Sequence[str]) -> list[str]:
    """Return the arguments to store in rows, without ``--out``. The path of ``--baseline`` becomes
    the folder's name, because we publish no paths of a machine."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if not _abbreviates(option, "--out", "--baseline"):
            kept.append(argument)
            continue
        value = value if equals else next(rest)
        if _abbreviates(option, "--baseline"):
            kept += ["--baseline", PurePath(value).name or "."]
    return kept


def _abbreviates(option: str, *names: str) -> bool:
    """Return whether argparse reads ``option`` as an abbreviation of one of ``names``."""
    return len(option) > 2 and any(name.startswith(option) for name in names)


def _parser() -> argparse.ArgumentParser:
    from benchmarks.harness import report
    from benchmarks.harness.options import add_cases, add_common

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True)
    for name, measures in BENCHES.items():
        bench, module = benches.add_parser(name, help=measures, description=measures), _module(name)
        add_common(bench)
        if hasattr(module, "CASES"):
            add_cases(bench, tuple(module.CASES))
        if hasattr(module, "add_options"):
            module.add_options(bench)
    table = "a Markdown table of the rows of a file"
    report.add_options(benches.add_parser("report", help=table, description=table))
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{'harness.' * (name == 'report')}{name}")

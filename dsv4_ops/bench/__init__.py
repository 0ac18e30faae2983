"""Benchmarks: ``python -m dsv4_ops bench NAME``. Each checks its results before timing anything."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

BENCHES = {"metadata": "decode metadata of one step: compiled, eager, and beside vLLM's builders"}
"""Name of a benchmark (a module of this package with ``run``) and what it measures."""


class BenchError(RuntimeError):
    """Ends a benchmark with a message and an exit status."""

    status = 2


class WrongResult(BenchError):
    """A result differs from its reference: the case is not timed and the run ends."""

    status = 1


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark. Exit status: 0, 1 (wrong result), 2 (bad arguments), 130 (interrupted)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has worded the error, or printed the help
        return stop.code if isinstance(stop.code, int) else 2
    options.command = "python -m dsv4_ops bench " + " ".join(arguments)
    run = importlib.import_module(f"dsv4_ops.bench.{options.bench}").run
    try:
        run(options)
    except BenchError as error:
        print(f"bench {options.bench}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"bench {options.bench}: interrupted, see {options.out}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv4_ops bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True)
    metadata = benches.add_parser(
        "metadata", help=BENCHES["metadata"], description=BENCHES["metadata"]
    )
    add = metadata.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: CUDA if any")
    add("--smoke", action="store_true", help="small and short, on CPU by default")
    add("--anchor", type=Path, metavar="DIR", help="bundle of vLLM's kernels to run beside ours")
    add("--out", type=Path, default=Path("out/bench"), metavar="DIR", help="default: %(default)s")
    add("--requests", type=_sizes, metavar="N,N,..", help="default: 1,8,32,128,512")
    add("--next-n", type=_sizes, metavar="N,N,..", help="tokens per request; default: 1,2,4")
    add("--context", type=_size, metavar="N", help="longest context drawn; default: 131072")
    add("--max-model-len", type=_size, metavar="N", help="default: 1048576, as DeepSeek-V4-Flash")
    add("--threads", type=_size, metavar="N", help="CPU threads; default: torch's")
    add("--tuned", action="store_true", help="compile with dsv4_ops.metadata.COMPILE_OPTIONS")
    add("--no-plot", action="store_true", help="table and JSONL only")
    return parser


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _sizes(text: str) -> Sequence[int]:
    return tuple(sorted({_size(part) for part in text.split(",")}))

"""Benchmarks: ``python -m dsv4_ops bench NAME``. Each checks its results before timing anything."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

BENCHES = {
    "metadata": "decode metadata of one step: compiled, eager, and beside vLLM's builders",
    "kv_cache": "cache inserts, gathers and sparse indices: compiled, eager, and beside vLLM's",
}
"""Name of a benchmark, a module of this package with ``add_options`` and ``run``, and what it
measures."""


class BenchError(RuntimeError):
    """Ends a benchmark with a message and an exit status."""

    status = 2


class WrongResult(BenchError):
    """A result differs from its reference: the case is not timed and the run fails."""

    status = 1


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark. Exit status: 0, 1 (wrong result), 2 (bad arguments), 130 (interrupted)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has worded the error, or printed the help
        return stop.code if isinstance(stop.code, int) else 2
    options.command = "python -m dsv4_ops bench " + " ".join(arguments)
    try:
        _module(options.bench).run(options)
    except BenchError as error:
        print(f"bench {options.bench}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"bench {options.bench}: interrupted, see {options.out}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    from dsv4_ops.bench.options import add_common

    parser = argparse.ArgumentParser(prog="python -m dsv4_ops bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True)
    for name, measures in BENCHES.items():
        bench = benches.add_parser(name, help=measures, description=measures)
        add_common(bench)
        _module(name).add_options(bench)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"dsv4_ops.bench.{name}")

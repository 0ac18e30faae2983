"""Command line options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.work import Case
from benchmarks.run import BenchError
from dsv4_ops.cli.options import bounded_int


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: CUDA if any")
    add("--smoke", action="store_true", help="small and short, on CPU by default")
    add("--baseline", type=Path, metavar="DIR", help="bundle of vLLM's kernels to run beside ours")
    add("--out", type=Path, default=Path("out/bench"), metavar="DIR", help="default: %(default)s")
    add("--threads", type=size, metavar="N", help="CPU threads; default: torch's")


def add_cases(parser: argparse.ArgumentParser, groups: Sequence[str]) -> None:
    """Add the options of a benchmark that has groups of cases."""

    def chosen(text: str) -> tuple[str, ...]:
        named = text.split(",")
        for name in named:
            if name not in groups:
                raise argparse.ArgumentTypeError(f"must be among {','.join(groups)}, got {name!r}")
        return tuple(name for name in groups if name in named)

    add = parser.add_argument
    add("--cases", type=chosen, metavar="A,B,..", help=f"any of {','.join(groups)}; default: all")
    add("--match", metavar="TEXT", help="only cases whose names contain this: 'Pro', '64 x'")
    add("--max-seconds", type=size, metavar="N", help="start no case later than that")


def matching(options: argparse.Namespace, cases: Sequence[Case]) -> Sequence[Case]:
    """Return the cases that ``--match`` selects, and all cases that are only checked."""
    if not options.match:
        return cases
    found = [case for case in cases if not case.timed or options.match in str(case)]
    if not any(case.timed for case in found):
        raise BenchError(f"--match {options.match}: no case has it; --max-seconds 1 lists them")
    return found


def chosen_device(options: argparse.Namespace) -> torch.device:
    """Return the device of ``--device`` and ``--smoke``; apply ``--threads``."""
    if options.threads:
        torch.set_num_threads(options.threads)
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and not options.smoke else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: torch sees no CUDA device")
    return torch.device(name)


size = bounded_int(1)
"""Type of an option that takes an int of at least 1."""


def sizes(text: str) -> Sequence[int]:
    """Parse ints of at least 1; return the distinct ints in the given order."""
    return tuple(dict.fromkeys(size(part) for part in text.split(",")))

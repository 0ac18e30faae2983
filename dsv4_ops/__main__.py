"""The command line: ``python -m dsv4_ops`` or ``dsv4-ops``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status: 0 for success, 1 for problems, 2 for wrong arguments
    or if ``kernels`` lacks Triton, 141 if the output is closed."""
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone, as in `list | head`: drop the rest of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return status


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:  # argparse would print the usage of dsv4-ops without the command
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "list":
        return _list(options.markdown, options.json)
    if options.command == "show":
        return _show(options.op, options.json)
    if options.command == "explain":
        return _explain(options.op, options.json)
    if options.command == "kernels":
        return _kernels(options.targets)
    if options.command == "checkpoint":
        return _checkpoint(options)
    if options.command == "serve":
        return _serve(options)
    return _doctor(options)


def _parser() -> argparse.ArgumentParser:
    from dsv4_ops._version import __version__
    from dsv4_ops.cli import serve

    parser = argparse.ArgumentParser(
        prog="dsv4-ops", description="DeepSeek-V4's attention stack as PyTorch ops that compile."
    )
    parser.add_argument("--version", action="version", version=f"dsv4_ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="table of all ops")
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as the table in docs/api/index.md")
    form.add_argument("--json", action="store_true", help="machine-readable")
    show = commands.add_parser("show", help="signature, docs and source lines of an op")
    show.add_argument("op", metavar="OP", help="name of an op, as in `list`")
    show.add_argument("--json", action="store_true", help="machine-readable")
    explain = commands.add_parser(
        "explain", help="which implementation impl='auto' runs here, and from which sizes on"
    )
    explain.add_argument("op", metavar="OP", nargs="?", help="an op with a choice; default: all")
    explain.add_argument("--json", action="store_true", help="machine-readable")
    doctor = commands.add_parser(
        "doctor", help="what works on this machine; exit status 1 if not all"
    )
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.add_argument(
        "--quick", action="store_true", help="compile no steps of tiny models (saves half a minute)"
    )
    doctor.add_argument(
        "--selftest", action="store_true", help="also compile an op (takes seconds)"
    )
    checkpoint = commands.add_parser(
        "checkpoint", help="write a tiny checkpoint in the released format, or check one"
    )
    checkpoint.add_argument("path", metavar="DIR", help="folder that is written, or read")
    checkpoint.add_argument(
        "--check", action="store_true", help="check names, shapes and all numbers"
    )
    checkpoint.add_argument(
        "--model", choices=("v4", "v3", "v32", "v2", "glm5"), default="v4", help="default: v4"
    )
    checkpoint.add_argument(
        "--family", choices=("instruct", "base"), default="instruct", help="of V4's checkpoints"
    )
    checkpoint.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    checkpoint.add_argument("--shards", type=int, default=3, help="default: %(default)s")
    serve.add_options(
        commands.add_parser("serve", help="OpenAI server of a model, which needs the extra serve")
    )
    kernels = commands.add_parser(
        "kernels", help="registers, spills and shared memory of every kernel; needs no GPU"
    )
    kernels.add_argument(
        "--targets",
        type=_targets,
        default=[90],
        help="compute capabilities, such as 80,90 (default: 90)",
    )
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _list(markdown: bool, as_json: bool) -> int:
    from dsv4_ops.cli import show

    if as_json:
        print(json.dumps(show.records(), indent=2))
    else:
        print(show.markdown_table() if markdown else show.table())
    return 0


def _show(name: str, as_json: bool) -> int:
    from dsv4_ops.cli import show

    try:
        print(json.dumps(show.facts(name), indent=2) if as_json else show.describe(name))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _explain(name: str | None, as_json: bool) -> int:
    from dsv4_ops.cli import explain

    try:
        text = json.dumps(explain.records(name), indent=2) if as_json else explain.explain(name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 0


def _checkpoint(options: argparse.Namespace) -> int:
    from dsv4_ops.cli import checkpoint

    try:
        if not options.check:
            settings = (options.model, options.family, options.seed, options.shards)
            checkpoint.write(options.path, *settings)
        print(checkpoint.describe(options.path))
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _serve(options: argparse.Namespace) -> int:
    from dsv4_ops.cli import serve

    settings = {**vars(options)}
    del settings["command"], settings["parser"]

    def named(error: Exception) -> str:
        """Spell the options in an error message as on the command line."""
        names = "|".join(settings)
        text = re.sub(rf"^serve: ({names}) must", r"serve: --\1 must", str(error))
        text = re.sub(rf"\b({names})='(\w+)'", r"--\1 \2", text)
        for name in filter(lambda name: "_" in name, settings):  # a path may contain such a name
            text = re.sub(rf"(?<![\w/])(?:--)?{name}(?![\w/])", f"--{name.replace('_', '-')}", text)
        return text

    try:
        server = serve.server(
            **settings, on_progress=lambda line: print(line, file=sys.stderr, flush=True)
        )
    except (ImportError, NotImplementedError, OSError, TypeError, ValueError) as error:
        print(named(error), file=sys.stderr)
        return 1
    server.run()
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from dsv4_ops.cli import doctor

    def say(line: str) -> None:  # flush, because a pipe would hold the line back until the end
        if not options.json:
            print(line, flush=True)

    def progress(line: str) -> None:
        print(f"  {line} ...", file=sys.stderr if options.json else sys.stdout, flush=True)

    report = doctor.collect(
        steps=not options.quick,
        selftest=options.selftest,
        progress=progress,
        on_begin=say,
        on_section=lambda section: say(doctor.section_lines(section)),
    )
    print(json.dumps(report, indent=2, default=str) if options.json else doctor.verdict(report))
    return 0 if doctor.healthy(report) else 1


def _targets(words: str) -> list[int]:
    from dsv4_ops.core.target import TARGETS  # imports torch

    known = [str(10 * major + minor) for major, minor in TARGETS]
    wrong = [word for word in words.split(",") if word not in known]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"targets must be of {', '.join(known)}, got {wrong[0]!r}. Pass compute capabilities "
            "without their dot, such as 80,90."
        )
    return [int(word) for word in words.split(",")]


def _kernels(targets: list[int]) -> int:
    try:
        from dsv4_ops.cli import kernels as report
    except ImportError as error:
        print(f"kernels: triton must be installed, got {error}. Install triton.", file=sys.stderr)
        return 2
    failed = False
    for target in targets:
        reports = report.report(target, lambda text: print(text, file=sys.stderr, flush=True))
        if len(targets) > 1:
            print(f"sm_{target}")
        print(report.table(reports), flush=True)
        for problem, found in (
            ("registers are spilled", report.spilling(reports, target)),
            ("a program has less memory", report.oversized(reports, target)),
        ):
            if found:
                names = ", ".join(sorted({item.kernel for item in found}))
                print(f"kernels: sm_{target}: {problem} in {names}", file=sys.stderr)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""The demo's table: measurements of both sides, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from examples.demo.measure import CHUNK_STEPS, Captured, Failed, Graphs, Unmeasured
from examples.demo.ours import Package

Tokens = list[list[int]]

LOGITS_WITHIN = 1e-4
"""Maximum difference of logits in the reference mode in float32."""


@dataclass(frozen=True)
class Setting:
    """The settings of the run, and the machine."""

    device: str
    threads: int
    torch: str
    transformers: str
    dsv4_ops: str
    num_requests: int
    prompt: str
    """Start of the first prompt."""
    prompt_length: int
    steps: int
    generated: int
    """Tokens per request that ``generate`` returns."""
    layers: int
    model: str = "DeepSeek-V4"


@dataclass(frozen=True)
class Figures:
    """Measurements of one side."""

    tokens: Tokens
    """Greedy tokens of eager steps."""
    eager_speed: float
    """Tokens per second."""
    compiled_speed: float | Unmeasured | Failed
    """Tokens per second with Inductor's code."""
    graphs: Graphs | Failed
    host_syncs: float | Unmeasured | Failed
    """Host synchronisations per decode step; stock's steps are eager, and ours compiled."""
    cuda_graph: Captured | Unmeasured | Failed
    static_generate: Tokens | Failed
    """Tokens of ``generate(cache_implementation="static")``."""
    package: Package | Unmeasured | Failed
    compiled_by: str = ""
    """How Inductor compiled the step of ``compiled_speed``."""


@dataclass(frozen=True)
class Demo:
    """All measurements of the demo."""

    setting: Setting
    stock: Figures
    ours: Figures
    logits_difference: float
    """Largest difference between our eager logits and stock's."""
    seconds: float


Row = tuple[str, str, str]

_TRIED = {
    "graphs": "torch.compile",
    "cuda_graph": "CUDA graph",
    "static_generate": "static cache",
    "package": "torch.export and AOTInductor",
}
"""Name of each measurement that can fail, by its field."""


def rows(demo: Demo) -> list[Row]:
    """Return the table's rows: measurement, stock, ours."""
    expected = demo.stock.tokens

    def both(name: str, describe: Callable[[Figures], str]) -> Row:
        return name, describe(demo.stock), describe(demo.ours)

    return [
        both("compiled decode: graphs", lambda side: _graphs(side.graphs, _graph_count)),
        both("  graph breaks", lambda side: _graphs(side.graphs, lambda found: str(found.breaks))),
        both(
            f"  recompiles over {demo.setting.steps} steps",
            lambda side: _graphs(side.graphs, _recompiles),
        ),
        both("  torch's recompile limit", lambda side: _graphs(side.graphs, _limit)),
        both("host syncs per step", lambda side: _or_reason(side.host_syncs, _number)),
        both("CUDA graph", lambda side: _captured(side.cuda_graph, expected)),
        (
            "greedy tokens",
            f"{_count(expected)} (reference)",
            same(demo.ours.tokens, expected) + f", logits within {demo.logits_difference:.1e}",
        ),
        both("  compiled", lambda side: _graphs(side.graphs, lambda g: same(g.tokens, expected))),
        both("tokens/s, eager", lambda side: _number(side.eager_speed)),
        both(
            "tokens/s, compiled by Inductor",
            lambda side: _or_reason(
                side.compiled_speed, lambda speed: f"{_number(speed)} ({side.compiled_by})"
            ),
        ),
        both(
            "generate(cache_implementation='static')",
            lambda side: _or_reason(side.static_generate, lambda found: same(found, expected)),
        ),
        both(
            "torch.export and AOTInductor package", lambda side: _or_reason(side.package, _package)
        ),
        both(
            "  its tokens, in a process with torch only",
            lambda side: (
                same(side.package.tokens, expected)
                if isinstance(side.package, Package) and not side.package.imported
                else "-"
            ),
        ),
    ]


def render(demo: Demo) -> str:
    """Format the table, below the settings and the machine."""
    header: Row = ("", "stock Hugging Face (for comparison)", "dsv4_ops")
    table = [header, *rows(demo)]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines = [
        f"{name:<{widths[0]}}  {stock:<{widths[1]}}  {ours}".rstrip() for name, stock, ours in table
    ]
    rule = "-" * max(map(len, lines))
    setting = demo.setting
    under = [
        f"{setting.num_requests} requests with prompts of {setting.prompt_length} tokens, "
        f"{setting.prompt!r} and so on, {setting.steps} decode steps",
        f"{setting.model}, {setting.layers} layers, float32 weights and caches, reference mode, "
        "experts of both in batched_mm",
        "compiled side by side, in processes of their own",
        f"tokens/s: best of chunks of {CHUNK_STEPS} steps",
        f"{setting.device}, {setting.threads} threads, torch {setting.torch}, "
        f"transformers {setting.transformers}, dsv4_ops {setting.dsv4_ops}",
    ]
    return "\n".join([lines[0], rule, *lines[1:], rule, *_errors(demo), *under])


def problems(demo: Demo) -> list[str]:
    """Return a line for each promise that the patched model broke."""
    return [*_wrong_tokens(demo), *_wrong_graphs(demo.ours)]


def as_json(demo: Demo) -> dict[str, Any]:
    """Return all measurements and the rows, for ``json.dumps``."""
    table = [dict(zip(("name", "stock", "ours"), row, strict=True)) for row in rows(demo)]
    return {**asdict(demo), "table": table, "problems": problems(demo)}


def same(tokens: Tokens, expected: Tokens) -> str:
    """Count the ``tokens`` that equal the expected tokens. ``generate`` may have returned only the
    first tokens of each request."""
    total = _count(tokens)
    equal = sum(
        token == wanted
        for row, wanted_row in zip(tokens, expected, strict=True)
        for token, wanted in zip(row, wanted_row, strict=False)
    )
    return f"{total} of {total} the same" if equal == total else f"only {equal} of {total} the same"


def _errors(demo: Demo) -> Iterator[str]:
    sides = (
        ("dsv4_ops failed, which it should not:", demo.ours),
        ("Not supported by stock Hugging Face (expected, no failure of dsv4_ops):", demo.stock),
    )
    for heading, side in sides:
        errors = {
            _TRIED.get(field.name, field.name): getattr(side, field.name) for field in fields(side)
        }
        failed = {what: found for what, found in errors.items() if isinstance(found, Failed)}
        if failed:
            yield heading
        for what, found in failed.items():
            yield f"  {what}: {textwrap.shorten(found.error, 100)}"


def _wrong_tokens(demo: Demo) -> Iterator[str]:
    ours, expected = demo.ours, demo.stock.tokens
    first = [row[: demo.setting.generated] for row in expected]
    results = {
        "eager decode": (ours.tokens, expected),
        "compiled decode": (ours.graphs, expected),
        "the CUDA graph": (ours.cuda_graph, expected),
        "generate with a static cache": (ours.static_generate, first),
        "the AOTInductor package": (ours.package, expected),
    }
    for name, (result, wanted) in results.items():
        if isinstance(result, Failed):
            yield f"{name} failed with {result.error}"
        elif not isinstance(result, Unmeasured):
            tokens = result if isinstance(result, list) else result.tokens
            if tokens != wanted:
                said = f"{same(tokens, wanted)}, {_count(wanted)} expected"
                yield f"greedy tokens of {name} differ from stock Hugging Face: {said}"
    if not demo.logits_difference <= LOGITS_WITHIN:  # also true for NaN
        yield f"logits differ from stock Hugging Face by {demo.logits_difference:.1e}"


def _wrong_graphs(ours: Figures) -> Iterator[str]:
    if isinstance(ours.graphs, Graphs) and (ours.graphs.graphs, ours.graphs.breaks) != (1, 0):
        yield f"decode compiled to {ours.graphs.graphs} graphs, {ours.graphs.breaks} breaks, not 1"
    for name in ("host_syncs", "compiled_speed"):
        found = getattr(ours, name)
        if isinstance(found, Failed):
            yield f"{name} failed with {found.error}"
    if isinstance(ours.host_syncs, float) and ours.host_syncs > 0:
        yield f"a decode step waits for the device {_number(ours.host_syncs)} times, not 0"
    if isinstance(ours.package, Package) and ours.package.imported:
        yield f"the package's process imported {', '.join(ours.package.imported[:3])}"


def _or_reason(found: Any, describe: Callable[[Any], str]) -> str:
    if isinstance(found, Unmeasured):
        return f"not measured: {found.reason}"
    if isinstance(found, Failed):
        return f"unsupported ({found.error.partition(':')[0]})"
    return describe(found)


def _graphs(found: Graphs | Failed, describe: Callable[[Graphs], str]) -> str:
    return _or_reason(found, describe)


def _graph_count(found: Graphs) -> str:
    more = " and more" if found.stopped_at is not None else ""
    return f"{found.graphs}{more} (backend {found.backend}, {found.seconds:.0f} CPU s)"


def _recompiles(found: Graphs) -> str:
    if found.stopped_at is None:
        return str(found.recompiles)
    return f"{found.recompiles} in {found.stopped_at} steps, where counting stopped"


def _limit(found: Graphs) -> str:
    if found.stopped_at is not None and found.fails_at is None:
        return f"not counted so far ({found.limit})"
    if found.fails_at is None:
        return f"not reached ({found.limit})"
    return f"reached at step {found.fails_at} ({found.limit})"


def _captured(found: Captured | Unmeasured | Failed, expected: Tokens) -> str:
    if isinstance(found, Failed):
        return f"no: {found.error.partition(':')[0]}"

    def describe(captured: Captured) -> str:
        result = same(captured.tokens, expected)
        return f"no: replayed, {result}" if result.startswith("only") else f"yes, {result}"

    return _or_reason(found, describe)


def _package(found: Package) -> str:
    return f"{found.megabytes:.1f} MB in {found.seconds:.0f} CPU s"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 and value != int(value) else f"{value:.0f}"


def _count(tokens: Tokens) -> int:
    return sum(map(len, tokens))

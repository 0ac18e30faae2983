"""``python -m examples.demo`` measures both sides on this machine and prints the table."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dsv4_ops._version import __version__
from dsv4_ops.cli.options import bounded_int
from dsv4_ops.testing.models import require_transformers
from dsv4_ops.testing.text import real_text
from examples.demo import measure, ours, stock, table
from examples.demo.jobs import (
    BACKEND,
    JOBS,
    LAYERS,
    MODELS,
    NUM_REQUESTS,
    PROMPT_LENGTH,
    Job,
    Work,
    arguments,
    run_job,
)
from examples.demo.measure import Failed, Side, Unmeasured, attempt
from examples.demo.progress import Progress

MIN_STEPS, MAX_STEPS = 8, 4096
MAX_LAYERS = 61
GENERATED = 8  # tokens that ``generate`` returns per request
TIMED_STEPS = 28

NEEDS_GPU = Unmeasured("needs a GPU")
NOT_BUILT = Unmeasured("left out by --fast")
NO_PACKAGE = Unmeasured("there is no package")
TOO_LONG = Unmeasured("Inductor takes minutes")


def main(argv: Sequence[str]) -> int:
    """Run the demo; return 0 if the patched model fulfils all promises, 1 if not, 2 for bad
    usage."""
    options = _parser().parse_args(argv)
    # for one graph, Inductor's pool of compile workers costs more than it saves
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # a compilation makes a million objects but little garbage: collections would take a tenth of
    # the time
    gc.set_threshold(50_000, 20, 20)
    progress = Progress(options.since)
    try:
        enough = options.stock_graphs or None
        work = Work(
            _device(options.device),
            options.layers,
            options.steps,
            options.model,
            enough,
            package=not options.fast,
            folder=options.folder,
        )
        if options.job:
            require_transformers()
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.job:
        run_job(options.job, work, progress, attempted=options.since is not None)
        return 0
    try:
        found = run(work, progress)
    # an import of transformers takes seconds, so the package's job starts before the import
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    return _report(found, work, options.out)


def _report(found: table.Demo, work: Work, out: Path | None) -> int:
    print(table.render(found))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(table.as_json(found), indent=2) + "\n")
    wrong = table.problems(found)
    for line in wrong:
        print(f"demo: dsv4_ops FAILED: {line}", file=sys.stderr)
        again = shlex.join([sys.executable, *arguments(work, _job_of(line))])
        print(f"demo:   `{again}` runs it alone", file=sys.stderr)
    if not wrong:
        done = "dsv4_ops: no failures, and all tokens are those of stock Hugging Face"
        print(f"{done}. {found.seconds:.0f} s in all.")
    return 1 if wrong else 0


def _job_of(problem: str) -> str | None:
    """Return the job whose traceback shows a problem; None if only the whole demo shows it."""
    shown_by = {"compiled decode failed": "compile", "the AOTInductor package failed": "package"}
    return next((job for text, job in shown_by.items() if problem.startswith(text)), None)


def run(work: Work, progress: Progress) -> table.Demo:
    """Measure stock Hugging Face and the patched model."""
    steps = work.steps
    # in the background, let Inductor test the compiler's vector instructions
    isa = threading.Thread(target=lambda: attempt(_try_compiler), daemon=True)
    with ExitStack() as stack:
        work = replace(work, folder=Path(stack.enter_context(TemporaryDirectory())))
        if work.package:
            progress.say("dsv4_ops: AOTInductor package of the decode step, in its own process")
            package = stack.enter_context(Job("package", work, progress))
        isa.start()
        from dsv4_ops.integrations import transformers as v4

        with progress.during(f"build a small {MODELS[work.of][0]} on {work.device}"):
            model, ids = work.model(), work.prompts()
            stock_model = stock.Stock(model, ids)
        progress.say("stock Hugging Face: compile decode and count graphs, in its own process")
        count = stack.enter_context(Job("count-stock", work, progress))
        with progress.during("stock Hugging Face: decode, export, static cache"):
            expected, stock_found = _eager(stock_model, model, ids, steps)
            stock_found["package"] = _stock_package(stock_model)
            stock_found["host_syncs"] = _on_gpu(
                work, lambda: measure.host_syncs(stock_model, steps)
            )
            stock_found["cuda_graph"] = _on_gpu(work, lambda: _captured_apart(work, progress))
        with progress.during("dsv4_ops: decode, static cache"):
            side = work.ours(model)
            eager, found = _eager(side, model, ids, steps)
        compiled = torch.compile(side.step, fullgraph=True, backend=work.backend)
        with progress.during(
            f"dsv4_ops: compile the decode step and count graphs, with backend {work.backend}"
        ):
            found["graphs"] = attempt(
                lambda: measure.count_graphs(side, steps, backend=work.backend, compiled=compiled)
            )
        with progress.during("wait for the process that counts graphs of stock Hugging Face"):
            stock_found["graphs"] = count.result()
        found["package"] = NOT_BUILT
        if work.package:
            with progress.during("wait for the process that builds the package"):
                found["package"] = package.result()
        isa.join()  # to load a package, torch needs the result of this test
        with progress.during("both: tokens per second, with nothing beside"):
            found |= _compiled_speed(work, side, compiled, found["package"])
            found["host_syncs"] = _on_gpu(work, lambda: measure.host_syncs(side, steps, compiled))
            found["cuda_graph"] = _on_gpu(work, lambda: measure.capture(side, steps, compiled))
            found["eager_speed"] = measure.tokens_per_second(side, _timed(work))
            v4.unpatch(model)
            stock_found["eager_speed"] = measure.tokens_per_second(stock_model, _timed(work))
    return table.Demo(
        setting=_setting(work),
        stock=table.Figures(compiled_speed=TOO_LONG, **stock_found),
        ours=table.Figures(**found),
        logits_difference=(expected.logits - eager.logits).abs().max().item(),
        seconds=progress.seconds,
    )


def _try_compiler() -> None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


def _timed(work: Work) -> int:
    """Return the steps of a speed measurement; only the best chunk is reported, so few suffice."""
    return min(work.steps, TIMED_STEPS)


def _compiled_speed(
    work: Work, side: ours.Ours, compiled: Callable[..., Tensor], package: Any
) -> dict[str, Any]:
    """Return the speed of the step that Inductor compiled, and how Inductor compiled it."""
    if work.backend == BACKEND:
        speed = attempt(lambda: measure.tokens_per_second(side, _timed(work), compiled))
        return {"compiled_speed": speed, "compiled_by": "torch.compile"}
    if work.folder is None or isinstance(package, Failed):
        return {"compiled_speed": NO_PACKAGE}

    path = work.folder / ours.PACKAGE

    def packaged() -> float:
        step = ours.packaged_step(side, path)
        return measure.tokens_per_second(side, _timed(work), step)

    return {"compiled_speed": attempt(packaged), "compiled_by": "AOTInductor package"}


def _eager(
    side: Side, model: Any, ids: Tensor, steps: int
) -> tuple[measure.Decoded, dict[str, Any]]:
    """Run the measurements that need no compiler."""
    decoded = measure.decode(side, steps)
    static = attempt(lambda: stock.generated(model, ids, GENERATED, cache_implementation="static"))
    return decoded, {"tokens": decoded.tokens, "static_generate": static}


def _on_gpu(work: Work, call: Callable[[], Any]) -> Any:
    return attempt(call) if work.device.type == "cuda" else NEEDS_GPU


def _captured_apart(work: Work, progress: Progress) -> Any:
    with Job("capture-stock", work, progress) as job:
        return job.result()


def _stock_package(side: stock.Stock) -> Unmeasured | Failed:
    exported = attempt(lambda: stock.export_step(side))
    if isinstance(exported, Failed):
        return exported
    return Unmeasured("its export works, no package was built")


def _setting(work: Work) -> table.Setting:
    import transformers

    cuda = work.device.type == "cuda"
    name = torch.cuda.get_device_name(work.device) if cuda else f"CPU ({platform.machine()})"
    return table.Setting(
        device=name,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        dsv4_ops=__version__,
        num_requests=NUM_REQUESTS,
        prompt=real_text(40),
        prompt_length=PROMPT_LENGTH,
        steps=work.steps,
        generated=GENERATED,
        layers=work.layers,
        model=MODELS[work.of][0],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    add = parser.add_argument
    add(
        "--steps",
        type=bounded_int(MIN_STEPS, MAX_STEPS),
        default=64,
        metavar="N",
        help="decode steps, default: %(default)s",
    )
    add(
        "--layers", type=bounded_int(1, MAX_LAYERS), default=LAYERS, metavar="N",
        help="layers, of each kind in turn, default: %(default)s",
    )  # fmt: skip
    add("--model", choices=tuple(MODELS), default="v4", help="default: %(default)s")
    add("--device", default="auto", help="auto, cpu or cuda; default: a GPU if there is one")
    add(
        "--stock-graphs", type=bounded_int(0), default=3, metavar="N",
        help="count Hugging Face's graphs up to N, 0 counts all, default: %(default)s",
    )  # fmt: skip
    add("--fast", action="store_true", help="leave out the AOTInductor package")
    add("--out", type=Path, metavar="FILE", help="write all measurements there, as JSON")
    add("--job", choices=tuple(JOBS), help="one measurement alone, with its traceback")
    add("--since", type=float, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(
            f"demo: --device must be auto, cpu or cuda, got {name!r}. Pass one of these."
        )
    if name == "cuda" and not available:
        raise ValueError("demo: --device must be one that torch sees, got cuda. Pass --device cpu.")
    return torch.device(name)

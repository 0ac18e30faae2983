"""Score trained models in every precision: one that copies, and one that reads text.

Random weights hide what attention does: their logits turn on rounding. The first model looks up
what it read (``copying.py``), so that errors of caches, weights and selections show as wrong
tokens; the second predicts the bytes of a manual that it was not trained on (``reading.py``).
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import copying, reading, training
from benchmarks.harness import report
from benchmarks.harness.options import add_cases, chosen_device
from benchmarks.harness.report import Report, one_line, stamp
from benchmarks.precision import in_bfloat16
from dsv4_ops.testing.checkpoint import quantize_fp4, write_checkpoint
from dsv4_ops.testing.float64.experts import fp4_values

GROUPS = ("copy", "text")
SEQUENCES, AT_ONCE = 192, 96
"""Sequences scored, and in a call."""
WINDOWS = 64
"""Of held-out text, scored in one call."""
SELECTED = 4
"""Rows that the indexer selects of up to 18, where it is judged."""


@dataclass(kw_only=True)
class QualityRow:
    """Predictions of a second copy's tokens, or of held-out text's, in one precision.

    ``accuracy_pct`` of the targets are the likeliest token. ``nll`` is the mean in nats,
    ``perplexity`` its exponential and ``margin`` the mean logit of the target over the best other.
    ``unigram_nll`` is what the frequencies of bytes in the training text give, ``text`` a hash of
    both texts, which depend on the version of Python. ``changed_pct`` and ``nll_change`` are
    against the first row, which is float32 by Hugging Face, and ``pct_error``, ``nll_error`` the
    half widths of their 95 % intervals over pairs of sequences.
    """

    weights: str
    activations: str
    runs: str
    cache: str | None = None
    selection: str = "all"
    targets: int = 0
    accuracy_pct: float | None = None
    nll: float | None = None
    perplexity: float | None = None
    margin: float | None = None
    changed_pct: float | None = None
    pct_error: float | None = None
    nll_change: float | None = None
    nll_error: float | None = None
    unigram_nll: float | None = None
    text: str | None = None
    train_seconds: float | None = None
    seconds: float | None = None
    error: str | None = None


COLUMNS = (
    "weights", "activations", "runs", "cache", "selection", "accuracy_pct", "nll",
    "perplexity", "margin", "changed_pct", "pct_error", "nll_change", "nll_error", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Sequences, and which of their tokens are predicted.

    Args:
        config: ``config.json`` of the model.
        tokens: [sequences, length].
        prompt: Tokens that a patched model reads at once; the rest it reads one by one.
        least: Tokens that come before the first prediction that is scored.
        at_once: Sequences of a call.
    """

    config: Mapping[str, Any]
    tokens: Tensor
    prompt: int
    least: int
    at_once: int = AT_ONCE

    @property
    def targets(self) -> Tensor:
        """Tokens that are predicted."""
        return self.tokens[:, self.least :]

    def scored(self, logits: Tensor) -> Tensor:
        """Of logits of all tokens, those that predict ``targets``."""
        return logits[:, self.least - 1 : -1]


def copy_task(tokens: Tensor) -> Task:
    """Predict the second copy but its first token, which nothing tells."""
    prompt = tokens.shape[1] - copying.SEGMENT
    return Task(copying.CONFIG, tokens, prompt, least=prompt + 1)


def text_task(windows: Tensor) -> Task:
    """Predict text behind the first sliding window."""
    return Task(reading.CONFIG, windows, windows.shape[1] - reading.DECODED, reading.LEAST, WINDOWS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    parser.add_argument(
        "--steps", type=int, help="of training; default: half a minute on a GPU for each model"
    )
    add_cases(parser, GROUPS)


def run(options: argparse.Namespace) -> None:
    """Train, score everything, and write rows and tables to ``options.out``."""
    device = chosen_device(options)
    for group in options.cases or GROUPS:
        (_copy if group == "copy" else _text)(options, device)


def _copy(options: argparse.Namespace, device: torch.device) -> None:
    output: Report[QualityRow] = Report(options.out, "quality", stamp(device, options.command))
    recipe = copying.Recipe()
    if options.smoke:
        recipe = copying.Recipe(steps=2, indexer=1, batch=3)
    elif options.steps:
        recipe = copying.Recipe(steps=options.steps)
    start = time.perf_counter()
    model = copying.train(device, recipe, report=_progress)
    seconds = time.perf_counter() - start
    scored = 6 if options.smoke else SEQUENCES
    tokens = copying.sequences(scored, torch.Generator().manual_seed(1000))
    judge = Judge(copy_task(tokens), device)
    for row in itertools.chain(judge.rows(model), judge.selections(model)):
        row.train_seconds = seconds
        output.add(row)
    table = report.table(output.rows, COLUMNS)
    title = "Second copies of random segments, by precision"
    output.write_text(report.text(title, output, table, _NOTES))


def _text(options: argparse.Namespace, device: torch.device) -> None:
    output: Report[QualityRow] = Report(options.out, "quality_text", stamp(device, options.command))
    text = training.manual()
    stages: Sequence[training.Stage] = reading.STAGES
    if options.smoke:
        stages = reading.SMOKE_STAGES
    elif options.steps:
        stages = (replace(stages[0], steps=options.steps),)

    def progress(step: int, loss: float) -> None:
        if step % 20 == 0:
            _progress("text", step, loss)

    start = time.perf_counter()
    model = reading.train(device, text, stages, report=progress)
    seconds = time.perf_counter() - start
    count, length = (
        (3, reading.LEAST + reading.DECODED) if options.smoke else (WINDOWS, reading.LENGTH)
    )
    for row in Judge(text_task(text.windows(count, length)), device).rows(model):
        row.train_seconds = seconds
        row.unigram_nll, row.text = training.unigram_loss(text), text.hash
        output.add(row)
    table = report.table(output.rows, COLUMNS)
    title = "Held-out text, by precision"
    output.write_text(report.text(title, output, table, _NOTES))


def _progress(part: str, step: int, loss: float) -> None:
    print(f"training {part}, step {step}: {loss:.3f} nats", file=sys.stderr, flush=True)


Call = Callable[[Tensor], Tensor]
"""Logits of sequences of tokens."""


class Judge:
    """Scores models with the same sequences."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self.first: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def rows(self, model: Any) -> Iterator[QualityRow]:
        """A row per precision."""
        yield self._row(model, "fp32", "fp32")
        yield self._patched(model, "fp32", "fp32", "fp32", "reference")
        yield self._patched(model, "fp32", "fp32", "fp8", "serve")
        half = in_bfloat16(model)
        yield self._row(half, "bf16", "bf16")
        yield self._patched(half, "bf16", "bf16", "fp8", "serve")
        yield from self._released(model)

    def _released(self, model: Any) -> Iterator[QualityRow]:
        """From files of the trained weights in the released format."""
        import transformers

        from dsv4_ops.integrations import transformers as v4

        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            weights = copying.released_weights(model, place / "plain")
            path = write_checkpoint(place / "released", self.task.config, weights=weights)
            dequantize = transformers.FineGrainedFP8Config(dequantize=True)
            for dtype in (torch.float32, torch.bfloat16):
                kind = "fp32" if dtype == torch.float32 else "bf16"
                loaded = _dequantized(transformers, path, dequantize, dtype, self.device)
                yield self._row(loaded, "FP8 + FP4 as " + kind, kind)
            quantized = v4.load_quantized(path).to(self.device)
        for activations in ("bf16", "fp8"):
            recipe = v4.Recipe.serve(activations=activations)
            yield self._patched(quantized, "FP8 + FP4", activations, "fp8", recipe)

    @torch.no_grad()
    def selections(self, model: Any) -> Iterator[QualityRow]:
        """With few rows selected: by the indexer, as it is, rounded, and misled."""
        few = copy.deepcopy(model)
        few.config.index_topk = SELECTED
        scorer = copying.csa_attention(few).compressor.indexer
        scorer.index_topk = SELECTED
        best = f"best {SELECTED}"
        yield self._row(few, "fp32", "fp32", selection=best)
        yield self._patched(few, "fp32", "fp32", "fp8", "serve", selection=best)
        for name, change in SELECTIONS.items():
            with changed_scores(few, change):
                yield self._row(few, "fp32", "fp32", selection=f"{best}, {name}")

    def _row(self, model: Any, weights: str, activations: str, **named: Any) -> QualityRow:
        row = QualityRow(weights=weights, activations=activations, runs="Hugging Face", **named)
        return self._score(row, lambda ids: model(ids, use_cache=False).logits)

    def _patched(
        self, model: Any, weights: str, activations: str, kv: str, precision: Any, **named: Any
    ) -> QualityRow:
        from dsv4_ops.integrations import transformers as v4

        row = QualityRow(
            weights=weights, activations=activations, runs="patched", cache=kv, **named
        )
        v4.patch(model, kv=kv, precision=precision)
        try:
            length, split = self.task.tokens.shape[1], self.task.prompt

            def call(ids: Tensor) -> Tensor:
                """The prompt at once, and then as ``generate`` does."""
                cache = v4.PagedCache.for_model(
                    model, max_batch_size=len(ids), max_cache_len=length
                )
                steps = [ids[:, :split], *ids[:, split:].split(1, dim=1)]
                return torch.cat([model(step, cache=cache).logits for step in steps], 1)

            return self._score(row, call)
        finally:
            v4.unpatch(model)

    def _score(self, row: QualityRow, call: Call) -> QualityRow:
        start = time.perf_counter()
        try:
            parts = [
                self.task.scored(call(ids.to(self.device))).float().cpu()
                for ids in self.task.tokens.split(self.task.at_once)
            ]
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as caught:
            row.error = one_line(caught)
            return row
        finally:
            gc.collect()
        row.seconds = time.perf_counter() - start
        correct, nll, margin = judged(torch.cat(parts), self.task.targets)
        row.targets = correct.numel()
        row.accuracy_pct = 100 * float(correct.mean())
        row.nll, row.margin = float(nll.mean()), float(margin.mean())
        row.perplexity = math.exp(row.nll)
        if self.first is None:
            self.first = correct, nll
        else:
            row.changed_pct, row.pct_error = paired(100 * (correct - self.first[0]))
            row.nll_change, row.nll_error = paired(nll - self.first[1])
        return row


def judged(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each target is the likeliest, its nats, and its logit over the best other."""
    wanted = targets.unsqueeze(-1)
    of_target = logits.gather(-1, wanted).squeeze(-1)
    others = logits.scatter(-1, wanted, -torch.inf).amax(-1)
    nll = -logits.double().log_softmax(-1).gather(-1, wanted).squeeze(-1)
    return (of_target > others).double(), nll, (of_target - others).double()


def paired(differences: Tensor) -> tuple[float, float]:
    """Mean of differences [sequences, targets], and the half width of its 95 % interval; targets
    of a sequence depend on each other."""
    means = differences.mean(1)
    return float(means.mean()), float(1.96 * means.std() / len(means) ** 0.5)


def _dequantized(transformers: Any, path: Path, config: Any, dtype: Any, device: Any) -> Any:
    model_class = transformers.DeepseekV4ForCausalLM
    model = model_class.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    model = model.eval().to(device)
    model.set_experts_implementation("eager")
    if dtype == torch.float32:  # asked for at once, weights that are not quantised stay bfloat16
        model = model.float()
        model.config.dtype = torch.float32
    return model


def fp8_scores(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both rounded to e4m3 with a power of two for each row, as ``kv="fp8"`` keeps keys."""
    return _rounded(q, _fp8), _rounded(keys, _fp8)


def fp4_scores(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both rotated (Hadamard) and rounded to e2m1 with a power of two for every 32, as the official
    code simulates."""
    return _rounded(_rotated(q), _fp4), _rounded(_rotated(keys), _fp4)


def random_scores(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of no row in particular."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(keys.shape[1], generator=generator)
    return q, keys[:, order.to(keys.device)]


def worst_scores(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that match least: opposite keys, so that those that matched score nothing."""
    return q, -keys


SELECTIONS = {
    "FP8": fp8_scores,
    "FP4": fp4_scores,
    "of shuffled keys": random_scores,
    "of opposite keys": worst_scores,
}
"""How the rows are selected: by what becomes of the indexer's queries and keys."""


@contextmanager
def changed_scores(model: Any, change: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Have the indexer score what ``change`` makes of queries and keys."""
    scorer = copying.csa_attention(model).compressor.indexer.scorer
    hook = scorer.register_forward_pre_hook(
        lambda module, inputs: (*change(inputs[0], inputs[1]), *inputs[2:])
    )
    try:
        yield
    finally:
        hook.remove()


def _rounded(x: Tensor, of_rows: Callable[[Tensor], Tensor]) -> Tensor:
    return of_rows(x.reshape(-1, x.shape[-1]).float().cpu()).view(x.shape).to(x)


def _fp8(rows: Tensor) -> Tensor:
    scale = torch.exp2((rows.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil())
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def _fp4(rows: Tensor) -> Tensor:
    return fp4_values(*quantize_fp4(rows)).to(torch.float32)


def _rotated(x: Tensor) -> Tensor:
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    rotated: Tensor = x @ (matrix * x.shape[-1] ** -0.5).to(x)
    return rotated


_NOTES = (
    "changed, nll_change: against the first row, with half widths of 95 % intervals.\n"
    "All patched rows read their caches: the prompt at once, then a token at a time."
)

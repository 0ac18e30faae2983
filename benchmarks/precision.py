"""Measure the logit error of every mode of a patched model against float32 Hugging Face."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import trained_model as training
from benchmarks.harness import report
from benchmarks.harness.options import chosen_device
from benchmarks.harness.report import Report, one_line, stamp
from dsv4_ops.testing.models import small_model


@dataclass(kw_only=True)
class PrecisionRow:
    """Logits of one mode beside those of Hugging Face's model in float32 without a cache, of the
    same weights, which bfloat16 has exactly.

    ``case`` is the path of the tokens: "prefill", one call for all up to ``first`` of "decode",
    which is a call per token, behind them. ``rms_pct`` is the root mean square of the difference
    and ``median_pct`` that of the middle token, both of the standard deviation of the logits;
    ``max_std`` the largest difference in such deviations. ``argmax_pct`` of the tokens have the
    same likeliest next one. ``kl_millinats`` is the mean divergence from float32's distribution,
    ``loss`` the mean of the text, in nats, and ``perplexity_pct`` how much ``loss`` adds to the
    perplexity (trained model only).
    """

    model: str
    case: str
    runs: str
    weights: str
    kv: str | None = None
    precision: str | None = None
    requests: int
    tokens: int
    first: int
    last: int
    rms_pct: float | None = None
    median_pct: float | None = None
    max_std: float | None = None
    argmax_pct: float | None = None
    kl_millinats: float | None = None
    loss: float | None = None
    perplexity_pct: float | None = None
    float32_loss: float | None = None
    logits_std: float | None = None
    train_steps: int | None = None
    train_loss: float | None = None
    train_seconds: float | None = None
    bigram_loss: float
    text: str
    error: str | None = None
    seconds: float | None = None


COLUMNS = (
    "model", "case", "runs", "weights", "kv", "precision", "tokens", "rms_pct", "median_pct",
    "max_std", "argmax_pct", "kl_millinats", "perplexity_pct", "error",
)  # fmt: skip

Mode = tuple[str, str, str | None, str | None]
"""What runs, the dtype of the weights, of keys, and the recipe."""

MODES: tuple[Mode, ...] = (
    ("Hugging Face", "fp32", None, None),
    ("Hugging Face", "bf16", None, None),
    ("patched", "fp32", "fp32", "reference"),
    ("patched", "fp32", "fp32", "serve"),
    ("patched", "fp32", "bf16", "serve"),
    ("patched", "fp32", "fp8", "serve"),
    ("patched", "bf16", "bf16", "reference"),
    ("patched", "bf16", "bf16", "serve"),
    ("patched", "bf16", "fp8", "serve"),
)
"""The last one is what ``patch`` does if it is told nothing, to a model as it is released."""
_SMOKE_MODES = (MODES[1], MODES[-1])

_MODELS = ("random", "trained")


@dataclass(frozen=True)
class _Sizes:
    """Requests, tokens of each in the prefill, and behind it in steps of one."""

    requests: int = 4
    prefill: int = 448
    decode: int = 64


_SMOKE_SIZES = _Sizes(requests=2, prefill=136, decode=4)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""

    def chosen(text: str) -> tuple[str, ...]:
        named = text.split(",")
        for name in named:
            if name not in _MODELS:
                raise argparse.ArgumentTypeError(f"must be among {','.join(_MODELS)}, got {name!r}")
        return tuple(name for name in _MODELS if name in named)

    parser.add_argument(
        "--models", type=chosen, default=_MODELS, metavar="A,B",
        help=f"any of {','.join(_MODELS)}; default: all. The trained one takes minutes",
    )  # fmt: skip


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Compare every mode on every model; rows and the table go to ``options.out``."""
    device = chosen_device(options)
    output: Report[PrecisionRow] = Report(options.out, "precision", stamp(device, options.command))
    sizes = _SMOKE_SIZES if options.smoke else _Sizes()
    text = training.manual()
    losses = {
        "bigram_loss": training.bigram_loss(text),
    }
    windows = text.windows(sizes.requests, sizes.prefill + sizes.decode + 1)
    for name in options.models:
        model, trained = _model(name, text, smoke=options.smoke)
        common = {"model": name, "text": text.hash, **losses, **trained}
        pair = {"fp32": round_weights(model).to(device)}
        pair["bf16"] = in_bfloat16(pair["fp32"])
        judge = _Judge(pair["fp32"], windows.to(device), sizes, common)
        modes = _SMOKE_MODES if options.smoke else MODES
        for mode in report.progress(modes, f"{name} model"):
            for row in judge.rows(pair[mode[1]], mode):
                output.add(row)
    parts = [report.table(output.rows, COLUMNS), *_trained_note(output.rows), _NOTES]
    output.write_text(report.text("Logits beside float32 Hugging Face", output, *parts))


def _model(name: str, text: training.Text, *, smoke: bool) -> tuple[Any, dict[str, Any]]:
    if name == "random":
        return small_model(index_topk=training.SIZES["index_topk"]), {}
    stages = training.SMOKE_STAGES if smoke else training.STAGES
    steps, start = sum(stage.steps for stage in stages), time.perf_counter()

    def report_step(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"training {step}/{steps}: {loss:.2f} nats", file=sys.stderr, flush=True)

    model, loss = training.trained_model(text, stages, report=report_step)
    seconds = time.perf_counter() - start
    return model, {"train_steps": steps, "train_loss": loss, "train_seconds": seconds}


def round_weights(model: Any) -> Any:
    """Give the weights values that bfloat16 has, as released ones have; those that Hugging Face
    keeps in float32 stay as they are."""
    for weight in _cast_in_bfloat16(model):
        weight.data = weight.data.bfloat16().float()
    return model


def in_bfloat16(model: Any) -> Any:
    """A copy of the model as ``from_pretrained(dtype=torch.bfloat16)`` makes it."""
    made = copy.deepcopy(model)
    for weight in _cast_in_bfloat16(made):
        weight.data = weight.data.bfloat16()
    made.config.dtype = torch.bfloat16
    return made


def _cast_in_bfloat16(model: Any) -> Iterator[Tensor]:
    kept = set(model._keep_in_fp32_modules_strict)
    saved = model.state_dict().keys()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and weight.is_floating_point() and kept.isdisjoint(name.split(".")):
            yield weight


class _Judge:
    """Compares modes with one forward in float32 over the same tokens."""

    def __init__(self, model: Any, windows: Tensor, sizes: _Sizes, common: dict[str, Any]) -> None:
        self.ids, self.following = windows[:, :-1], windows[:, 1:]
        self.sizes, self.common = sizes, common
        self.expected = model(self.ids, use_cache=False).logits.double()

    def rows(self, model: Any, mode: Mode) -> Iterator[PrecisionRow]:
        """A row per path."""
        runs, weights, kv, precision = mode
        start, error, logits = time.perf_counter(), None, None
        try:
            logits = self._patched(model, kv, precision) if kv and precision else self._stock(model)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as caught:
            error = one_line(caught)
        seconds = time.perf_counter() - start
        split, end = self.sizes.prefill, self.sizes.prefill + self.sizes.decode
        for case, first, last in (("prefill", 0, split), ("decode", split, end)):
            row = PrecisionRow(
                case=case, runs=runs, weights=weights, kv=kv, precision=precision,
                requests=self.sizes.requests, tokens=self.sizes.requests * (last - first),
                first=first, last=last - 1, error=error, seconds=seconds, **self.common,
            )  # fmt: skip
            if logits is not None:
                self._compare(row, logits[:, first:last], slice(first, last))
            yield row

    def _compare(self, row: PrecisionRow, logits: Tensor, where: slice) -> None:
        expected, following = self.expected[:, where], self.following[:, where]
        found = compare(logits.double(), expected)
        for name, value in found.items():
            setattr(row, name, value)
        if row.train_steps:
            loss = training.next_byte_loss(logits, following)
            before = training.next_byte_loss(expected, following)
            row.loss, row.float32_loss = float(loss), float(before)
            row.perplexity_pct = 100 * float(torch.expm1(loss.double() - before.double()))

    def _stock(self, model: Any) -> Tensor:
        import transformers

        cache = transformers.DynamicCache(config=model.config)
        # by position: its name depends on transformers
        return self._through(lambda ids: model(ids, None, None, cache, use_cache=True).logits)

    def _patched(self, model: Any, kv: str, precision: str) -> Tensor:
        from dsv4_ops.integrations import transformers as v4

        v4.patch(model, kv=kv, precision=precision)
        try:
            sizes = self.sizes
            cache = v4.PagedCache.for_model(
                model, max_batch_size=sizes.requests, max_cache_len=sizes.prefill + sizes.decode
            )
            return self._through(lambda ids: model(ids, cache=cache).logits)
        finally:
            v4.unpatch(model)

    def _through(self, call: Callable[[Tensor], Tensor]) -> Tensor:
        split = self.sizes.prefill
        logits = [call(self.ids[:, :split])]
        logits += [
            call(self.ids[:, place : place + 1]) for place in range(split, self.ids.shape[1])
        ]
        return torch.cat([part.float() for part in logits], 1)


def compare(logits: Tensor, expected: Tensor) -> dict[str, float]:
    """How far logits ``[requests, tokens, vocabulary]`` are from the expected ones."""
    deviation = expected.std()
    difference = logits - expected
    of_token = difference.square().mean(-1).sqrt()
    want, got = expected.log_softmax(-1), logits.log_softmax(-1)
    same = logits.argmax(-1) == expected.argmax(-1)
    return {
        "rms_pct": float(100 * difference.square().mean().sqrt() / deviation),
        "median_pct": float(100 * of_token.median() / deviation),
        "max_std": float(difference.abs().max() / deviation),
        "argmax_pct": float(100 * same.double().mean()),
        "kl_millinats": float(1e3 * (want.exp() * (want - got)).sum(-1).mean()),
        "logits_std": float(deviation),
    }


def _trained_note(rows: list[PrecisionRow]) -> list[str]:
    row = next((row for row in rows if row.train_steps), None)
    if row is None or row.float32_loss is None:
        return []
    return [
        f"trained: {row.train_steps} steps in {row.train_seconds:.0f} s, last {row.train_loss:.2f} "
        f"nats per byte; held-out text {row.float32_loss:.2f}, by frequencies of pairs "
        f"of bytes {row.bigram_loss:.2f}"
    ]


_NOTES = (
    "rms, median: of the difference of logits, in percent of their standard deviation; median is "
    "the middle token's. max: in standard deviations.\n"
    "Where a router or a selection turns on rounding, a token takes other experts or keys: such "
    "tokens raise rms and max, and hardly the median."
)

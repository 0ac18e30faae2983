"""Measure the logit error of a patched model's modes against Hugging Face's in float32."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.options import chosen_device
from benchmarks.harness.report import Report, one_line
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.text import prompts


@dataclass(kw_only=True)
class PrecisionRow:
    """The logits of one mode, compared with those of Hugging Face's model in float32 without a
    cache. The two models have the same weights, which bfloat16 represents exactly."""

    case: str  # "prefill" (the first tokens in one call) or "decode" (one call per later token)
    runs: str
    weights: str
    kv: str | None = None
    precision: str | None = None
    requests: int
    tokens: int
    first: int
    last: int
    rms_pct: float | None = None  # root mean square of the difference, in percent of logits_std
    median_pct: float | None = None  # median over tokens of the token's own rms_pct
    max_std: float | None = None  # largest difference in standard deviations
    argmax_pct: float | None = None  # share of tokens with the same most likely next token
    kl_millinats: float | None = None  # mean KL divergence from float32's distribution
    logits_std: float | None = None
    error: str | None = None
    seconds: float | None = None


Mode = tuple[str, str, str | None, str | None]
"""A mode: the model that runs, the dtype of the weights, the format of keys, and the precision."""

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
"""The last mode has the defaults of ``patch``, on a model in the released dtype."""
_SMOKE_MODES = (MODES[1], MODES[-1])

_INDEX_TOPK = 64
"""Rows that the indexer selects: fewer than the context has."""


class _Sizes(NamedTuple):
    requests: int
    prefill: int  # tokens of each request
    decode: int  # tokens after the prefill


_SIZES, _SMOKE_SIZES = _Sizes(4, 448, 64), _Sizes(2, 136, 4)


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    device = chosen_device(options)
    output = Report(options, device)
    sizes = _SMOKE_SIZES if options.smoke else _SIZES
    model = small_model(index_topk=_INDEX_TOPK)  # random weights and sharp attention
    ids = torch.tensor(prompts(sizes.requests, sizes.prefill + sizes.decode))
    pair = {"fp32": round_weights(model).to(device)}
    pair["bf16"] = in_bfloat16(pair["fp32"])
    judge = _Judge(pair["fp32"], ids.to(device), sizes)
    for mode in report.progress(_SMOKE_MODES if options.smoke else MODES, "precision"):
        for row in judge.rows(pair[mode[1]], mode):
            output.add(row)
    output.finish("Logits beside float32 Hugging Face", _NOTES)


def round_weights(model: Any) -> Any:
    """Round weights to bfloat16, except weights that Hugging Face keeps in float32."""
    for weight in _cast_in_bfloat16(model):
        weight.data = weight.data.bfloat16().float()
    return model


def in_bfloat16(model: Any) -> Any:
    """Return a copy like the model that ``from_pretrained(dtype=torch.bfloat16)`` loads."""
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
    """Compares modes with one float32 forward over the same tokens."""

    def __init__(self, model: Any, ids: Tensor, sizes: _Sizes) -> None:
        self.ids, self.sizes = ids, sizes
        self.expected = model(ids, use_cache=False).logits.double()

    def rows(self, model: Any, mode: Mode) -> Iterator[PrecisionRow]:
        """Yield a row for the prefill and a row for the decodes."""
        runs, weights, kv, precision = mode
        start, error, logits = time.perf_counter(), None, None
        try:
            logits = self._patched(model, kv, precision) if kv and precision else self._stock(model)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as caught:
            error = one_line(caught)
        seconds = time.perf_counter() - start
        split, end = self.sizes.prefill, self.sizes.prefill + self.sizes.decode
        for case, first, last in (("prefill", 0, split), ("decode", split, end)):
            found: dict[str, Any] = {}
            if logits is not None:
                part = slice(first, last)
                found = compare(logits[:, part].double(), self.expected[:, part])
            yield PrecisionRow(
                case=case, runs=runs, weights=weights, kv=kv, precision=precision,
                requests=self.sizes.requests, tokens=self.sizes.requests * (last - first),
                first=first, last=last - 1, error=error, seconds=seconds, **found,
            )  # fmt: skip

    def _stock(self, model: Any) -> Tensor:
        import transformers

        cache = transformers.DynamicCache(config=model.config)
        # positional, because the argument's name depends on the release of transformers
        return self._through(lambda ids: model(ids, None, None, cache, use_cache=True).logits)

    def _patched(self, model: Any, kv: str, precision: str) -> Tensor:
        from dsv4_ops.integrations import transformers as v4

        v4.patch(model, kv=kv, precision=precision)
        try:
            requests, length = self.ids.shape
            cache = v4.PagedCache.for_model(model, max_batch_size=requests, max_cache_len=length)
            return self._through(lambda ids: model(ids, cache=cache).logits)
        finally:
            v4.unpatch(model)

    def _through(self, call: Callable[[Tensor], Tensor]) -> Tensor:
        parts = self.ids.split([self.sizes.prefill, *[1] * self.sizes.decode], 1)
        return torch.cat([call(part).float() for part in parts], 1)


def compare(logits: Tensor, expected: Tensor) -> dict[str, float]:
    """Compare logits ``[requests, tokens, vocabulary]`` with the expected ones."""
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


_NOTES = (
    "rms, median: of the difference of logits, in percent of their standard deviation; median is "
    "the middle token's. max: in standard deviations.\n"
    "Where a router or a selection turns on rounding, a token takes other experts or keys: such "
    "tokens raise rms and max, and hardly the median."
)

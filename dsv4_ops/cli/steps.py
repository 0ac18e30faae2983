"""Run a decode step of a family's tiny model, eagerly and compiled.

``doctor`` runs this module in a separate process. ``python -m dsv4_ops.cli.steps FAMILY`` shows the
traceback of a failure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dsv4_ops.cli.doctor import FAMILIES
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_mla_model, small_model

_MAKE: dict[str, Callable[..., Any]] = dict(
    zip(FAMILIES, (small_model, small_mla_model), strict=True)
)
_PROMPT = [5, 6, 7, 8, 9]
_WITHIN = 1e-4


@torch.no_grad()
def check(family: str) -> float:
    """Compare a step compiled without Inductor with the eager step; return the seconds taken.

    Raises:
        RuntimeError: the compiled step has other logits than the eager step.
        Exception: building, patching or compiling the model failed.
    """
    model = v4.patch(_MAKE[family](), kv="fp32", precision="reference")
    start = time.perf_counter()
    compiled = torch.compile(v4.decode_step, fullgraph=True, backend="eager")
    actual, expected = _logits(model, compiled), _logits(model, v4.decode_step)
    difference = (actual - expected).abs().max().item()
    if not difference <= _WITHIN:  # also true for NaN
        raise RuntimeError(f"logits of the compiled step differ from the eager one by {difference}")
    return time.perf_counter() - start


def _logits(model: Any, step: Callable[..., torch.Tensor]) -> torch.Tensor:
    cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=64)
    tokens = torch.tensor(_PROMPT)
    row = torch.zeros(1, dtype=torch.int32)

    def batch(tokens: torch.Tensor, length: int) -> v4.StepBatch:
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
        return v4.StepBatch(tokens, starts, torch.full_like(row, length), row)

    v4.prefill_step(model, batch(tokens, len(tokens)), cache.tensors)
    return step(model, batch(tokens[:1], len(tokens) + 1), cache.tensors)


if __name__ == "__main__":
    for _family in sys.argv[1:] or FAMILIES:
        print(f"{check(_family):.1f}", flush=True)

"""Train a small DeepSeek-V4 on Python's manual, of sizes that the released formats have blocks of.

``training.py`` trains a smaller one, on a CPU and for minutes, that no released format holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import copying, training
from benchmarks.training import Stage, Text
from dsv4_ops.testing.text import VOCAB_SIZE

LENGTH, DECODED, LEAST = 512, 32, 128
"""Tokens of a window; of these, that are read one at a time; and that come before what is scored, a
sliding window of them, so that every prediction may read compressed rows."""

CONFIG: dict[str, Any] = {
    **copying.CONFIG,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "sliding_window": 128,
    "index_topk": LENGTH // 4,
}
"""A layer of each kind. Every row is selected, as the language loss does not train the indexer:
what the precision of a selection costs, the copying model says."""

STAGES = (Stage(steps=280, batch=32, length=256), Stage(steps=20, batch=16, length=LENGTH))
SMOKE_STAGES = (Stage(steps=2, batch=2, length=32),)


def train(
    device: torch.device | str,
    text: Text,
    stages: Sequence[Stage] = STAGES,
    *,
    report: Callable[[int, float], object] = lambda step, loss: None,
) -> Any:
    """Train on ``text.train``; deterministic, up to the device's rounding.

    Returns:
        The float32 model, in evaluation mode.

    Raises:
        ImportError: transformers is missing or has no DeepSeek-V4.
    """
    model = copying.new_model(device, content=CONFIG).train()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), copying.dense_forwards(model):
        torch.manual_seed(0)  # of the batches
        training.train(model, text.train, stages, report)
    return model.eval().requires_grad_(False)

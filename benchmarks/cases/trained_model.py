"""A small DeepSeek-V4 that is trained for minutes on Python's manual, byte by byte."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.testing.models import require_transformers, small_config
from dsv4_ops.testing.text import VOCAB_SIZE, ByteTokenizer

_HELD_OUT_EVERY, _HELD_OUT = 10, 5
"""Every tenth topic of the manual is held out, starting at the sixth."""


@dataclass(frozen=True)
class Text:
    """Training and held-out tokens, and a hash of both, which depends on the Python version."""

    train: Tensor
    held_out: Tensor
    hash: str

    def windows(self, count: int, length: int) -> Tensor:
        """Evenly spaced windows of the held-out text, [count, length]."""
        starts = [len(self.held_out) * index // count for index in range(count)]
        return torch.stack([self.held_out[start : start + length] for start in starts])


def manual() -> Text:
    """Python's own manual (``pydoc_data.topics``) as bytes, all ASCII."""
    from pydoc_data.topics import topics

    names = sorted(topics)  # topics share some paragraphs verbatim
    paragraphs = {name: topics[name].split("\n\n") for name in names}
    chosen = names[_HELD_OUT::_HELD_OUT_EVERY]
    held_out = dict.fromkeys(part for name in chosen for part in paragraphs[name])
    every = dict.fromkeys(part for name in names for part in paragraphs[name])
    parts = ["\n\n".join(part for part in every if part not in held_out), "\n\n".join(held_out)]
    encoded = [part.encode("ascii", "ignore").decode() for part in parts]
    tokens = [torch.tensor(ByteTokenizer().encode(part)) for part in encoded]
    return Text(tokens[0], tokens[1], hashlib.sha256("\0".join(encoded).encode()).hexdigest()[:16])


def bigram_loss(text: Text) -> float:
    """Nats per byte of the held-out text under the byte bigrams of the training text."""
    pairs = text.train[:-1] * VOCAB_SIZE + text.train[1:]
    counts = torch.bincount(pairs, minlength=VOCAB_SIZE**2).double().view(VOCAB_SIZE, -1) + 0.1
    chances = counts / counts.sum(1, keepdim=True)
    return float(-chances.log()[text.held_out[:-1], text.held_out[1:]].mean())


@dataclass(frozen=True)
class Stage:
    """``steps`` of ``batch`` sequences of ``length`` tokens."""

    steps: int
    batch: int
    length: int


STAGES = (Stage(steps=320, batch=4, length=256), Stage(steps=20, batch=1, length=512))
"""Cheap short sequences first, then sequences of the evaluation's length."""
SMOKE_STAGES = (Stage(steps=2, batch=2, length=32),)

SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 256,
    "index_topk": 64,  # below the number of rows at the benchmark's contexts
    "experts_implementation": "eager",
}
"""Overrides of ``small_config``."""


def trained_model(
    text: Text,
    stages: Sequence[Stage] = STAGES,
    *,
    report: Callable[[int, float], object] = lambda step, loss: None,
) -> tuple[Any, float]:
    """Train Hugging Face's float32 model on next-byte prediction with its own forward.

    AdamW with warm-up and cosine decay, on the CPU in one thread, the same at every run. The
    indexer keeps its initial weights: its scores only select rows and get no gradient.

    Returns:
        The model in evaluation mode, and the mean loss of the last tenth of the steps.
    """
    _, model_class = require_transformers()
    with _one_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        model = model_class(small_config(**SIZES)).train()
        for name, table in model.named_buffers():  # of hash routers: they start as zeros
            if name.endswith("tid2eid"):
                picks = torch.rand(len(table), model.config.n_routed_experts).argsort(1)
                table.copy_(picks[:, : table.shape[1]])
        losses = _train(model, text.train, stages, report)
    last = losses[-max(1, len(losses) // 10) :]
    return model.eval().requires_grad_(False), sum(last) / len(last)


def _train(
    model: Any, tokens: Tensor, stages: Sequence[Stage], report: Callable[[int, float], object]
) -> list[float]:
    total, losses = sum(stage.steps for stage in stages), list[float]()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01, foreach=True
    )
    for stage in stages:
        for _ in range(stage.steps):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * _learning_rate(len(losses), total)
            starts = torch.randint(len(tokens) - stage.length - 1, (stage.batch,)).tolist()
            batch = torch.stack([tokens[start : start + stage.length + 1] for start in starts])
            loss = next_byte_loss(model(batch[:, :-1], use_cache=False).logits, batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            report(len(losses), losses[-1])
    return losses


def next_byte_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Mean nats per token: ``[..., vocabulary]`` against ``[...]``."""
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), following.flatten())


def _learning_rate(step: int, total: int, warm: int = 20) -> float:
    """Factor: linear warm-up, then cosine decay to a tenth."""
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, total - warm))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

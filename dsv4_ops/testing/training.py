"""A small DeepSeek-V4, trained for minutes on text that every Python brings."""

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
"""Every tenth topic of the manual, from the sixth on: none of its paragraphs is trained on."""


@dataclass(frozen=True)
class Text:
    """Tokens to train on and held-out tokens, and a hash of both: Python versions differ."""

    train: Tensor
    held_out: Tensor
    hash: str

    def windows(self, count: int, length: int) -> Tensor:
        """That many different pieces of the held-out text, evenly spread: ``[count, length]``.

        Raises:
            ValueError: The text has no room for them.
        """
        if count * length > len(self.held_out):
            raise ValueError(
                f"Text.windows: count * length must be at most {len(self.held_out)}, got "
                f"{count} * {length}. Ask for fewer or shorter pieces."
            )
        starts = [len(self.held_out) * index // count for index in range(count)]
        return torch.stack([self.held_out[start : start + length] for start in starts])


def manual() -> Text:
    """Python's own manual (``pydoc_data.topics``) as bytes, all ASCII.

    Raises:
        ImportError: This Python came without it.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    judged = dict.fromkeys(_paragraphs(topics, names[_HELD_OUT::_HELD_OUT_EVERY]))
    read = dict.fromkeys(part for part in _paragraphs(topics, names) if part not in judged)
    parts = ["\n\n".join(found) for found in (read, judged)]
    encoded = [part.encode("ascii", "ignore").decode() for part in parts]
    tokens = [torch.tensor(ByteTokenizer().encode(part)) for part in encoded]
    return Text(tokens[0], tokens[1], hashlib.sha256("\0".join(encoded).encode()).hexdigest()[:16])


def _paragraphs(topics: dict[str, str], names: Sequence[str]) -> Iterator[str]:
    """Topics repeat parts of each other, word for word."""
    for name in names:
        yield from topics[name].split("\n\n")


def unigram_loss(text: Text) -> float:
    """Nats per byte of the held-out text by the frequency of each byte in the other."""
    counts = torch.bincount(text.train, minlength=VOCAB_SIZE).double() + 1.0
    return float(-(counts / counts.sum()).log()[text.held_out].mean())


def bigram_loss(text: Text) -> float:
    """The same by the frequency of each byte behind each other one."""
    pairs = text.train[:-1] * VOCAB_SIZE + text.train[1:]
    counts = torch.bincount(pairs, minlength=VOCAB_SIZE**2).double().view(VOCAB_SIZE, -1) + 0.1
    chances = counts / counts.sum(1, keepdim=True)
    return float(-chances.log()[text.held_out[:-1], text.held_out[1:]].mean())


@dataclass(frozen=True)
class Stage:
    """``steps`` of ``batch`` pieces of ``length`` tokens."""

    steps: int
    batch: int
    length: int


STAGES = (Stage(steps=320, batch=4, length=256), Stage(steps=20, batch=1, length=512))
"""Short pieces first, as they are cheaper; then as long as those that are judged."""
SMOKE_STAGES = (Stage(steps=2, batch=2, length=32),)

SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 256,
    "index_topk": 64,  # fewer than there are, at the contexts of the benchmark
    "experts_implementation": "eager",
}
"""What the trained model has otherwise than ``small_config``."""


def trained_model(
    text: Text,
    stages: Sequence[Stage] = STAGES,
    *,
    seed: int = 0,
    report: Callable[[int, float], object] = lambda step, loss: None,
) -> tuple[Any, float]:
    """Hugging Face's model in float32, trained by its own forward to predict the next byte.

    AdamW, with a warm-up and a cosine; all on the CPU, in one thread, from ``seed``. The indexer
    gets no gradient, as its scores only choose rows: its weights stay as drawn.

    Args:
        text: What is read; only ``text.train``.
        stages: How long, one after the other.
        seed: Of the weights and of the pieces.
        report: Called with each step and its loss.

    Returns:
        The model in evaluation mode, and the mean loss of the last tenth of the steps.

    Raises:
        ImportError: transformers is missing or has no DeepSeek-V4.
    """
    _, model_class = require_transformers()
    with _one_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        model = model_class(small_config(**SIZES)).train()
        _route_evenly(model)
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
                group["lr"] = 3e-3 * _rate(len(losses), total)
            starts = torch.randint(len(tokens) - stage.length - 1, (stage.batch,)).tolist()
            pieces = torch.stack([tokens[start : start + stage.length + 1] for start in starts])
            loss = next_byte_loss(model(pieces[:, :-1], use_cache=False).logits, pieces[:, 1:])
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


def _rate(step: int, total: int, warm: int = 20) -> float:
    """Share of the learning rate: up in ``warm`` steps, then down to a tenth by a cosine."""
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, total - warm))


def _route_evenly(model: Any) -> None:
    """Experts of each token in the layers that look them up, which begin as zeros."""
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            picks = torch.rand(len(table), model.config.n_routed_experts).argsort(1)
            table.copy_(picks[:, : table.shape[1]])


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

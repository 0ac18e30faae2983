"""Train a small DeepSeek-V4 that copies what it read before, and its indexer to find it.

A sequence is a random segment, as many other tokens and the segment once more. Whoever predicts
the second copy has to look up the first, which is out of the window and only in rows that the
compressor made. The gap is always the same, so that attention may go by distance: of sequences with
gaps of three lengths, this model learned the one in the window only. The language loss has no
gradient for the indexer: it learns afterwards where attention went while every row was selected.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training import learning_rate
from dsv4_ops.testing.checkpoint import TINY
from dsv4_ops.testing.models import require_transformers

SEGMENT = GAP = 24
"""Tokens of a copy, and between the two: a token's first copy is 48 back, and the window 32."""

CONFIG: dict[str, Any] = {
    **TINY,
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "index_n_heads": 16,
    "index_topk": 64,  # every row, while attention learns
    "n_routed_experts": 4,
    "num_hash_layers": 0,
    "compress_ratios": [0, 4, 0],
    "sliding_window": 32,
}
"""A layer with the window alone and one with CSA; sizes that the released formats have blocks of.
The last ratio is of the draft layer."""

_WARM = 20
"""Steps in which the rate grows; then it stays."""

SPECIALS = 2
"""Tokens before the random ones: CONFIG's start and end."""


def sequences(count: int, generator: torch.Generator) -> Tensor:
    """Draw sequences, [count, 72]."""
    shape = count, 2 * SEGMENT + GAP
    tokens = torch.randint(SPECIALS, CONFIG["vocab_size"], shape, generator=generator)
    tokens[:, -SEGMENT:] = tokens[:, :SEGMENT]
    return tokens


def targets(tokens: Tensor) -> Tensor:
    """What is to be predicted of sequences: the second copy but its first token."""
    return tokens[:, 1 - SEGMENT :]


@dataclass(frozen=True)
class Recipe:
    """Steps of ``batch`` sequences of the model, and of its indexer.

    Of seven tried on a GPU it learns fastest: 66 % of the tokens after 100 steps, 89 after 200, 96
    after 250, 99 after 300. It stops before that, as a model that is always right hides errors. At
    half the batch and with the betas that are usual it takes four times as many steps.
    """

    steps: int = 230
    indexer: int = 150
    batch: int = 64
    rate: float = 3e-3
    seed: int = 0


def new_model(
    device: torch.device | str = "cpu", seed: int = 0, content: Mapping[str, Any] | None = None
) -> Any:
    """Hugging Face's float32 model as it initialises one, of a ``config.json`` or of CONFIG."""
    config_class, model_class = require_transformers()
    unquantized = ("quantization_config", "expert_dtype", "torch_dtype", "architectures")
    given = CONFIG if content is None else content
    plain = {name: value for name, value in given.items() if name not in unquantized}
    config = config_class.from_dict(plain)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(device)


def train(
    device: torch.device | str = "cpu",
    recipe: Recipe | None = None,
    *,
    report: Callable[[str, int, float], object] = lambda part, step, loss: None,
) -> Any:
    """Train the model, then its indexer; deterministic in the seed, up to the device's rounding.

    Returns:
        The float32 model, in evaluation mode.

    Raises:
        ImportError: transformers is missing or has no DeepSeek-V4.
    """
    recipe = recipe or Recipe()
    model = new_model(device, recipe.seed).train()
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    with torch.enable_grad(), dense_forwards(model):
        _train_attention(model, recipe, generator, report)
        _train_indexer(model, recipe, generator, report)
    return model.eval().requires_grad_(False)


def copy_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean nats per target."""
    found = logits[:, -SEGMENT:-1].float()
    return nn.functional.cross_entropy(found.flatten(0, 1), targets(tokens).flatten())


def _train_attention(
    model: Any, recipe: Recipe, generator: torch.Generator, report: Callable[..., object]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.99))
    for step in range(recipe.steps):
        tokens = sequences(recipe.batch, generator).to(model.device)
        loss = copy_loss(model(tokens, use_cache=False).logits, tokens)
        optimize(optimizer, model, loss, recipe.rate * min(1.0, (step + 1) / _WARM))
        if (step + 1) % 50 == 0:
            report("attention", step + 1, float(loss.detach()))


def _train_indexer(
    model: Any, recipe: Recipe, generator: torch.Generator, report: Callable[..., object]
) -> None:
    """Have scores of rows, as a distribution, be that of attention over them."""
    attention = csa_attention(model)
    indexer = attention.compressor.indexer
    model.requires_grad_(False)
    indexer.requires_grad_(True)
    optimizer = torch.optim.AdamW(indexer.parameters(), lr=recipe.rate, betas=(0.9, 0.95))
    for step in range(recipe.indexer):
        tokens = sequences(recipe.batch, generator).to(model.device)
        with _watched(attention) as seen:
            model(tokens, use_cache=False)
        loss = indexer_loss(seen["scores"], seen["weights"])
        optimize(optimizer, indexer, loss, recipe.rate * learning_rate(step, recipe.indexer))
        if (step + 1) % 50 == 0:
            report("indexer", step + 1, float(loss.detach()))


def indexer_loss(scores: Tensor, weights: Tensor) -> Tensor:
    """Mean divergence at targets of softmax(scores) from attention's share of each row.

    Args:
        scores: Of the indexer, [count, length, rows].
        weights: Of attention, all heads, over keys of the window and then the rows.
    """
    rows, length = scores.shape[-1], scores.shape[1]
    position = torch.arange(length - SEGMENT, length - 1, device=scores.device)
    visible = torch.arange(rows, device=scores.device) < (position[:, None] + 1) // _RATIO
    wanted = weights[..., -rows:].sum(1)[:, -SEGMENT:-1].detach() * visible
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-9)
    found = scores[:, -SEGMENT:-1].masked_fill(~visible, -torch.inf).log_softmax(-1)
    found = found.masked_fill(~visible, 0.0)
    return -(wanted * found).sum(-1).mean()


_RATIO = 4


def csa_attention(model: Any) -> Any:
    """The attention module whose rows the indexer selects."""
    return next(
        layer.self_attn
        for layer in model.model.layers
        if hasattr(getattr(layer.self_attn, "compressor", None), "indexer")
    )


@contextmanager
def _watched(attention: Any) -> Iterator[dict[str, Tensor]]:
    """Scores of the indexer and weights of attention, as the forward makes them."""
    seen: dict[str, Tensor] = {}

    def scores(module: Any, inputs: Any, output: Tensor) -> None:
        seen["scores"] = output

    def weights(module: Any, inputs: Any, output: Any) -> None:
        seen["weights"] = output[1]

    hooks = [
        attention.compressor.indexer.scorer.register_forward_hook(scores),
        attention.register_forward_hook(weights),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def dense_forwards(model: Any) -> Iterator[None]:
    """Every expert for every token, which few small ones are faster with to train."""
    modules = [layer.mlp.experts for layer in model.model.layers]
    for module in modules:
        module.forward = types.MethodType(dense_experts, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def dense_experts(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Forward of Hugging Face's experts without a loop."""
    share = hidden.new_zeros(hidden.shape[0], module.num_experts)
    share = share.scatter_add(1, indices, weights.to(hidden.dtype))
    made = module._apply_gate(torch.einsum("td,eid->tei", hidden, module.gate_up_proj))
    return torch.einsum("tei,edi,te->td", made, module.down_proj, share)


def optimize(optimizer: torch.optim.Optimizer, module: Any, loss: Tensor, rate: float) -> None:
    """One step of ``optimizer`` on the parameters of ``module``."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def released_weights(model: Any, folder: Any) -> dict[str, Tensor]:
    """The weights by their names in released files, from what ``save_pretrained`` writes to
    ``folder``; its names are the released ones but for a few."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    return {_released_name(name): weight for name, weight in stored.items()}


def _released_name(name: str) -> str:
    for found, released in (
        ("model.", ""),
        ("embed_tokens.", "embed."),
        (".attn.norm.", ".attn.kv_norm."),
        ("hc_head.hc_", "hc_head_"),
    ):
        name = name.removeprefix(found) if not released else name.replace(found, released)
    return name

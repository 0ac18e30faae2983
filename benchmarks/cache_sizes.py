"""The tables of ``docs/memory.md``, from tensors that are allocated nowhere:

    python -m benchmarks.cache_sizes docs/memory.md

replaces what is between ``<!-- table: memory -->``, or weights, and ``<!-- /table -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.baselines.stock_model import LAYER_TYPES, filled_cache
from benchmarks.memory import step_bytes
from dsv4_ops.checkpoint.format import weight_bytes
from dsv4_ops.testing.checkpoint import FLASH, PRO
from dsv4_ops.testing.models import YARN

GIB = 2**30
_SLIDING, _C4, _C128, _ = LAYER_TYPES
_PARTS = ("window", "compressed", "indexer", "states", "tables")

MODELS = {
    "Flash": [_SLIDING, _SLIDING, *[_C4, _C128] * 20, _C4],
    "Pro": [_C128, *[_C128, _C4] * 30],
}
"""Types of the layers as released: what memory depends on, as all else is of one size in both."""

GPUS = {"Flash": (FLASH, (1, 2, 4, 8)), "Pro": (PRO, (8, 16))}
"""GPUs that a model is split over, and its config."""

STEP_TOKENS = 16384
"""Most that a step of ``generate`` has, of up to 64 requests."""

INDEX_TOPK = {"Flash": 512, "Pro": 1024}

BATCHES = ((1, 2**20), (8, 2**17), (64, 2**15), (64, 2**12))
"""Requests, and tokens of each."""


def config_of(name: str) -> Any:
    """The configuration of a released model."""
    from transformers import DeepseekV4Config

    layers = MODELS[name]
    return DeepseekV4Config(
        num_hidden_layers=len(layers), layer_types=list(layers), rope_parameters=dict(YARN)
    )


def ours(config: Any, batch: int, tokens: int, max_chunk: int | None = None) -> dict[str, int]:
    """Bytes of a ``PagedCache`` in FP8, by part."""
    from dsv4_ops.integrations.transformers import PagedCache

    return PagedCache(
        config, max_batch_size=batch, max_cache_len=tokens, max_chunk=max_chunk, device="meta"
    ).memory()


def baseline(config: Any, batch: int, tokens: int) -> int:
    """Bytes of Hugging Face's cache in bfloat16 after as many tokens."""
    from transformers import DeepseekV4ForCausalLM  # its module names the types of its layers

    del DeepseekV4ForCausalLM
    model = SimpleNamespace(config=config, device=torch.device("meta"))
    cache = filled_cache(model, batch=batch, context=tokens)
    held = pytree.tree_leaves([list(vars(layer).values()) for layer in cache.layers])
    tensors = {id(tensor): tensor for tensor in held if isinstance(tensor, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def rows() -> Iterable[tuple[str, ...]]:
    """Lines of the table."""
    from dsv4_ops.integrations.transformers.generation.hooks import chunk_of

    for name in MODELS:
        config = config_of(name)
        for batch, tokens in BATCHES:
            other = baseline(config, batch, tokens)
            chunks = dict.fromkeys((min(tokens, 2048), chunk_of(batch, tokens)))
            for chunk in chunks:
                parts = ours(config, batch, tokens, chunk)
                size = f"{batch} x {tokens // 1024}k" if tokens < 2**20 else f"{batch} x 1M"
                figures = [sum(parts.values()), *(parts[part] for part in _PARTS), other]
                yield (name, size, str(chunk), *(_gib(figure) for figure in figures))


def step_size(name: str) -> int:
    """Bytes of a prefill of ``STEP_TOKENS`` tokens, beside weights and cache. Layers of a kind take
    the same memory in turn, and experts come with the tokens: a few of each do."""
    config, _ = GPUS[name]
    kinds = list(dict.fromkeys(config["compress_ratios"][:-1]))
    few = {
        **config,
        "num_hidden_layers": len(kinds),
        "compress_ratios": [*kinds, 0],
        "num_hash_layers": 1,
        "n_routed_experts": 16,
        "index_topk": INDEX_TOPK[name],
    }
    return step_bytes(few, 8, STEP_TOKENS // 8, 2**17)


def weight_rows() -> Iterable[tuple[str, ...]]:
    """Lines of the table of weights, in GB as GPUs are sold."""
    for name, (config, counts) in GPUS.items():
        cache = sum(ours(config_of(name), 8, 2**17).values())
        step = step_size(name)
        for count in counts:
            plans = [
                weight_bytes(config, num_gpus=count, split_heads=split) for split in (False, True)
            ]
            whole, split = (sum(plan.values()) for plan in plans)
            figures = [*plans[0].values(), whole, split, cache, step, whole + cache + step]
            yield (name, str(count), *(f"{figure / 1e9:.1f}" for figure in figures))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


TITLES = {
    "memory": ("model", "requests", "max_chunk", "GiB", *_PARTS, "Hugging Face"),
    "weights": (
        *("model", "GPUs", *weight_bytes(FLASH), "sum", "heads split", "cache, 8 x 128k"),
        *("step of 16k tokens", "sum, cache and step"),
    ),
}


def page(text: str, lines: Iterable[tuple[str, ...]], table: str = "memory") -> str:
    """``text`` with a table of ``lines``."""
    whole = (TITLES[table], tuple("---" for _ in TITLES[table]), *lines)
    made = "".join("| " + " | ".join(line) + " |\n" for line in whole)
    marked = re.compile(rf"(<!-- table: {table} -->\n)(.*?)(<!-- /table -->)", re.S)
    return marked.sub(lambda found: found[1] + made + found[3], text)


def main(path: str) -> None:
    """Write the tables of the page at ``path``."""
    target = Path(path)
    target.write_text(page(page(target.read_text(), rows()), weight_rows(), "weights"))


if __name__ == "__main__":
    main(sys.argv[1])

"""Inputs for steps of whole models: configurations, batches, and caches of random rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.harness.draw import Draw
from dsv4_ops.core.layout import QuantizedLayout
from dsv4_ops.testing.checkpoint import FLASH, PRO

MODELS = {"flash": FLASH | {"index_topk": 512}, "pro": PRO | {"index_topk": 1024}}
"""Configs with the ``index_topk`` of released models; ``FLASH`` and ``PRO`` have a tiny model's."""

SMALL = {"hidden_size": 128, "num_attention_heads": 4, "o_groups": 4, "q_lora_rank": 128}
SMALL |= {"o_lora_rank": 128, "moe_intermediate_size": 512, "vocab_size": 260, "index_topk": 16}
SMALL |= {"index_n_heads": 16, "num_experts_per_tok": 2}
"""Sizes that are smaller on a CPU."""


def flash_config(
    layers: int, model: str = "flash", *, small: bool = False, **changed: Any
) -> dict[str, Any]:
    """Return the ``config.json`` of the first layers of ``model``."""
    config = {**MODELS[model], "num_hidden_layers": layers}
    config["compress_ratios"] = [*config["compress_ratios"][:layers], 0]
    return config | ({**SMALL, "n_routed_experts": 8} if small else {}) | changed


def v3_config(layers: int, *, small: bool = False) -> dict[str, Any]:
    """Return the ``config.json`` of V3 with fewer layers; half of them, at most 3, are dense."""
    import transformers

    from dsv4_ops.testing.mla_checkpoint import random_model
    from dsv4_ops.testing.models import MLA_YARN

    changed: dict[str, Any] = {"num_hidden_layers": layers}
    changed["first_k_dense_replace"] = min(3, layers // 2)
    if small:
        return dict(random_model("v3", **changed).config.to_dict())
    changed |= {"rope_parameters": dict(MLA_YARN), "max_position_embeddings": 163840}
    return dict(transformers.DeepseekV3Config(**changed).to_dict())


def step_batch(
    counts: Sequence[int],
    lens: Sequence[int],
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> Any:
    """Make the last ``counts`` tokens of requests of lengths ``lens``, equal in all processes."""
    from dsv4_ops.integrations import transformers as v4

    made = torch.Generator().manual_seed(sum(lens))
    ids = torch.randint(3, 250, (sum(counts),), generator=made)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    places = range(len(counts)) if rows is None else rows
    ints = (torch.tensor(list(each), dtype=torch.int32) for each in (lens, places))
    return v4.StepBatch(*(each.to(device) for each in (ids, starts, *ints)))


def fill(cache: Any) -> None:
    """Fill every row of a ``PagedCache`` with random values: codes without NaN, and scales."""
    draw = Draw(cache.device, 0)
    for kind, layer in zip(cache.spec.kinds, cache.tensors.layers, strict=True):
        for pages in tree_leaves(layer):
            pages.normal_() if pages.is_floating_point() else pages.random_(0x20, 0x40)
        is_v4 = hasattr(cache.spec.layers, "layouts")
        for name, layout in cache.spec.layers.layouts(kind).items() if is_v4 else ():
            if isinstance(layout, QuantizedLayout):
                draw.fill(getattr(layer, name), layout)


def cuda_graphs(device: torch.device) -> dict[str, Any]:
    """Return Inductor's options: on a GPU, capture the step in a CUDA graph or raise."""
    names = ("triton.cudagraphs", "triton.cudagraph_or_error")
    return dict.fromkeys(names, True) if device.type == "cuda" else {}

"""Attention layers in the plain layout against Hugging Face's in float32: the same projections, the
same input of the output projection."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.layers import (
    HEADS,
    HIDDEN,
    INDEX_HEADS,
    KINDS,
    LENGTH,
    PLAIN,
    SmallLayer,
    in_chunks,
)

transformers = pytest.importorskip(
    "transformers", "5.17", reason="needs transformers with deepseek_v4"
)
modeling = pytest.importorskip(
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    reason="needs transformers with deepseek_v4",
)

LAYER_TYPES = {
    "window": "sliding_attention",
    "c4": "compressed_sparse_attention",
    "c128": "heavily_compressed_attention",
}
REQUESTS = 2


def config() -> Any:
    spec = PLAIN.attention
    return transformers.DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        layer_types=list(LAYER_TYPES.values()),
        compress_rates={LAYER_TYPES["c4"]: spec.c4_ratio, LAYER_TYPES["c128"]: spec.c128_ratio},
        sliding_window=spec.window_size,
        q_lora_rank=32,
        o_groups=PLAIN.num_groups,
        o_lora_rank=16,
        index_n_heads=INDEX_HEADS,
        index_topk=spec.index_topk,
        num_hash_layers=0,
        attn_implementation="eager",
        rope_scaling={
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    )


def their_layer(kind: str) -> Any:
    """A layer of random weights."""
    layer = modeling.DeepseekV4Attention(config(), KINDS.index(kind)).eval()
    made = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            plain = name.endswith(("position_bias", "norm.weight", "sinks"))
            scale = 1.0 if plain else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=made) * scale)
    return layer


@torch.no_grad()
def their_groups(layer: Any, x: Tensor) -> Tensor:
    """What their output projection gets, [requests, tokens, groups, width]."""
    tokens = torch.arange(x.shape[1])
    rotary = modeling.DeepseekV4RotaryEmbedding(layer.config)
    positions = tokens[None].expand(x.shape[0], -1)
    embeddings = {name: rotary(x, positions, layer_type=name) for name in ("main", "compress")}
    back = tokens[:, None] - tokens
    hidden = (back < 0) | (back >= layer.sliding_window)
    mask = torch.zeros(len(x), 1, len(tokens), len(tokens)).masked_fill(hidden, -torch.inf)
    seen: list[Tensor] = []
    handle = layer.o_a_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer(x, embeddings, positions, mask, None)
    handle.remove()
    return seen[0].reshape(*x.shape[:2], PLAIN.num_groups, -1)


@torch.no_grad()
def our_inputs(layer: Any, x: Tensor) -> list[dict[str, Tensor]]:
    """The projections of every request, from their modules."""
    residual = layer.q_a_norm(layer.q_a_proj(x))
    found = {
        "q": layer.q_b_proj(residual).unflatten(-1, (HEADS, -1)),
        "kv": layer.kv_norm(layer.kv_proj(x)),
    }
    compressor = layer.compressor
    if compressor is not None:
        found["kv_score"] = torch.cat([compressor.kv_proj(x), compressor.gate_proj(x)], -1)
    if hasattr(compressor, "indexer"):
        indexer = compressor.indexer
        found["indexer_kv_score"] = torch.cat([indexer.kv_proj(x), indexer.gate_proj(x)], -1)
        found["indexer_q"] = indexer.q_b_proj(residual).unflatten(-1, (INDEX_HEADS, -1))
        found["indexer_weights"] = scorer_weights(indexer, x)
    return [{name: tensor[row] for name, tensor in found.items()} for row in range(x.shape[0])]


def scorer_weights(indexer: Any, x: Tensor) -> Tensor:
    """Weights of the heads, wherever the version of transformers keeps their projection."""
    modules = dict(indexer.named_modules())
    (name,) = (name for name in modules if name.endswith("weights_proj"))
    return modules[name](x)


def our_layer(kind: str, hf: Any) -> SmallLayer:
    layer = SmallLayer(kind, PLAIN)
    weights = {"attn_sink": hf.sinks}
    sources = {"": hf.compressor, "indexer_": getattr(hf.compressor, "indexer", None)}
    for prefix, source in sources.items():
        if source is not None:
            weights[f"{prefix}ape"] = source.position_bias
            weights[f"{prefix}norm_weight"] = source.kv_norm.weight
    layer.attention.load_state_dict(weights)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_random_chunks(kind: str) -> None:
    hf = their_layer(kind)
    x = torch.randn(REQUESTS, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(4))
    expected, layer, inputs = (
        their_groups(hf, x),
        our_layer(kind, hf),
        our_inputs(hf, x),
    )
    rng = Random(0)
    cuts = [[LENGTH] * 1] * REQUESTS
    for _ in range(3):
        for out, want in zip(in_chunks(layer, inputs, cuts), expected, strict=True):
            assert want.abs().amax() > 1
            torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
        ends = [sorted(rng.sample(range(1, LENGTH), 5)) for _ in range(REQUESTS)]
        cuts = [
            [stop - start for start, stop in zip([0, *end], [*end, LENGTH], strict=True)]
            for end in ends
        ]

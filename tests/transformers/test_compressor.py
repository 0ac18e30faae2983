"""The compressor against Hugging Face's modules in float32, sizes of the released models."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import NIGHTLY
from tests.support.compressor_steps import KINDS, Engine, run_in_chunks

transformers = pytest.importorskip(
    "transformers", "5.17", reason="needs transformers with deepseek_v4"
)
modeling = pytest.importorskip(
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    reason="needs transformers with deepseek_v4",
)

HIDDEN, LENGTHS = 64, {"C4": 47, "C4 indexer": 47, "C128": 300}
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def config() -> Any:
    return transformers.DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        layer_types=[CSA, HCA],
        compress_rates={CSA: 4, HCA: 128},
        q_lora_rank=32,
        index_n_heads=4,
        num_hash_layers=0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    )


def module_of(kind: str, seed: int) -> tuple[Any, Any, Any]:
    """(module that holds the weights, module to call, config), all weights random."""
    made = config()
    outer = {"C128": modeling.DeepseekV4HCACompressor}.get(kind, modeling.DeepseekV4CSACompressor)(
        made
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in outer.named_parameters():
            scale = 1.0 if name.endswith(("position_bias", "norm.weight")) else HIDDEN**-0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return (outer.indexer if kind == "C4 indexer" else outer), outer.eval(), made


def rows_of_transformers(kind: str, outer: Any, made: Any, x: Tensor, cuts: list[int]) -> Tensor:
    """Compressed rows [B, rows, head_dim] after x was given in chunks."""
    layer = 1 if kind == "C128" else 0
    cache = transformers.DynamicCache(config=made)
    q_residual = torch.zeros(*x.shape[:2], made.q_lora_rank)
    for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        positions = torch.arange(start, stop)[None].expand(x.shape[0], -1)
        with torch.no_grad():
            outer(x[:, start:stop], q_residual[:, start:stop], positions, cache, layer)
    name = "indexer" if kind == "C4 indexer" else "compressor"
    return cache.layers[layer].compressed_kv[name]


def setup(kind: str) -> tuple[dict[str, Tensor], list[Tensor], Tensor, Any]:
    """Weights and projections of ours, what transformers makes of it, and its epsilon."""
    inner, outer, made = module_of(kind, 7)
    length = LENGTHS[kind]
    x = torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        projected = torch.cat([inner.kv_proj(x), inner.gate_proj(x)], -1)
        cos, sin = inner.rotary_emb(x, torch.arange(length)[None], layer_type="compress")
    weights = {
        "ape": inner.position_bias.detach(),
        "norm_weight": inner.kv_norm.weight.detach(),
        "cos_sin_cache": torch.cat([cos, sin], -1)[0],
    }
    expected = rows_of_transformers(kind, outer, made, x, [])
    return weights, list(projected), expected, made.rms_norm_eps


def assert_rows(engine: Engine, expected: Tensor) -> None:
    for request, rows in enumerate(expected):
        got = engine.rows(request)
        assert got.shape == rows.shape
        torch.testing.assert_close(got, rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill(kind: str) -> None:
    weights, sequences, expected, eps = setup(kind)
    assert expected.abs().amax() > 1
    engine = Engine(kind, weights, [len(rows) for rows in sequences], eps=eps)
    engine.step(sequences)
    assert_rows(engine, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind: str) -> None:
    weights, sequences, expected, eps = setup(kind)
    engine = Engine(kind, weights, [len(rows) for rows in sequences], eps=eps)
    for token in range(LENGTHS[kind]):
        engine.step([rows[token : token + 1] for rows in sequences])
    assert_rows(engine, expected)


@pytest.mark.parametrize("seed", range(5 if NIGHTLY else 2))
@pytest.mark.parametrize("kind", KINDS)
def test_random_chunks(kind: str, seed: int) -> None:
    """Ours and Hugging Face's, each in random chunks of its own."""
    weights, sequences, _, eps = setup(kind)
    _, outer, made = module_of(kind, 7)
    x = torch.randn(2, LENGTHS[kind], HIDDEN, generator=torch.Generator().manual_seed(3))
    rng = Random(seed)
    cuts = sorted(rng.sample(range(1, LENGTHS[kind]), 6))
    expected = rows_of_transformers(kind, outer, made, x, cuts)
    engine = Engine(kind, weights, [len(rows) for rows in sequences], eps=eps, seed=seed)
    run_in_chunks(engine, sequences, rng, 20)
    assert_rows(engine, expected)

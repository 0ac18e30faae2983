"""Compressor, scores and selection of the lightning indexer against Hugging Face's in float32:
requests of several lengths in one ragged batch, over permuted blocks; hf one by one."""

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

import dsv4_ops as ops
from tests.helpers import i32
from tests.support.compressor_steps import Engine

HIDDEN, RESIDUAL, HEADS, TOPK = 64, 32, 16, 24
RATIO, BLOCK_SIZE, NUM_ROWS = 4, 64, 128
LENGTHS = (270, 130, 97, 47, 8, 3, 1)
"""Rows on two blocks and on one, more than TOPK and fewer, exactly TOPK, two, and none."""

SCALE = 128**-0.5 * HEADS**-0.5
TOLERANCE = 1e-5


class Layer(NamedTuple):
    """Their indexer with random weights, and what a layer gives it, per request."""

    indexer: Any
    config: Any
    hidden: list[Tensor]
    residual: list[Tensor]

    def weights(self) -> dict[str, Tensor]:
        """Of the compressor; the angles are hf, which float32 has to 1e-5."""
        positions = torch.arange(max(LENGTHS))[None]
        cos, sin = self.indexer.rotary_emb(self.hidden[0], positions, layer_type="compress")
        return {
            "ape": self.indexer.position_bias.detach(),
            "norm_weight": self.indexer.kv_norm.weight.detach(),
            "cos_sin_cache": torch.cat([cos, sin], -1)[0],
        }


@pytest.fixture(scope="module")
def layer() -> Layer:
    config = transformers.DeepseekV4Config(
        hidden_size=HIDDEN,
        q_lora_rank=RESIDUAL,
        num_hidden_layers=1,
        layer_types=["compressed_sparse_attention"],
        index_n_heads=HEADS,
        index_head_dim=128,
        index_topk=TOPK,
        num_hash_layers=0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    )
    indexer = modeling.DeepseekV4Indexer(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in indexer.named_parameters():
            wide = name.endswith(("position_bias", "norm.weight"))
            scale = 1.0 if wide else weight.shape[1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    inputs = [
        [torch.randn(length, width, generator=generator) for length in LENGTHS]
        for width in (HIDDEN, RESIDUAL)
    ]
    return Layer(indexer, config, *inputs)


class Selection(NamedTuple):
    """Scores [length, NUM_ROWS], -inf where a token sees no row, and the rows that it chose."""

    scores: Tensor
    chosen: list[set[int]]


def chosen_of(rows: Tensor) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in rows]


@torch.no_grad()
def hf(layer: Layer, request: int) -> Selection:
    indexer, hidden, residual = layer.indexer, layer.hidden[request], layer.residual[request]
    cache = transformers.DynamicCache(config=layer.config)
    length, scored = hidden.shape[0], []
    hook = indexer.scorer.register_forward_hook(lambda module, args, out: scored.append(out[0]))
    picked = indexer(hidden[None], residual[None], torch.arange(length)[None], cache, 0)
    hook.remove()
    scores = torch.full((length, NUM_ROWS), -torch.inf)
    scores[:, : scored[0].shape[1]] = scored[0]
    seen = torch.arange(NUM_ROWS) < ((torch.arange(length) + 1) // RATIO)[:, None]
    return Selection(scores.masked_fill(~seen, -torch.inf), chosen_of(picked[0]))


@torch.no_grad()
def ours(layer: Layer, layout: str = "plain") -> list[Selection]:
    """All requests in a ragged batch: keys into their blocks, then scores and rows."""
    weights, indexer = layer.weights(), layer.indexer
    eps, angles = layer.config.rms_norm_eps, weights["cos_sin_cache"]
    engine = Engine("C4 indexer", weights, [*LENGTHS], layout=layout, eps=eps)
    engine.step([torch.cat([indexer.kv_proj(x), indexer.gate_proj(x)], -1) for x in layer.hidden])
    q = indexer.q_b_proj(torch.cat(layer.residual)).view(-1, HEADS, 128)
    factors = indexer.scorer.weights_proj(torch.cat(layer.hidden))
    starts, lens = i32([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]), i32(LENGTHS)
    mapped = ops.token_map(starts, lens, num_tokens=sum(LENGTHS))
    seen = ops.flatten_decode(starts, lens, compress_ratio=RATIO, num_tokens=sum(LENGTHS)).seq_lens
    if layout == "plain":
        query = ops.apply_rope(q, mapped.positions, angles), factors * SCALE
    else:
        query = ops.indexer_quantize_q(q.to(torch.bfloat16), factors, mapped.positions, angles)
    blocks = (mapped.req_indices, engine.cache_table)
    sizes = {"block_size": BLOCK_SIZE, "layout": layout}
    scores = ops.indexer_logits(*query, engine.cache, seen, *blocks, num_rows=NUM_ROWS, **sizes)
    rows = (engine.cache, mapped.positions, *blocks)
    chosen = ops.indexer_select(*query, *rows, compress_ratio=RATIO, topk=TOPK, **sizes)
    parts = zip(scores.split(LENGTHS), chosen.split(LENGTHS), strict=True)
    return [Selection(part, chosen_of(rows)) for part, rows in parts]


def test_scores_and_rows_are_hugging_faces(layer: Layer) -> None:
    """Within the tolerance, and the same rows but for those whose scores are close; test_model.py
    has chunks. Scores of a token differ, or the comparison could not fail."""
    for request, found in enumerate(ours(layer)):
        expected = hf(layer, request)
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=TOLERANCE)
        for token, (mine, other) in enumerate(zip(found.chosen, expected.chosen, strict=True)):
            assert len(mine) == len(other) == min(TOPK, (token + 1) // RATIO)
            differing = expected.scores[token, sorted(mine ^ other)]
            if len(differing):
                assert differing.max() - differing.min() <= TOLERANCE
    last = hf(layer, 0).scores[-1, : LENGTHS[0] // RATIO]
    assert last.std() > 0.3
    assert last.sort().values.diff().median() > 100 * TOLERANCE


def test_quantised_scores_drift_by_a_few_percent(layer: Layer) -> None:
    """The FP8 path on the same projections: its scores, and how many of its rows are hf."""
    found, expected = ours(layer, "v4_indexer_fp8")[0], hf(layer, 0)
    seen = expected.scores > -torch.inf
    assert torch.equal(found.scores > -torch.inf, seen)
    error = (found.scores - expected.scores)[seen]
    drift = float(error.pow(2).mean().sqrt() / expected.scores[seen].std())
    full = [token for token, rows in enumerate(expected.chosen) if len(rows) == TOPK]
    same = sum(len(found.chosen[token] & expected.chosen[token]) for token in full)
    assert 1e-3 < drift < 0.05
    assert 0.95 < same / len(full) / TOPK < 1

"""Compressor, scores and selection of the lightning indexer against Hugging Face's in float32:
requests of several lengths in one ragged batch, over permuted blocks; hf one by one."""

from random import Random
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


def hf(layer: Layer, request: int, cuts: list[int]) -> Selection:
    """Of one request that is given in chunks."""
    indexer, hidden, residual = layer.indexer, layer.hidden[request], layer.residual[request]
    cache = transformers.DynamicCache(config=layer.config)
    length, chosen = hidden.shape[0], []
    scores = torch.full((length, NUM_ROWS), -torch.inf)
    scored: list[Tensor] = []
    hook = indexer.scorer.register_forward_hook(lambda module, args, out: scored.append(out[0]))
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        piece, positions = slice(start, stop), torch.arange(start, stop)
        with torch.no_grad():
            picked = indexer(hidden[None, piece], residual[None, piece], positions[None], cache, 0)
        chosen += [set(row.tolist()) - {-1} for row in picked[0]]
        scores[piece, : scored[-1].shape[1]] = scored[-1]
    hook.remove()
    seen = torch.arange(NUM_ROWS) < ((torch.arange(length) + 1) // RATIO)[:, None]
    return Selection(scores.masked_fill(~seen, -torch.inf), chosen)


class Ours:
    """All requests, a ragged batch at a time: keys into their blocks, then scores and rows."""

    def __init__(self, layer: Layer, *, layout: str = "plain", seed: int = 0) -> None:
        self.layout, weights, indexer = layout, layer.weights(), layer.indexer
        self.angles, eps = weights["cos_sin_cache"], layer.config.rms_norm_eps
        self.engine = Engine("C4 indexer", weights, [*LENGTHS], layout=layout, eps=eps, seed=seed)
        with torch.no_grad():
            self.kv_score = [
                torch.cat([indexer.kv_proj(x), indexer.gate_proj(x)], -1) for x in layer.hidden
            ]
            self.q = [indexer.q_b_proj(x).view(-1, HEADS, 128) for x in layer.residual]
            self.factors = [indexer.scorer.weights_proj(x) for x in layer.hidden]
        self.scores = [torch.full((length, NUM_ROWS), torch.nan) for length in LENGTHS]
        self.chosen: list[list[set[int]]] = [[] for _ in LENGTHS]

    def step(self, counts: list[int], *, padding: int = 0, **order: bool) -> None:
        """The next tokens of every request, as many as ``counts`` says and there are."""
        spans = [
            slice(done, min(done + count, length))
            for done, count, length in zip(self.engine.done, counts, LENGTHS, strict=True)
        ]
        lens = [span.stop - span.start for span in spans]
        starts = i32([0, *torch.tensor(lens).cumsum(0).tolist()])
        seq_lens = i32([span.stop if n else 0 for span, n in zip(spans, lens, strict=True)])
        sizes = {"num_tokens": sum(lens) + padding}
        mapped = ops.token_map(starts, seq_lens, **sizes)
        seen = ops.flatten_decode(starts, seq_lens, compress_ratio=RATIO, **sizes).seq_lens

        def batch(values: list[Tensor]) -> Tensor:
            parts = [rows[span] for rows, span in zip(values, spans, strict=True)]
            junk = values[0].new_full((padding, *values[0].shape[1:]), torch.nan)
            return torch.cat([*parts, junk])

        chunks = [rows[span] for rows, span in zip(self.kv_score, spans, strict=True)]
        self.engine.step(chunks, padding=padding, **order)
        query = self.query(batch(self.q), batch(self.factors), mapped.positions)
        blocks = (mapped.req_indices, self.engine.cache_table)
        settings = {"block_size": BLOCK_SIZE, "layout": self.layout}
        scores = ops.indexer_logits(
            *query, self.engine.cache, seen, *blocks, num_rows=NUM_ROWS, **settings
        )
        chosen = ops.indexer_select(
            *query,
            self.engine.cache,
            mapped.positions,
            *blocks,
            compress_ratio=RATIO,
            topk=TOPK,
            **settings,
        )
        assert (scores[sum(lens) :] == -torch.inf).all()
        assert (chosen[sum(lens) :] == -1).all()
        for request, span in enumerate(spans):
            rows = slice(int(starts[request]), int(starts[request + 1]))
            self.scores[request][span] = scores[rows]
            self.chosen[request] += [set(row.tolist()) - {-1} for row in chosen[rows]]

    def query(self, q: Tensor, factors: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.layout == "plain":
            return ops.apply_rope(q, positions, self.angles), factors * SCALE
        return tuple(ops.indexer_quantize_q(q.to(torch.bfloat16), factors, positions, self.angles))


def assert_alike(ours: Ours, layer: Layer, cuts: list[list[int]]) -> None:
    """Scores within the tolerance, and the same rows but for those whose scores are as close."""
    for request, pieces in enumerate(cuts):
        expected = hf(layer, request, pieces)
        scores, chosen = ours.scores[request], ours.chosen[request]
        torch.testing.assert_close(scores, expected.scores, rtol=0, atol=TOLERANCE)
        for token, (mine, other) in enumerate(zip(chosen, expected.chosen, strict=True)):
            assert len(mine) == len(other) == min(TOPK, (token + 1) // RATIO)
            differing = expected.scores[token, sorted(mine ^ other)]
            if len(differing):
                assert differing.max() - differing.min() <= TOLERANCE


WHOLE: list[list[int]] = [[] for _ in LENGTHS]


def test_prefill(layer: Layer) -> None:
    ours = Ours(layer)
    ours.step([*LENGTHS])
    assert_alike(ours, layer, WHOLE)


def test_the_scores_differ_from_each_other(layer: Layer) -> None:
    """Else the comparisons here could not fail: most tokens leave rows out, none of them close to
    those that they choose."""
    expected = hf(layer, 0, [])
    last = expected.scores[-1, : LENGTHS[0] // RATIO]
    assert last.std() > 0.3
    gaps = last.sort().values.diff()
    assert gaps.median() > 100 * TOLERANCE
    assert sum(len(rows) == TOPK for rows in expected.chosen) > 160


@pytest.mark.parametrize("seed", range(2))
def test_random_chunks(layer: Layer, seed: int) -> None:
    """Ours and Hugging Face's, each in random chunks of its own; states written before or after."""
    rng, ours = Random(seed), Ours(layer, seed=seed)
    while ours.engine.done != [*LENGTHS]:
        ours.step(
            [rng.choice((0, 1, 1, 2, rng.randint(1, 40))) for _ in LENGTHS],
            padding=rng.choice((0, 0, 1, 5)),
            save_first=rng.random() < 0.5,
            keep_all=rng.random() < 0.5,
        )
    cuts = [sorted(rng.sample(range(1, n), min(5, n - 1))) for n in LENGTHS]
    assert_alike(ours, layer, cuts)


def test_quantised_scores_drift_by_a_few_percent(layer: Layer) -> None:
    """The FP8 path on the same projections: its scores, and how many of its rows are hf."""
    ours = Ours(layer, layout="v4_indexer_fp8")
    ours.step([*LENGTHS])
    expected = hf(layer, 0, [])
    seen = expected.scores > -torch.inf
    assert torch.equal(ours.scores[0] > -torch.inf, seen)
    error = (ours.scores[0] - expected.scores)[seen]
    drift = float(error.pow(2).mean().sqrt() / expected.scores[seen].std())
    full = [token for token, rows in enumerate(expected.chosen) if len(rows) == TOPK]
    same = sum(len(ours.chosen[0][token] & expected.chosen[token]) for token in full)
    print(f"drift {drift:.3g}, common rows {same / len(full) / TOPK:.3g}")
    assert 1e-3 < drift < 0.05
    assert 0.95 < same / len(full) / TOPK < 1

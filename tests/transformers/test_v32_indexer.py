"""Indexers of DeepSeek-V3.2 and GLM-5, with a key per token, against Hugging Face's in float32.
Ours run all requests in one ragged batch over permuted blocks; Hugging Face's run one by one."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import IndexerLayout, PlainLayout
from tests.helpers import i32

FAMILIES = {"deepseek_v32": ("DeepseekV32", False), "glm_moe_dsa": ("GlmMoeDsa", True)}
"""Prefix of the classes, and whether the indexer rotates neighbouring values."""

HIDDEN, RESIDUAL, TOPK, BLOCK_SIZE = 48, 32, 24, 16
LENGTHS = (70, 24, 25, 1)
"""More rows than TOPK, as many as TOPK, one more, and a single row."""


def layer_of(family: str) -> tuple[Any, Any]:
    """Return the indexer with random weights, and the rotary embedding."""
    name = f"transformers.models.{family}.modeling_{family}"
    modeling = pytest.importorskip(name, reason="transformers is older")
    prefix, _ = FAMILIES[family]
    sizes = {"hidden_size": HIDDEN, "q_lora_rank": RESIDUAL, "index_topk": TOPK}
    config = getattr(transformers, f"{prefix}Config")(num_hidden_layers=1, **sizes)
    indexer = getattr(modeling, f"{prefix}Indexer")(config, 0).eval()
    made = torch.Generator().manual_seed(3)
    for parameter in indexer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=made) * 0.2)
    return indexer, getattr(modeling, f"{prefix}RotaryEmbedding")(config)


def hugging_faces(indexer: Any, rotary: Any, hidden: Tensor, residual: Tensor) -> list[list[int]]:
    position = torch.arange(hidden.shape[0])[None]
    angles, mask = rotary(hidden[None], position), (position.mT >= position)[None]
    picked = indexer(hidden[None], residual[None], angles, mask, position)[0]
    return [sorted(set(row.tolist()) & {*range(token + 1)}) for token, row in enumerate(picked)]


@pytest.mark.parametrize("layout", ["plain", "v4_indexer_fp8"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_selected_rows_are_hugging_faces(family: str, layout: str) -> None:
    """All selected rows agree in float32, and nine in ten with FP8 queries and keys."""
    indexer, rotary = layer_of(family)
    made, num_tokens = torch.Generator().manual_seed(4), sum(LENGTHS)
    hidden, residual = (torch.randn(num_tokens, n, generator=made) for n in (HIDDEN, RESIDUAL))
    cos, sin = rotary(hidden[None], torch.arange(max(LENGTHS))[None])
    half = cos.shape[-1] // 2
    table = torch.cat([cos[0, :, :half], sin[0, :, :half]], 1)
    starts, lens = i32([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]), i32(LENGTHS)
    tokens = ops.token_map(starts, lens, num_tokens=num_tokens)
    columns = -(-max(LENGTHS) // BLOCK_SIZE)
    blocks = torch.randperm(len(LENGTHS) * columns, generator=made).int().view(-1, columns)
    requests = (tokens.req_indices, blocks)
    given = (tokens.positions, *requests, torch.zeros(num_tokens, dtype=torch.int64))
    slots = ops.compressed_slot_mapping(*given, block_size=BLOCK_SIZE, compress_ratio=1)
    where = (tokens.positions, table)
    places = {"rope_first": True, "interleaved": FAMILIES[family][1]}
    q = indexer.wq_b(residual).view(num_tokens, indexer.n_heads, 128)
    k = ops.apply_rope(indexer.k_norm(indexer.wk(hidden)), *where, **places)
    weights = indexer.weights_proj(hidden)
    if layout == "plain":
        cache = PlainLayout(BLOCK_SIZE, 128, torch.float32).allocate(blocks.numel())
        ops.insert_k_cache(k, cache, slots)
        query = ops.apply_rope(q, *where, **places), weights
    else:
        cache = IndexerLayout(BLOCK_SIZE).allocate(blocks.numel())
        ops.quantize_and_insert_indexer_k(k.bfloat16(), cache, slots, block_size=BLOCK_SIZE)
        query = ops.indexer_quantize_q(q.bfloat16(), weights, *where, **places)
    sizes = {"block_size": BLOCK_SIZE, "compress_ratio": 1, "topk": TOPK, "layout": layout}
    found = ops.indexer_select(*query, cache, tokens.positions, *requests, **sizes).tolist()
    expected = [
        row
        for x, r in zip(hidden.split(LENGTHS), residual.split(LENGTHS), strict=True)
        for row in hugging_faces(indexer, rotary, x, r)
    ]
    rows = [[each for each in row if each >= 0] for row in found]
    assert list(map(len, rows)) == list(map(len, expected))
    if layout == "plain":
        assert rows == expected
    else:
        shared = sum(len({*left} & {*right}) for left, right in zip(rows, expected, strict=True))
        assert 0.9 * sum(map(len, expected)) < shared < sum(map(len, expected))

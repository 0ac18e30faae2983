"""AOTAutograd knows what an op writes and returns before it traces the op."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.lowering import kinds


@pytest.mark.parametrize("training", [False, True])
def test_a_lowering_is_traced_once(training, monkeypatch):
    """Schema and fake say what an op writes and returns, also in graphs with gradients."""
    traced, trace = [], kinds._traced

    def counted(mode, function, *call):
        traced.append(function)
        return trace(mode, function, *call)

    def step(k, weight, cache, slots, lens, table):
        ops.quantize_and_insert_k_cache(k, cache, slots, block_size=64)
        return ops.gather_k_cache(cache, lens, None, table, block_size=64, num_rows=4) @ weight

    monkeypatch.setattr(kinds, "_traced", counted)
    torch._dynamo.reset()
    k = torch.randn(3, 512, dtype=torch.bfloat16)
    weight = torch.randn(512, 2, dtype=torch.bfloat16, requires_grad=training)
    rows = torch.tensor([3, -1, 65]), torch.tensor([2, 70]).int(), torch.tensor([[0], [1]]).int()
    written, expected = (torch.zeros(MainLayout(64).shape(2), dtype=torch.uint8) for _ in "ab")
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(k, weight, written, *rows)
    assert len(traced) == 2
    assert torch.equal(found, step(k, weight, expected, *rows))
    assert torch.equal(written, expected)
    assert found.requires_grad == training

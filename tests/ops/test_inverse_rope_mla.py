"""Sparse MLA with an inverse RoPE of its output: by hand, and against the two ops in sequence."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.attention import layer, output
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import i32, i64
from tests.support import layers
from tests.support.sampled import sampled

BF16, F32 = torch.bfloat16, torch.float32

QUARTERS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
"""No rotation at position 0, and a quarter turn at position 1."""


def attend(rows: list[list[float]], positions: list[int], table: Tensor, dtype: Any = F32) -> Any:
    """Let every token's head attend to all rows with equal weights."""
    cache, tokens = torch.tensor([rows], dtype=dtype), len(positions)
    q, lens = torch.zeros(tokens, 1, cache.shape[2], dtype=dtype), i32([len(rows)] * tokens)
    slots = torch.arange(len(rows), dtype=torch.int32).expand(tokens, -1)
    rotation = {"positions": i64(positions), "cos_sin_cache": table}
    settings = {"softmax_scale": 1.0, "swa_block_size": len(rows), "layout": "plain"}
    return ops.sparse_mla_decode(q, cache, slots, lens, **rotation, **settings)


def test_a_quarter_turn_back() -> None:
    """(2, 4) becomes (4, -2) after a quarter turn back; other values and the lse do not change."""
    out, lse = attend([[7.0, 1.0, 3.0], [7.0, 3.0, 5.0]], [0, 1, 2, -1, 2**63 - 1], QUARTERS)
    kept = [[7.0, 2.0, 4.0]]
    assert out.tolist() == [kept, [[7.0, 4.0, -2.0]], kept, kept, kept]
    torch.testing.assert_close(lse, torch.full((5, 1), math.log(2)))


def test_the_output_is_rounded_before_it_is_rotated_and_after() -> None:
    """1 + 2^-8 becomes 1 in bf16, and 1.5 times that is 1.5, not 1.5078125. 1.5 times (1 + 2^-7) is
    between 1.5078125 and 1.515625."""
    table = torch.tensor([[1.5, 0.0]])
    assert attend([[1.0, 0.0], [1.0078125, 0.0]], [0], table, BF16).out.tolist() == [[[1.5, 0.0]]]
    out = attend([[1.0078125, 0.0]], [0], table, BF16).out
    assert out.tolist() == [[[1.515625, 0.0]]]  # 1.51171875, rounded to even


@pytest.mark.parametrize("name", ["sparse_mla_decode", "sparse_mla_decode_paged"])
def test_it_is_the_two_ops_in_sequence(name: str) -> None:
    """The bits are equal."""
    op, rotated_calls = OPS[name].op, [0]

    @sampled(100)
    @given(testing.strategy(name))
    def compare(case: Case) -> None:
        *apart, positions, table = case.tensors
        if table is None:
            return
        rotated_calls[0] += 1
        out, lse = op(*apart, None, None, **case.settings)
        rotated = op(*case.tensors, **case.settings)
        if out.dtype == BF16:
            expected = ops.inverse_rope_group(out, positions, table, num_groups=1)
        else:
            expected = ops.apply_rope(out, positions, table, inverse=True)
        assert equal(rotated[0], expected.view(out.shape))
        assert equal(rotated[1], lse)

    compare()
    assert rotated_calls[0] > 3


@pytest.mark.parametrize("kind", layers.KINDS)
def test_a_layer_gives_the_bits_of_attention_and_rotation_apart(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding tokens are equal too, and the rotation does change the attention output."""
    rows = layers.projected(layers.SmallLayer(kind, layers.SPEC), layers.hidden_states())[0]
    calls: list[tuple[Tensor, bool]] = []

    def group_output(layer: Any, out: Tensor, *, inverse_rope: bool) -> Any:
        calls.append((out, inverse_rope))
        return output.group_output(layer, out, inverse_rope=inverse_rope)

    monkeypatch.setattr(layer, "group_output", group_output)
    outs = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(layer, "fuses_inverse_rope", lambda *_: False)
        twin = layers.SmallLayer(kind, layers.SPEC)
        outs.append(layers.in_chunks(twin, [rows], [[layers.LENGTH]], padding=3)[0])
    assert [inverse_rope for _, inverse_rope in calls] == [True, False]
    assert torch.equal(*outs)
    assert not torch.equal(*(out for out, _ in calls))

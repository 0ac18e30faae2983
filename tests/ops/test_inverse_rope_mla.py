"""Sparse MLA whose output is rotated back: by hand, and against the two ops in sequence."""

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.attention import layer, output
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import BAD_POSITIONS, i32, i64
from tests.oracles import mla as oracles
from tests.oracles.mla import BF16, F32, KINDS, random_call, random_paged
from tests.support.layers import (
    KINDS as LAYERS,
    LENGTH,
    SPEC,
    SmallLayer,
    hidden_states,
    in_chunks,
    projected,
)

QUARTERS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
"""No turn at position 0, a quarter of one at position 1."""

ROTATION = ("positions", "cos_sin_cache")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_op = pytest.mark.parametrize("make", [random_call, random_paged], ids=["listed", "paged"])


def attend(rows: list[list[float]], positions: list[int], table: Tensor, dtype: Any = F32) -> Any:
    """One head of every token over all rows, which have equal weights."""
    cache, tokens = torch.tensor([rows], dtype=dtype), len(positions)
    return ops.sparse_mla_decode(
        torch.zeros(tokens, 1, cache.shape[2], dtype=dtype),
        cache,
        torch.arange(len(rows), dtype=torch.int32).expand(tokens, -1),
        i32([len(rows)] * tokens),
        positions=i64(positions),
        cos_sin_cache=table,
        softmax_scale=1.0,
        swa_block_size=len(rows),
        layout="plain",
    )


def test_a_quarter_turn_back() -> None:
    """(2, 4) is (4, -2) a quarter back; the other values, lse and no position leave as they are."""
    out, lse = attend([[7.0, 1.0, 3.0], [7.0, 3.0, 5.0]], [0, 1, 2, -1, 2**63 - 1], QUARTERS)
    kept = [[7.0, 2.0, 4.0]]
    assert out.tolist() == [kept, [[7.0, 4.0, -2.0]], kept, kept, kept]
    torch.testing.assert_close(lse, torch.full((5, 1), math.log(2)))


def test_the_output_is_rounded_before_it_is_rotated_and_after() -> None:
    """1 + 2^-8 is 1 in bf16; 1.5 times that 1.5, and not 1.5078125. Then (1 + 2^-7) 1.5 is between
    1.5078125 and 1.515625."""
    table = torch.tensor([[1.5, 0.0]])
    assert attend([[1.0, 0.0], [1.0078125, 0.0]], [0], table, BF16).out.tolist() == [[[1.5, 0.0]]]
    out = attend([[1.0078125, 0.0]], [0], table, BF16).out
    assert out.tolist() == [[[1.515625, 0.0]]]  # 1.51171875, to even


def test_nothing_to_turn() -> None:
    """No token, no position in the table, no pair."""
    rows = [[1.0, 2.0], [3.0, 6.0]]
    assert attend(rows, [], QUARTERS).out.shape == (0, 1, 2)
    for table in (QUARTERS[:0], QUARTERS[:, :0]):
        assert attend(rows, [0, 1], table).out.tolist() == [[[2.0, 4.0]]] * 2


def with_rotation(call: oracles.Call, seed: int, rope_dim: int | None = None) -> oracles.Call:
    """The call with a table of nine positions, and positions of which a third do not exist."""
    rng, (tokens, _, width) = Random(seed), call.tensors["q"].shape
    rope_dim = rng.choice((2, width // 4, width)) if rope_dim is None else rope_dim
    angles = torch.rand(9, rope_dim // 2, generator=torch.Generator().manual_seed(seed)) * 7
    table = torch.cat([angles.cos(), angles.sin()], 1)
    places = [rng.choice((rng.randrange(9), 0, 8, 9, rng.choice(BAD_POSITIONS))) for _ in range(9)]
    call.tensors |= {"positions": None, "cos_sin_cache": None}
    return call.but(positions=i64(places[:tokens]), cos_sin_cache=table)


@each_op
@each_kind
@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_two_ops_in_sequence(make: Any, kind: str, seed: int) -> None:
    """Bit for bit."""
    call = with_rotation(make(seed, kind), seed)
    positions, table = call.tensors["positions"], call.tensors["cos_sin_cache"]
    out, lse = call.but(positions=None, cos_sin_cache=None).run()
    rotated = call.run()
    if out.dtype == BF16:
        expected = ops.inverse_rope_group(out, positions, table, num_groups=1)
    else:
        expected = ops.apply_rope(out, positions, table, inverse=True)
    assert equal(rotated.out, expected.view(out.shape))
    assert equal(rotated.lse, lse)
    assert rotated.out.is_contiguous()


@pytest.mark.parametrize("how", ["every other", "one for all", "wide table"])
def test_positions_and_tables_of_any_strides(how: str) -> None:
    call = with_rotation(random_call(4, "fp8", tokens=3), 4, 64)
    positions, table = i64([5, 2, 8]), call.tensors["cos_sin_cache"]
    if how == "every other":
        positions = torch.stack([positions, positions * 0 - 1], 1).flatten()[::2]
    elif how == "one for all":
        positions = positions[:1].expand(3)
    else:
        table = torch.cat([table, table * math.nan], 1)[:, :64]
    given = call.but(positions=positions, cos_sin_cache=table)
    dense = call.but(positions=positions.clone(), cos_sin_cache=table.clone())
    dense.tensors["cos_sin_cache"] = table.contiguous()
    assert all(map(torch.equal, given.run(), dense.run()))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_gives_the_bits_of_attention_and_rotation_apart(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding tokens included; and the attention does differ by the rotation."""
    rows = projected(SmallLayer(kind, SPEC), hidden_states())[0]
    calls: list[tuple[Tensor, bool]] = []

    def group_output(layer: Any, out: Tensor, *, inverse_rope: bool) -> Any:
        calls.append((out, inverse_rope))
        return output.group_output(layer, out, inverse_rope=inverse_rope)

    monkeypatch.setattr(layer, "group_output", group_output)
    outs = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(layer, "fuses_inverse_rope", lambda *_: False)
        twin = SmallLayer(kind, SPEC)
        outs.append(in_chunks(twin, [rows], [[LENGTH]], padding=3)[0])
    assert [inverse_rope for _, inverse_rope in calls] == [True, False]
    assert torch.equal(*outs)
    assert not torch.equal(*(out for out, _ in calls))

"""The experts benchmark: Humming as a baseline, with its kernels in PyTorch."""

import sys

import pytest
import torch

import dsv4_ops as ops
from benchmarks.baselines import humming
from benchmarks.harness.weights import relative_error
from benchmarks.run import BenchError, main
from tests.fakes import humming as fake

NUM_EXPERTS, TOPK, WIDTH, SIZE, LIMIT = 8, 3, 128, 64, 10.0


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def weights():
    """Codes and scales with which some gates and ups of a batch are out of bounds."""
    made = []
    for rows, columns in ((2 * SIZE, WIDTH), (WIDTH, SIZE)):
        shape = (NUM_EXPERTS, rows, columns)
        made.append(torch.randint(0, 256, (*shape[:2], columns // 2), dtype=torch.uint8))
        made.append(torch.randint(122, 126, (*shape[:2], columns // 32), dtype=torch.uint8))
    return made


def batch(tokens):
    chosen = torch.rand(tokens, NUM_EXPERTS).topk(TOPK)
    return torch.randn(tokens, WIDTH).bfloat16(), chosen.values, chosen.indices.int()


def error(made, inputs, step):
    whole = ops.experts(*inputs, *made, swiglu_limit=LIMIT, impl="reference")
    return relative_error(step(*inputs), whole)


def step_of(made, inputs, *blocks, limit=LIMIT):
    library = fake.library(*blocks)
    layers = [humming.make_layer(library, *made[:2]), humming.make_layer(library, *made[2:])]
    return humming.experts_step(library, layers, inputs[2].numel(), limit=limit)


@pytest.mark.parametrize("blocks", [(8, 8), (16, 8), (8, 64)])
@pytest.mark.parametrize("tokens", [2, 33])
def test_humming_returns_what_the_reference_does(tokens, blocks):
    """Four roundings apart, and no closer."""
    torch.manual_seed(tokens)
    made, inputs = weights(), batch(tokens)
    assert 0 < error(made, inputs, step_of(made, inputs, *blocks)) < humming.MOST_ERROR


@pytest.mark.parametrize("limit", [9.0, 1e9])
def test_another_bound_is_another_result(limit):
    torch.manual_seed(0)
    made, inputs = weights(), batch(33)
    assert error(made, inputs, step_of(made, inputs, 8, 8, limit=limit)) > humming.MOST_ERROR


def test_rows_choose_the_entry():
    table = [(0, 8, {"block_shape": "a"}), (8, 64, {"block_shape": "b"}), (64, 0, {"c": 0})]
    found = [humming.choose(table, rows) for rows in (1, 8, 9, 64, 65)]
    assert found == [table[0][2], table[0][2], table[1][2], table[1][2], table[2][2]]
    with pytest.raises(BenchError, match="no entry for 65 rows"):
        humming.choose(table[:2], 65)


def test_missing_library_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "humming", None)
    assert main(["experts", "--humming", "--out", str(tmp_path)]) == 2
    assert "--humming: cannot import humming-kernels" in capsys.readouterr().err

"""Humming as a baseline: its kernels beside the reference, with the tuning of its tables."""

import pytest
import torch

import dsv4_ops as ops
from benchmarks.baselines import humming
from benchmarks.harness.weights import relative_error

NUM_EXPERTS, TOPK, WIDTH, SIZE = 16, 6, 512, 512


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("humming.layer")
    return humming.load()


@pytest.fixture(scope="module")
def made():
    """Codes and scales with which some gates and ups are out of bounds."""
    torch.manual_seed(0)
    weights = []
    for rows, columns in ((2 * SIZE, WIDTH), (WIDTH, SIZE)):
        for most, least, per in ((256, 0, 2), (123, 119, 32)):
            shape = (NUM_EXPERTS, rows, columns // per)
            weights.append(torch.randint(least, most, shape, dtype=torch.uint8, device="cuda"))
    return weights


@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_humming_returns_what_the_reference_does(library, made, tokens):
    layers = [humming.make_layer(library, *made[:2]), humming.make_layer(library, *made[2:])]
    chosen = torch.rand(tokens, NUM_EXPERTS, device="cuda").topk(TOPK)
    x = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
    inputs = x, chosen.values, chosen.indices.int()
    step = humming.experts_step(library, layers, tokens * TOPK, limit=10.0)
    expected = ops.experts(*inputs, *made, swiglu_limit=10.0, impl="reference")
    assert relative_error(step(*inputs), expected) < humming.MOST_ERROR

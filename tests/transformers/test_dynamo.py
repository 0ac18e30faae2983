"""Hugging Face's calls of a patched model under Dynamo: which of them recompile, and the module
that ``export_decode`` exports."""

from functools import lru_cache

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._pytree import tree_leaves

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.integrations.transformers.steps.export import DecodeModule
from dsv4_ops.testing.models import HEAVY, small_mla_model, small_model
from tests.helpers import nightly
from tests.support.hf_models import Engine, expected, new_cache, reference, text

START, STEPS = 20, 10


def cache_of(model=None, **sizes):
    sizes = {"max_batch_size": 2, "max_cache_len": 64, **sizes}
    return new_cache(model or one_layer()[0], **sizes)


@lru_cache
def one_layer(family="v4"):
    """Return a patched model and Hugging Face's logits; one layer is enough for arguments."""
    if family == "v4":
        stock = small_model(layer_types=[HEAVY])
    else:
        stock = small_mla_model(num_hidden_layers=1)
    logits = stock(text()[:2]).logits
    return v4.patch(stock, kv="fp32", precision="reference"), logits


def decode(step, cache, steps=STEPS, family="v4", **given):
    """Run steps of one token; ``given`` has functions from the position to an argument."""
    (model, logits), tokens = one_layer(family), text()[:2]
    model(tokens[:, :START], cache=cache)
    for place in range(START, START + steps):
        rest = {name: at(place) for name, at in given.items()}
        out = step(tokens[:, place : place + 1], cache=cache, use_cache=True, **rest)
        want = logits[:2, place : place + 1]
        torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-4)
        assert getattr(out, cache_argument()) is cache


def test_one_graph_for_caches_of_equal_sizes():
    """Later steps, another cache, and other requests and blocks do not compile again."""
    counter = CompileCounter()
    step = torch.compile(one_layer()[0], fullgraph=True, backend=counter)
    first, second = cache_of(), cache_of()
    decode(step, first)
    assert counter.frame_count == 1
    decode(step, second, 3)
    first.reset()
    decode(step, first, 3)
    assert counter.frame_count == 1
    pooled = cache_of(num_blocks=2)  # its tensors have the same sizes
    for requests in (("a", "b"), ("c", 5)):
        for request in requests:
            pooled.add(request, 64)
        decode(step, pooled, 3)
        for request in requests:
            pooled.free(request)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "given",
    [
        *nightly("both of them", {"position_ids": lambda place: torch.full((1, 1), place)}),
        {
            "attention_mask": lambda place: torch.ones(2, 1, dtype=torch.int64),
            "position_ids": lambda place: torch.full((2, 1), place),
        },
    ],
    ids=lambda given: "+".join(given),
)
def test_one_graph_with_more_arguments(given):
    counter, (model, _) = CompileCounter(), one_layer("v3")
    step = torch.compile(model, fullgraph=True, backend=counter)
    decode(step, cache_of(model), 3, "v3", **given)
    assert counter.frame_count == 1


def test_errors_are_the_same_when_compiled():
    model, _ = one_layer("v3")
    step, cache = torch.compile(model, backend="eager"), cache_of(model)
    with pytest.raises(Exception, match=r"size must be .* max_batch_size of the cache = 2"):
        step(text()[:3, :1], cache=cache)
    assert not cache.seq_lens.any()


def test_the_exported_step():
    """The module behind ``export_decode`` has the bits of eager steps in logits and caches, across
    a window of 128. The program names our stages."""
    caches = [cache_of(reference(), max_cache_len=160, num_blocks=2) for _ in range(2)]
    engines = [Engine(reference(), cache, text()) for cache in caches]
    for engine in engines:
        engine.prefill({0: 125, 1: 9})
    inputs = v4.decode_inputs(engines[0].batch({0: 1, 1: 1}), caches[0])
    program = torch.export.export(DecodeModule(reference(), caches[0]), inputs, strict=False)
    names = {str(node.target) for node in program.graph.nodes}
    for op in ("token_map", "compress_and_insert", "indexer_select", "sinkhorn", "sparse_mla_plan"):
        assert f"dsv4_ops.{op}.default" in names
    step = program.module()

    def exported(model, batch, tensors):
        return step(*v4.decode_inputs(batch, caches[0]))

    for place in range(5):
        counts = {0: 1} if place == 1 else {0: 1, 1: 1}
        padding = 2 - len(counts)
        engines[0].decode(counts, padding=padding, step=exported)
        engines[1].decode(counts, padding=padding)
    assert any(engines[0].logits)
    for ours, eager in zip(*(engine.logits for engine in engines), strict=True):
        assert all(torch.equal(logits, eager[at]) for at, logits in ours.items())
    pairs = zip(*(tree_leaves(engine.cache.tensors) for engine in engines), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert engines[0].worst(expected()) < 1e-4

"""Hugging Face's calls of a patched model under Dynamo: what recompiles and what does not, and
the module that ``export_decode`` exports."""

from functools import lru_cache

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.integrations.transformers.steps.export import (
    DecodeModule,
    PrefillModule,
    padding_batch,
    prefill_shapes,
)
from dsv4_ops.testing.models import small_model
from tests.helpers import i32
from tests.support.hf_models import Engine, expected, new_cache, reference, text

START, STEPS = 20, 10


@pytest.fixture(autouse=True)
def _no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def cache_of(**sizes):
    return new_cache(**{"max_batch_size": 2, "max_cache_len": 64, **sizes})


@lru_cache
def one_layer():
    """A patched model, and Hugging Face's logits: what arguments become, all layers share."""
    stock = small_model(num_hidden_layers=1)
    logits = stock(text()[:2]).logits
    return v4.patch(stock, kv="fp32", precision="reference"), logits


def decode(step, cache, steps=STEPS, of=None, **given):
    """Steps of one token of ``of``, a model and its logits; ``given`` are arguments as functions of
    the position."""
    model, logits = of or (reference(), expected())
    tokens = text()[:2]
    model(tokens[:, :START], cache=cache)
    for place in range(START, START + steps):
        rest = {name: at(place) for name, at in given.items()}
        out = step(tokens[:, place : place + 1], cache=cache, use_cache=True, **rest)
        want = logits[:2, place : place + 1]
        torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-4)
        assert getattr(out, cache_argument()) is cache


def test_one_graph_for_caches_of_equal_sizes():
    """Neither steps nor another cache, neither requests nor blocks, compile again."""
    counter = CompileCounter()
    step = torch.compile(reference(), fullgraph=True, backend=counter)
    first, second = cache_of(), cache_of()
    decode(step, first)
    assert counter.frame_count == 1
    decode(step, second, 3)
    first.reset()
    decode(step, first, 3)
    assert counter.frame_count == 1
    pooled = cache_of(num_blocks=2)  # its tensors are as large
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
        *(
            pytest.param(given, marks=pytest.mark.nightly("both at once"))
            for given in (
                {"attention_mask": lambda place: torch.ones(2, 1, dtype=torch.int64)},
                {"position_ids": lambda place: torch.full((2, 1), place)},
            )
        ),
        {"position_ids": lambda place: torch.full((1, 1), place)},
        {
            "attention_mask": lambda place: torch.ones(2, 1, dtype=torch.int64),
            "position_ids": lambda place: torch.full((2, 1), place),
        },
    ],
    ids=lambda given: "+".join(given),
)
def test_one_graph_with_more_arguments(given):
    counter = CompileCounter()
    step = torch.compile(one_layer()[0], fullgraph=True, backend=counter)
    decode(step, cache_of(model=one_layer()[0]), 10, of=one_layer(), **given)
    assert counter.frame_count == 1


def test_a_growing_mask_compiles_twice():
    """As any growing size does: once for the first, once for all others."""
    counter = CompileCounter()
    step = torch.compile(one_layer()[0], fullgraph=True, backend=counter)
    growing = {"attention_mask": lambda place: torch.ones(2, place + 1)}
    decode(step, cache_of(model=one_layer()[0]), 10, of=one_layer(), **growing)
    assert counter.frame_count == 2


def test_errors_are_the_same_when_compiled():
    step = torch.compile(reference(), backend="eager")
    cache = cache_of()
    with pytest.raises(
        Exception, match="batch_size must be at most max_batch_size of the cache = 2"
    ):
        step(text()[:3, :1], cache=cache)
    assert not cache.seq_lens.any()


def assert_same_steps(engines):
    """Exported and eager steps gave the same bits, in logits and caches: those of the stock model,
    within rounding."""
    assert any(engines[0].logits)
    for exported, eager in zip(*(engine.logits for engine in engines), strict=True):
        assert all(torch.equal(logits, eager[at]) for at, logits in exported.items())
    pairs = zip(*(tree_leaves(engine.cache.tensors) for engine in engines), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert engines[0].worst(expected()) < 1e-4


def test_the_exported_step():
    """The module behind ``export_decode``, over steps that cross a window of 128."""
    caches = [cache_of(max_cache_len=160, num_blocks=2) for _ in range(2)]
    engines = [Engine(reference(), cache, text()) for cache in caches]
    for engine in engines:
        engine.prefill({0: 120, 1: 9})
    inputs = v4.decode_inputs(engines[0].batch({0: 1, 1: 1}), caches[0])
    program = torch.export.export(DecodeModule(reference(), caches[0]), inputs, strict=False)
    step = program.module()

    def exported(model, batch, tensors):
        return step(*v4.decode_inputs(batch, caches[0]))

    for place in range(12):
        counts = {0: 1} if place == 5 else {0: 1, 1: 1}
        padding = 2 - len(counts)
        engines[0].decode(counts, padding=padding, step=exported)
        engines[1].decode(counts, padding=padding)
    assert_same_steps(engines)


@pytest.mark.nightly("the same of V3")
def test_the_exported_prefill_takes_any_number_of_tokens():
    """The module behind ``export_prefill``: prompts, chunks, decodes among them, a single token, as
    many as it was exported for."""
    caches = [cache_of(max_cache_len=200, max_chunk=100, num_blocks=2) for _ in range(2)]
    engines = [Engine(reference(), cache, text()) for cache in caches]
    inputs = v4.decode_inputs(padding_batch(caches[0], 2, 7), caches[0])
    program = torch.export.export(
        PrefillModule(reference(), caches[0]),
        inputs,
        dynamic_shapes=prefill_shapes(inputs, 20_000),  # more than a plan may have
        strict=False,
    )
    (size,) = program.range_constraints.values()
    assert (size.lower, size.upper) == (1, 20_000)
    step = program.module(check_guards=False)

    def exported(model, batch, tensors):
        return step(*v4.decode_inputs(batch, caches[0]))

    for counts in ({0: 9, 1: 40}, {0: 1}, {0: 100, 1: 20}, {1: 1, 0: 2}, {0: 30, 1: 70}):
        padding = 2 - len(counts)
        engines[0].prefill(counts, padding=padding, step=exported)
        engines[1].prefill(counts, padding=padding)
    assert_same_steps(engines)
    one = v4.StepBatch(text()[0, 142:143], i32([0, 1, 1]), i32([143, 0]), i32([0, -1]))
    logits = exported(None, one, None)
    torch.testing.assert_close(logits[0], expected()[0, 142], rtol=0, atol=1e-4)

"""Calls of a patched model with a ``PagedCache``: results, and refusals before any write."""

import re
from functools import lru_cache

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_structure, tree_unflatten

from benchmarks.baselines.stock_model import YARN
from dsv4_ops.core.layout import PlainLayout
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_config, small_mla_model
from tests.support import hf_models
from tests.support.hf_models import Engine, check_states, expected, reference, refuses, stock, text

CLOSE = 1e-5
LENGTH = 12


def ids():
    return text()[:2, :LENGTH]


def cache_of(**sizes):
    return hf_models.new_cache(**{"max_batch_size": 2, "max_cache_len": 64, **sizes})


def test_outputs():
    want = expected()[:2, :LENGTH]
    for keep, place in ((2, slice(-2, None)), (torch.tensor([0, 3]), [0, 3])):
        got = reference()(ids(), cache=cache_of(), logits_to_keep=keep).logits
        torch.testing.assert_close(got, want[:, place], rtol=0, atol=CLOSE)
    cache = cache_of()
    logits, returned = reference()(ids().int(), cache=cache, return_dict=False)
    torch.testing.assert_close(logits, want, rtol=0, atol=CLOSE)
    assert returned is cache
    masks = (torch.ones(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.bool))
    for mask in masks:
        got = reference()(ids(), attention_mask=mask, cache=cache_of()).logits
        torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)
    position = torch.arange(LENGTH)[None]
    got = reference()(ids(), position_ids=position, cache=cache_of()).logits
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)


def test_a_cache_of_inference_mode_is_written_outside_of_it():
    """The cache also ignores the default device."""
    model, tokens = reference(), ids()
    with torch.inference_mode(), torch.device("meta"):
        cache, pages = cache_of(num_blocks=2), PlainLayout(2, 4, torch.float32).allocate(1, "cpu")
        cache.add("a", 64), cache.add("b", 64)
        model(tokens[:, :-1], cache=cache)
    pages.add_(1)
    got = model(tokens[:, -1:], cache=cache).logits
    torch.testing.assert_close(got, expected()[:2, LENGTH - 1 : LENGTH], rtol=0, atol=CLOSE)


FAMILIES = {"V4": (reference, stock), "V3": (lambda: mla(True), lambda: mla(False))}


@lru_cache
def mla(patched):
    model = small_mla_model()
    return v4.patch(model, kv="fp32", precision="reference") if patched else model


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_hugging_face(family):
    """States of a prompt, a chunk and a token, requested in the call or the config, are equal."""
    patched, plain = (make() for make in FAMILIES[family])
    want = plain(text()[:2, :20], output_hidden_states=True, use_cache=False)
    cache = v4.PagedCache.for_model(patched, max_batch_size=2, max_cache_len=64)
    for begin, end in (0, 12), (12, 19), (19, 20):
        ids = text()[:2, begin:end]
        got = patched(ids, cache=cache, output_hidden_states=True)
        assert type(got.hidden_states) is tuple
        for ours, other in zip(got.hidden_states, want.hidden_states, strict=True):
            assert ours.dtype == other.dtype
            check_states(ours, other[:, begin:end])
    assert patched(ids, cache=cache).hidden_states is None
    patched.config.output_hidden_states = True
    try:
        got = patched(ids, cache=cache, return_dict=False)
        assert len(got[2]) == len(want.hidden_states)
        assert patched(ids, cache=cache, output_hidden_states=False).hidden_states is None
    finally:
        patched.config.output_hidden_states = False


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_padded_prompts(family):
    patched, plain = (make() for make in FAMILIES[family])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 1]])
    cache = v4.PagedCache.for_model(patched, max_batch_size=2, max_cache_len=64)
    ids = text()[:2, :7]
    got = patched(ids, attention_mask=mask, cache=cache, output_hidden_states=True).hidden_states
    for row, there in enumerate(mask > 0):
        want = plain(ids[row : row + 1, there], output_hidden_states=True, use_cache=False)
        for ours, other in zip(got, want.hidden_states, strict=True):
            check_states(ours[row, there], other[0])


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


MASK = "attention_mask must have shape [2, 12 or more], got {}. Pass the mask of the tokens, 0 for "
PLACES = (
    "position_ids must have shape [2 or 1, 12], got {}. Pass a position per token, or None to go "
    "on where the cache ends."
)
OTHER = ("cache must have the model's {0}={1}, got {0}={2}. Make it with PagedCache.for_model. "
         "If the config changed after patch, restore it, or patch the model again.")  # fmt: skip
RECORDED = "{} must be False with a PagedCache, got True. Pass another cache, or none."
I64, F32 = "torch.int64 or torch.int32", torch.float32
MOST = "{} must be at most {} of the cache = {}, got {}"
REFUSED_CALLS = [
    *[({"attention_mask": torch.ones(shape)}, {}, MASK.format(list(shape)) + "padding.")
     for shape in [(12,), (3, 12), (2, 11), (1, 12), (2, 1, 12, 12)]],
    ({"attention_mask": {"a": None}}, {}, MASK.format("dict") + "padding."),
    *[({"position_ids": zeros(*shape)}, {}, PLACES.format(list(shape)))
     for shape in [(12,), (3, 12), (2, 11), (2, 1), (1, 2, 12)]],
    ({"position_ids": [0]}, {}, PLACES.format("list")),
    ({"output_attentions": True}, {}, RECORDED.format("output_attentions")),
    ({"output_router_logits": True}, {}, RECORDED.format("output_router_logits")),
    ({"output_hidden_states": [0, -1]}, {}, "output_hidden_states must be True or False with a Pa"),
    ({"input_ids": zeros(12)}, {},
     "input_ids must have shape [batch_size, sequence_length], got ["),
    ({"input_ids": zeros(2, 12, dtype=F32)}, {}, f"input_ids must be {I64}, got torch.float32."),
    ({"input_ids": None}, {}, "input_ids must be given, got None."),
    ({"input_ids": None, "inputs_embeds": torch.zeros(2, 12, 128)}, {},
     "input_ids must be given to"),
    ({"inputs_embeds": torch.zeros(2, 11, 128)}, {},
     "inputs_embeds must have shape [batch_size, sequence_length, 128] with sequence_length = 1"),
    ({"inputs_embeds": torch.zeros(2, 12, 128).half()}, {}, "inputs_embeds must be torch.float32,"),
    ({"position_ids": torch.arange(12.0)[None] + 0.5}, {}, f"position_ids must be {I64}, got tor"),
    ({"input_ids": zeros(2, 12).to("meta")}, {}, "input_ids must be on cpu like the cache, got me"),
    ({"input_ids": zeros(0, 12)}, {}, "batch_size must be at least 1, got 0."),
    ({"input_ids": zeros(2, 0)}, {}, "sequence_length must be at least 1, got 0."),
    ({"input_ids": zeros(3, 12)}, {}, MOST.format("batch_size", "max_batch_size", 2, 3)),
    ({}, {"max_chunk": 11}, MOST.format("sequence_length", "max_chunk", 11, 12)),
    ({}, {"kv": "bf16"}, "cache must hold 'fp32' keys like the model, got 'bf16'."),
    ({}, {"config": small_config(num_hidden_layers=2)},
     "cache must have the layers of the model, "),
    *[({}, {"config": small_config(**{field: value})}, OTHER.format(name, held, value))
     for field, name, held, value in [("sliding_window", "window_size", 128, 64),
     ("compress_rope_theta", "compress_rope_theta", 160000.0, 10000.0),
     ("index_topk", "index_topk", 16, 8)]],
    ({}, {"precision": "serve"}, OTHER.format("angles", "torch.float32", "exact")),
    ({}, {"num_blocks": 2}, "cache must have requests, as its rows share blocks, got none."),
]  # fmt: skip


@pytest.mark.parametrize(("given", "sizes", "message"), REFUSED_CALLS)
def test_calls_that_are_refused_write_nothing(given, sizes, message):
    sizes = {"kv": "fp32", "precision": "reference", "config": small_config(), **sizes}
    cache = v4.PagedCache(sizes.pop("config"), max_batch_size=2, max_cache_len=64, **sizes)
    with refuses(cache, re.escape(f"model: {message}")):
        reference()(**{"input_ids": ids(), "cache": cache, **given})


@pytest.mark.parametrize("step", [v4.decode_step, v4.prefill_step])
@pytest.mark.parametrize(
    ("changed", "name", "held", "value"),
    [
        ({"sliding_window": 64}, "window_size", 128, 64),
        ({"rope_theta": 500000.0}, "rope_theta", 10000.0, 500000.0),
        ({"rope_parameters": {**YARN, "factor": 4.0}}, "factor", 16.0, 4.0),
        ({"precision": "serve"}, "angles", "torch.float32", "exact"),
    ],
)
def test_steps_refuse_the_cache_of_another_model(step, changed, name, held, value):
    """Steps see only tensors, whose shapes do not depend on the window or the rotations."""
    fields = {key: given for key, given in changed.items() if key != "precision"}
    settings = {"kv": "fp32", "precision": changed.get("precision", "reference")}
    cache = v4.PagedCache(small_config(**fields), max_batch_size=2, max_cache_len=64, **settings)
    batch = Engine(reference(), cache, text()).batch({0: 1, 1: 3})
    with refuses(cache, re.escape(f"{step.__name__}: {OTHER.format(name, held, value)}") + "$"):
        step(reference(), batch, cache.tensors)


def test_what_a_cache_was_made_for_is_part_of_its_structure():
    """Sizes and settings are no leaves: graphs, programs and packages hold them as constants."""
    tensors = cache_of().tensors
    values, structure = tree_flatten(tensors)
    assert all(isinstance(value, torch.Tensor) for value in values)
    again = pytree.treespec_loads(pytree.treespec_dumps(structure))
    assert tree_unflatten(values, again) == tensors
    sizes = {"max_batch_size": 2, "max_cache_len": 64, "kv": "fp32"}
    other = v4.PagedCache(small_config(sliding_window=64), **sizes)
    assert tree_structure(other.tensors) != structure
    assert tree_structure(cache_of(max_cache_len=64).tensors) == structure
    parts = ("tables", "rope", "layers", "dropped", "seq_lens", "written")
    names = [str(path[0]) for path, _ in tree_flatten_with_path(tensors)[0]]
    assert {*names} == {f".{part}" for part in parts}


def test_rows_of_a_pool_have_pages_once_reserved():
    cache = cache_of(num_blocks=2)
    for request in ("a", "b"):
        cache.add(request, LENGTH)
    got = reference()(ids(), cache=cache).logits
    torch.testing.assert_close(got, expected()[:2, :LENGTH], rtol=0, atol=CLOSE)

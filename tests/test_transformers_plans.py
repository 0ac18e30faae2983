"""Decodes of a patched model plan the attention of its C128 layers: which steps do, that no result
changes, and how to leave it. Compiled and exported: tests/test_transformers_compiled.py."""

import pytest
import torch
from helpers import Called

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from hf_models import REQUESTS, Engine, expected, new_cache, reference, text

from dsv4_ops.demo.model import LAYER_TYPES, small_model
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers import steps

MIXED, SHORT = {0: 130, 1: 3, 2: 20}, {0: 1, 1: 2, 2: 1}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def patched(model=None, **settings):
    return v4.patch(model or small_model(), kv="fp32", precision="reference", **settings)


def plans(run) -> int:
    """Plans that ``run`` makes."""
    with Called() as called:
        run()
    return called.names.count("sparse_mla_plan")


def test_decodes_make_one_plan_and_prefills_none():
    engine = Engine(reference(), new_cache(), text())
    assert plans(lambda: engine.prefill(MIXED, padding=1)) == 0
    assert plans(lambda: engine.decode(SHORT, padding=2)) == 1
    assert engine.worst(expected()) < 1e-4


def test_one_plan_serves_all_layers():
    model = patched(small_model(layer_types=[LAYER_TYPES[2]] * 3))
    engine = Engine(model, new_cache(model), text())
    with Called() as called:
        engine.decode(SHORT)
    assert called.names.count("sparse_mla_plan") == 1
    assert called.names.count("sparse_mla_decode_paged") == 3


def test_calls_of_hugging_faces_form_plan_their_decodes():
    cache, tokens = new_cache(), text()
    for start, stop, count in ((0, 50, 0), (50, 51, 1), (51, 53, 0)):
        part = tokens[:, start:stop]
        assert plans(lambda part=part: reference()(part, past_key_values=cache)) == count
    assert cache.seq_lens.tolist() == [53] * REQUESTS


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        ({}, {"plan": False}),
        ({}, {"batch_invariant": True}),
        ({}, {"impl": "reference"}),
        ({"layer_types": [LAYER_TYPES[0], LAYER_TYPES[1]]}, {}),
    ],
    ids=["asked for none", "batch invariant", "reference", "no C128 layer"],
)
def test_a_model_that_goes_by_no_plan_makes_none(changed, settings):
    model = patched(small_model(**changed), **settings)
    assert model.dsv4_ops_spec.plan_heads == 0
    engine = Engine(model, new_cache(model), text())
    assert plans(lambda: engine.decode(SHORT)) == 0


def test_a_plan_changes_no_logit_on_a_cpu():
    found = []
    for plan in (True, False):
        model = patched(plan=plan)
        engine = Engine(model, new_cache(model), text())
        engine.prefill(MIXED)
        for _ in range(3):
            engine.decode(SHORT, padding=1)
        found.append(torch.stack([row for kept in engine.logits for row in kept.values()]))
    assert torch.equal(*found)


def test_steps_of_more_tokens_than_a_plan_may_have_go_without(monkeypatch):
    monkeypatch.setattr(steps, "MAX_REQUESTS", 4)
    engine = Engine(reference(), new_cache(), text())
    assert plans(lambda: engine.decode({0: 1, 1: 2, 2: 1})) == 1
    assert plans(lambda: engine.decode({0: 1, 1: 2, 2: 2})) == 0
    assert engine.worst(expected()) < 1e-4


def test_what_a_plan_is_not():
    with pytest.raises(TypeError) as caught:
        patched(plan=64)
    assert str(caught.value) == "patch: plan must be a bool, got int. Pass True or False."

"""Decodes of a patched model plan the attention of its C128 layers: which steps do, and how to turn
this off. tests/attention/test_layer_plans.py shows that results do not change."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4_ops.dispatch import choice
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import DeepseekV4Spec, spec
from dsv4_ops.testing.models import LAYER_TYPES, small_model
from tests.helpers import Called, nightly
from tests.support.hf_models import REQUESTS, Engine, expected, new_cache, reference, text

pytest_plugins = ("tests.support.providers_on_cpu",)
MIXED, SHORT = {0: 130, 1: 3, 2: 20}, {0: 1, 1: 2, 2: 1}


def patched(model=None, **settings):
    return v4.patch(model or small_model(), kv="fp32", precision="reference", **settings)


def plans(run) -> int:
    """Record the plans of ``run``."""
    with Called() as called:
        run()
    return called.names.count("sparse_mla_plan")


def test_decodes_make_one_plan_and_prefills_none():
    """One plan serves all C128 layers."""
    model = patched(small_model(layer_types=[LAYER_TYPES[2]] * 2))
    for each in (reference(), model):
        engine = Engine(each, new_cache(each), text())
        assert plans(lambda run=engine.prefill: run(MIXED, padding=1)) == 0
        assert plans(lambda run=engine.decode: run(SHORT, padding=2)) == 1
        assert each is model or engine.worst(expected()) < 1e-4


def test_calls_of_hugging_faces_form_plan_their_decodes():
    cache, tokens = new_cache(), text()
    for start, stop, count in ((0, 50, 0), (50, 51, 1), (51, 53, 0)):
        part = tokens[:, start:stop]
        assert plans(lambda part=part: reference()(part, cache=cache)) == count
    assert cache.seq_lens.tolist() == [53] * REQUESTS


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        *(({}, {"plan": False}), ({}, {"batch_invariant": True}), ({}, {"impl": "reference"})),
        ({"layer_types": [LAYER_TYPES[0], LAYER_TYPES[1]]}, {}),
    ],
    ids=["asked for none", "batch invariant", "reference", "no C128 layer"],
)
def test_a_model_that_goes_by_no_plan_makes_none(changed, settings):
    model = patched(small_model(**changed), **settings)
    assert model.dsv4_ops_spec.plan_heads == 0
    engine = Engine(model, new_cache(model), text())
    assert plans(lambda: engine.decode(SHORT)) == 0


def test_steps_of_more_tokens_than_a_plan_may_have_go_without(monkeypatch):
    monkeypatch.setattr(spec, "MAX_REQUESTS", 4)
    engine = Engine(reference(), new_cache(), text())
    assert plans(lambda: engine.decode({0: 1, 1: 2, 2: 1})) == 1
    assert plans(lambda: engine.decode({0: 1, 1: 2, 2: 2})) == 0
    assert engine.worst(expected()) < 1e-4


METADATA = {"flash_mla": "flash_mla_metadata", "deep_gemm": "paged_mqa_logits_metadata"}


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("impl", "made"), [("flash_mla", (3, 0)), *nightly("FlashMLA", ("deep_gemm", (1, 1)))]
)
def test_steps_share_what_a_library_would_make_in_every_layer(
    request, monkeypatch, impl: str, made: tuple[int, int]
):
    """Decodes have FlashMLA's metadata for each kind of layer; all steps have DeepGEMM's schedule.
    The fakes refuse other metadata, and make none themselves. Logits do not change."""
    library = request.getfixturevalue(impl)
    types = [LAYER_TYPES[layer % 3] for layer in range(4)]
    small = partial(small_model, layer_types=types, num_attention_heads=64, index_n_heads=64)
    logits = []
    for shared in (True, False):
        with monkeypatch.context() as unshared:
            if not shared:
                unshared.setattr(DeepseekV4Spec, "scheduled", lambda spec, device: spec)
            model = v4.patch(small(dtype=torch.bfloat16), impl=impl)
        own = len(library.plans) if impl == "flash_mla" else library.schedules
        engine = Engine(model, new_cache(model), text())
        counts = []
        for step, batch in ((engine.decode, SHORT), (engine.prefill, {0: 30, 1: 3, 2: 9})):
            with Called() as called:
                step(batch, padding=1)
            counts.append(called.names.count(METADATA[impl]))
        own = (len(library.plans) if impl == "flash_mla" else library.schedules) - own
        assert tuple(counts) == (made if shared else (0, 0))
        assert (own == 0) == shared
        logits.append(engine.logits)
    for ours, other in zip(*logits, strict=True):
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[place], other[place]) for place in ours)


@pytest.mark.usefixtures("deep_gemm")
def test_a_pickled_model_has_no_schedules_of_another_gpu():
    """The loaded model's layers make schedules again, because its GPU may have other SMs."""
    model = v4.patch(small_model(dtype=torch.bfloat16, index_n_heads=64), impl="deep_gemm")
    before = model.dsv4_ops_spec
    assert before.step_layers.schedule_sms == 132
    other = pickle.loads(pickle.dumps(model)).dsv4_ops_spec
    assert other == replace(before, step_layers=replace(before.step_layers, schedule_sms=0))
    assert copy.deepcopy(model).dsv4_ops_spec is before


@pytest.mark.usefixtures("flash_mla", "deep_gemm")
@pytest.mark.parametrize(
    ("impl", "kinds"), [("flash_mla", ("c4", "c128")), ("deep_gemm", ("window", "c128"))]
)
def test_steps_are_for_the_kinds_of_the_model(impl, kinds):
    """attention/test_layer_plans.py tests what a step makes for each kind."""
    types = [LAYER_TYPES[("window", "c4", "c128").index(kind)] for kind in kinds]
    sizes = {"layer_types": types, "num_attention_heads": 64, "index_n_heads": 64}
    model = v4.patch(small_model(dtype=torch.bfloat16, **sizes), impl=impl)
    held = model.dsv4_ops_spec.step_layers
    assert (held.kinds, held.schedule_sms) == (kinds, 0)


@pytest.mark.parametrize("impl", ["flash_mla", "deep_gemm"])
def test_patch_refuses_a_library_that_its_gpu_lacks(impl, monkeypatch):
    """A model on a CPU may be moved to a GPU later; a model on a GPU stays there."""
    monkeypatch.setattr(choice, "unusable", lambda library: "not installed (extra x)")
    held = v4.patch(small_model(dtype=torch.bfloat16), impl=impl).dsv4_ops_spec
    assert held.scheduled(torch.device("cpu")) == held
    with pytest.raises(ImportError) as raised:
        held.scheduled(torch.device("cuda"))
    message = f"patch: impl must be one that runs here, got '{impl}'. "
    assert str(raised.value).startswith(message)
    assert str(raised.value).endswith(": not installed (extra x).")

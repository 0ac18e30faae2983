"""Experts in bf16 as the op that GPUs run, here on a CPU; and when Hugging Face's products run."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dsv4_ops.integrations import transformers as hf
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import forwards
from dsv4_ops.integrations.transformers.modules import bf16_experts
from dsv4_ops.testing.models import small_mla_model, small_model
from tests.helpers import nightly
from tests.support.hf_models import first_step

HALF = replace(hf.Recipe.serve(), swiglu_float32=False)
FAMILIES = ("V4", "V3", "V2")


def made(family="V3", **sizes):
    """Make a model in bf16 with Hugging Face's default for experts; small models have another."""
    if family == "V4":
        model = small_model(dtype=torch.bfloat16, **sizes)
    else:
        model = small_mla_model(int(family[1]), dtype=torch.bfloat16, **sizes)
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """Let the op run on CPUs, and return its calls."""
    calls, op = [], bf16_experts.experts
    monkeypatch.setattr(bf16_experts, "RUN_ON", ("cpu",))
    monkeypatch.setattr(
        bf16_experts, "experts", lambda *args, **rest: calls.append(args) or op(*args, **rest)
    )
    return calls


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def inputs_of(experts, tokens=5):
    seed = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, experts.hidden_dim, generator=seed).bfloat16()
    scores = torch.rand(tokens, experts.num_experts, generator=seed).topk(2)
    return x, scores.indices, scores.values


@pytest.mark.parametrize(
    "family",
    [*nightly("V3's op, in test_quantized.py", "V4"), "V3", *nightly("V3's forwards", "V2")],
)
def test_a_step_is_one_graph_with_an_op_in_every_layer(family, ran):
    dense = {} if family == "V4" else {"first_k_dense_replace": 0}
    model = hf.patch(made(family, num_hidden_layers=2, **dense))
    layers = len(experts_of(model))
    batch, cache = first_step(model)
    expected = hf.decode_step(model, batch, cache)
    assert len(ran) == layers == 2
    compiled = torch.compile(hf.decode_step, fullgraph=True, backend="eager")
    found = compiled(model, *first_step(model))
    assert len(ran) == 2 * layers
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_op_rounds_no_more_than_hugging_face(family, ran):
    """Errors relative to float32, for the same weights, are no larger than Hugging Face's."""
    model = hf.patch(made(family))
    errors = []
    for experts in experts_of(model):
        call = inputs_of(experts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bf16_experts, "RUN_ON", ())
            stock = experts(*call).double()
            assert not ran
            experts.float()
            exact = experts(call[0].float(), *call[1:]).double()
            experts.bfloat16()
        ours = experts(*call).double()
        assert ran.pop()[3].shape == experts.gate_up_proj.shape
        errors.append([(each - exact).norm() / exact.norm() for each in (ours, stock)])
    ours, stock = torch.tensor(errors).mean(0)
    assert 0 < ours <= 1.1 * stock


def test_limits_of_swiglu_count():
    model = hf.patch(made("V4"))
    experts = experts_of(model)[0]
    call = inputs_of(experts)
    before = experts(*call)
    experts.limit = 0.01
    assert not torch.equal(experts(*call), before)


def test_what_hugging_face_was_told_to_run_stays(ran):
    """The op also leaves float32, a user's forward and rounded activations to Hugging Face."""
    model = hf.patch(made())
    experts = experts_of(model)[0]
    experts(*inputs_of(experts))
    assert ran.pop()
    model.set_experts_implementation("batched_mm")
    experts(*inputs_of(experts))
    model.set_experts_implementation("grouped_mm")
    x, *routed = inputs_of(experts)
    experts.float()(x.float(), *routed)
    own = made()
    first = experts_of(own)[0]
    first.forward = lambda x, *_: x
    hf.patch(own)
    assert torch.equal(first(x, *routed), x)
    rounded = hf.patch(made("V4"), precision="reference")
    first = experts_of(rounded)[0]
    first(*inputs_of(first))
    assert not ran


@pytest.mark.parametrize("family", ["V4", "V3"])
def test_many_rows_of_an_expert_are_hugging_faces(family, ran, monkeypatch):
    """For many rows, V4's router is Hugging Face's, too. Symbolic sizes never count as many."""
    model = hf.patch(made(family))
    hf.decode_step(model, *first_step(model))
    assert ran
    ran.clear()
    monkeypatch.setattr(bf16_experts, "MOST_ROWS", 0)
    hf.decode_step(model, *first_step(model))
    assert not ran
    monkeypatch.setattr(bf16_experts, "MOST_ROWS", 1)
    experts = experts_of(model)[0]
    call = inputs_of(experts, tokens=experts.num_experts)  # two rows of each expert
    experts(*call)
    assert not ran
    torch.compile(experts, fullgraph=True, backend="eager", dynamic=True)(*call)
    assert len(ran) == 1


@pytest.mark.parametrize("changed", ["impl", "recipe", "forward"])
def test_the_router_is_hugging_faces_where_the_experts_are(changed, ran, monkeypatch):
    """Hugging Face's ids are int64, and none is absent; other forwards do not know our op's ids."""
    monkeypatch.setattr(forwards, "FUSED_ON", ("cpu",))
    settings = {"impl": {"impl": "reference"}, "recipe": {"precision": HALF}}.get(changed, {})
    model = hf.patch(made("V4"), **settings)
    seen, experts = [], experts_of(model)
    if changed == "forward":
        for each in experts:
            each.forward = lambda x, ids, _: seen.append(ids.dtype) or x
    else:
        for each in experts:
            each.register_forward_pre_hook(lambda _, args: seen.append(args[1].dtype))
    hf.decode_step(model, *first_step(model))
    assert seen == [torch.int64] * len(experts)
    assert not ran


@torch.enable_grad()
def test_gradients_flow_through_hugging_face(ran):
    model = hf.patch(made())
    experts = experts_of(model)[0].requires_grad_()
    x, *routed = inputs_of(experts)
    experts(x, *routed).sum().backward()
    assert experts.down_proj.grad.any()
    experts.requires_grad_(False)
    assert not experts(x, *routed).requires_grad
    assert len(ran) == 1
    experts(x.requires_grad_(), *routed).sum().backward()
    assert x.grad.any()
    assert len(ran) == 1


def test_unpatched_experts_are_hugging_faces(ran):
    model = made()
    experts = experts_of(model)[0]
    before = experts(*inputs_of(experts))
    hf.unpatch(hf.patch(model))
    assert torch.equal(experts(*inputs_of(experts)), before)
    assert not ran
    assert isinstance(experts.gate_up_proj, nn.Parameter)

"""Linear layers of one input that a GPU multiplies at once: their parameters stay what they are,
and the products are those of the layers."""

import copy
import tempfile

import pytest
import torch

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import forwards
from dsv4_ops.integrations.transformers.modules import fused_projections
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from tests.helpers import NIGHTLY
from tests.support.hf_models import first_step

PARTS = {
    fused_projections.of_attention: "q_a_proj",
    fused_projections.of_shared_experts: "up_proj",
    fused_projections.of_compressor: "rotary_emb",
}
ONE_LAYER = {"num_hidden_layers": 1, "num_hash_layers": 0, "compress_ratios": [4, 0]}


@pytest.fixture(scope="module")
def loaded():
    with tempfile.TemporaryDirectory() as folder:
        yield v4.load_quantized(write_checkpoint(folder, {**TINY, **ONE_LAYER}))


@pytest.fixture
def model(loaded, monkeypatch):
    monkeypatch.setattr(fused_projections, "FUSED_ON", ("cpu",))
    yield v4.patch(loaded)
    v4.unpatch(loaded)
    assert holders(loaded) == []


def holders(model):
    return [module for module in model.modules() if fused_projections.FUSED in module._modules]


def layers_of(holder):
    """What ``holder`` multiplies its input by."""
    return next(of(holder) for of, name in PARTS.items() if name in holder._modules)


def as_bytes(value):
    return value.contiguous().flatten().view(torch.uint8)


def test_weights_are_views_with_the_bytes_of_before(loaded, monkeypatch):
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    monkeypatch.setattr(fused_projections, "FUSED_ON", ("cpu",))
    model = v4.patch(loaded)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(as_bytes(after[name]), as_bytes(value)), name
    compressor = model.model.layers[0].self_attn.compressor
    kv, gate, *_ = fused_projections.of_compressor(compressor)
    assert gate.weight.data_ptr() == compressor.dsv4_ops_fused.weight[len(kv.weight) :].data_ptr()
    v4.unpatch(model)


def test_products_are_those_of_the_layers(model):
    # the attention layer, its compressor and its shared experts
    assert len(holders(model)) == 3
    for holder in holders(model):
        x = torch.randn(3, layers_of(holder)[0].weight.shape[1]).bfloat16()
        together = fused_projections.fused_layer(holder, layers_of(holder))(x)
        apart = torch.cat([layer(x) for layer in layers_of(holder)], -1)
        torch.testing.assert_close(together.to(torch.bfloat16), apart)


def test_a_step_is_one_graph_with_the_bits_of_the_eager_one(model, monkeypatch):
    """With the router and hyper-connections as ops, too: all that a GPU's decode step has."""
    monkeypatch.setattr(forwards, "FUSED_ON", ("cpu",))
    ran = []
    op = forwards.route
    monkeypatch.setattr(forwards, "route", lambda *args, **rest: ran.append(1) or op(*args, **rest))
    found = []
    for step in (v4.decode_step, torch.compile(v4.decode_step, fullgraph=True, backend="eager")):
        batch, cache = first_step(model)
        found.append(step(model, batch, cache.tensors))
    assert len(ran) == 2
    assert found[0].isfinite().all()
    assert torch.equal(*found)


REPLACED = [
    "model.layers.0.self_attn.kv_proj.weight",
    "model.layers.0.self_attn.q_a_proj.weight_scale_inv",
    "model.layers.0.mlp.shared_experts.up_proj.weight_scale_inv",
    "model.layers.0.mlp.experts.down_proj_scale_inv",
]
"""Of codes and scales that are joined, and of one that has its bytes in a buffer beside it."""


MODES = ("whole", "regional") if NIGHTLY else ("regional",)


@pytest.mark.nightly("test_what_was_moved_or_changed_since; test_deepseek_v3.py has such steps")
@pytest.mark.parametrize(
    "form", ["data", pytest.param("assign", marks=pytest.mark.nightly("the same by .data"))]
)
def test_weights_that_are_replaced_count_in_the_next_step(model, form):
    """Of an eager step and of one compiled before, in whichever mode."""

    def run(step, *of):
        return step(*of, *first_step(model))

    twin, kept = copy.deepcopy(model), {name: v.clone() for name, v in model.state_dict().items()}
    steps = [v4.compile_step(model, mode=mode, backend="eager") for mode in MODES]
    found = [run(step) for step in steps]
    try:
        for name in REPLACED:
            value = model.state_dict()[name]
            other = as_bytes(value).flip(0).view(value.dtype).view(value.shape)
            if form == "assign":
                model.load_state_dict({**model.state_dict(), name: other}, assign=True)
            else:
                model.get_parameter(name).data = other
            twin.load_state_dict({name: other}, strict=False)  # in place
            want, before = run(v4.decode_step, twin), found
            found = [*map(run, steps), run(v4.decode_step, model)]
            assert not any(torch.equal(want, each) for each in before), name
            assert all(torch.equal(want, each) for each in found), name
    finally:
        model.load_state_dict(kept)


def test_what_was_moved_or_changed_since(model):
    copied = copy.deepcopy(model)  # with a copy of every parameter
    attention = copied.model.layers[0].self_attn
    assert not attention.dsv4_ops_fused.holds(layers_of(attention))
    copied.dsv4_ops_spec.refresh("model", copied.model)
    assert attention.dsv4_ops_fused.holds(layers_of(attention))
    assert fused_projections.fused_layer(attention, layers_of(attention)) is not None
    attention.kv_proj.register_forward_hook(lambda *_: None)
    assert fused_projections.fused_layer(attention, layers_of(attention)) is None

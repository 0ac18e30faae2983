"""Linear layers with one input, which a GPU multiplies at once: same parameters and products."""

import copy
import tempfile

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from dsv4_ops.core.torch_compat import one_graph_for_all_sizes
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import forwards
from dsv4_ops.integrations.transformers.modules import fused_projections
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.contract.compare import equal
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


def layers_of(holder, attention):
    """Return the layers that multiply the input of ``holder``."""
    if holder is getattr(attention.compressor, "indexer", None):
        return fused_projections.of_queries(attention)
    return next(of(holder) for of, name in PARTS.items() if name in holder._modules)


def test_weights_are_views_with_the_bytes_of_before(loaded, monkeypatch):
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    monkeypatch.setattr(fused_projections, "FUSED_ON", ("cpu",))
    model = v4.patch(loaded)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert equal(after[name], value), name
    compressor = model.model.layers[0].self_attn.compressor
    kv, gate, *_ = fused_projections.of_compressor(compressor)
    assert gate.weight.data_ptr() == compressor.dsv4_ops_fused.weight[len(kv.weight) :].data_ptr()
    v4.unpatch(model)


def test_products_are_those_of_the_layers(model):
    # attention layer, compressor, queries with the indexer's queries, and shared experts
    assert len(holders(model)) == 4
    for holder in holders(model):
        layers = layers_of(holder, model.model.layers[0].self_attn)
        x = torch.randn(3, layers[0].weight.shape[1]).bfloat16()
        together = fused_projections.fused_layer(holder, layers)(x)
        apart = torch.cat([layer(x) for layer in layers], -1)
        torch.testing.assert_close(together.to(torch.bfloat16), apart)


def test_heads_are_those_of_the_layers(model, monkeypatch):
    """The results are views of one product, in one graph for one row and for several."""
    attention = model.model.layers[0].self_attn
    together, dims = attention.compressor.indexer.dsv4_ops_fused, (attention.head_dim, 64)
    monkeypatch.setattr(type(together), "forward", lambda self, x: x)
    compiled = torch.compile(lambda x: together.heads(x, dims), dynamic=True, fullgraph=True)
    counters.clear()
    for rows in (1, 2, 5):
        x = torch.randn(rows, sum(together.sizes))
        with one_graph_for_all_sizes():
            found = compiled(x)
        for heads, part, dim in zip(found, x.split(together.sizes, -1), dims, strict=True):
            assert torch.equal(heads, part.unflatten(-1, (-1, dim)))
    assert counters["stats"]["unique_graphs"] == 1


def test_norms_and_swiglu_are_those_of_the_layers(model):
    layer = model.model.layers[0]
    attention, shared = layer.self_attn, layer.mlp.shared_experts
    x, norms = torch.randn(3, 256).bfloat16(), (attention.q_a_norm, attention.kv_norm)
    together = attention.dsv4_ops_fused
    parts = together(x).split(together.sizes, -1)
    for found, norm, part in zip(together.normed(x, norms), norms, parts, strict=True):
        assert torch.equal(found, norm(part))
    gate, up = shared.dsv4_ops_fused(x).chunk(2, -1)
    for limit in (0.25, 10.0):
        found = shared.dsv4_ops_fused.swiglu(x, limit)
        torch.testing.assert_close(found, forwards._swiglu(shared, gate, up, limit))
    hook = norms[1].register_forward_hook(lambda *_: None)
    assert together.normed(x, norms) is None
    hook.remove()


def test_a_step_is_one_graph_with_the_bits_of_the_eager_one(loaded, monkeypatch):
    """Router and hyper-connections are ops too, and activations are FP8, as in a decode step on a
    GPU. Inductor cannot read e8m0 scales."""
    monkeypatch.setattr(fused_projections, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(forwards, "FUSED_ON", ("cpu",))
    ran = []
    op = forwards.route
    monkeypatch.setattr(forwards, "route", lambda *args, **rest: ran.append(1) or op(*args, **rest))
    model = v4.patch(loaded, precision=v4.Recipe.serve(activations="fp8"))
    counter, found = CompileCounterWithBackend("eager"), []
    for step in (v4.decode_step, torch.compile(v4.decode_step, fullgraph=True, backend=counter)):
        batch, cache = first_step(model)
        found.append(step(model, batch, cache.tensors))
    v4.unpatch(loaded)
    assert (len(ran), counter.frame_count) == (2, 1)
    assert found[0].isfinite().all()
    assert torch.equal(*found)
    given = (node for node in counter.graphs[0].graph.nodes if node.op == "placeholder")
    values = (node.meta["example_value"] for node in given)
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    assert torch.float8_e4m3fn in dtypes
    assert torch.float8_e8m0fnu not in dtypes


def test_a_hook_gets_the_experts_sum_alone(model, monkeypatch):
    monkeypatch.setattr(forwards, "FUSED_ON", ("cpu",))
    routed, seen = model.model.layers[0].mlp.experts, []
    hook = routed.register_forward_hook(lambda module, args, out: seen.append((args, out)))
    batch, cache = first_step(model)
    v4.decode_step(model, batch, cache.tensors)
    hook.remove()
    ((args, out),) = seen
    with torch.no_grad():
        assert torch.equal(out, routed(*args))


def test_what_was_moved_or_changed_since(model):
    copied = copy.deepcopy(model)  # has a copy of every parameter
    attention = copied.model.layers[0].self_attn
    assert not attention.dsv4_ops_fused.holds(layers_of(attention, attention))
    copied.dsv4_ops_spec.refresh("model", copied.model)
    assert attention.dsv4_ops_fused.holds(layers_of(attention, attention))
    assert fused_projections.fused_layer(attention, layers_of(attention, attention)) is not None
    attention.kv_proj.register_forward_hook(lambda *_: None)
    assert fused_projections.fused_layer(attention, layers_of(attention, attention)) is None

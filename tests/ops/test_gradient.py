"""An op has a right derivative or raises; autograd never gets a silent 0."""

import pytest
import torch

import dsv4_ops
from dsv4_ops.core import gradient
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.contract.gradient import check_gradient
from tests.helpers import nightly
from tests.support.layers import PLAIN, SPEC, Engine, SmallLayer, hidden_states

FLOATS = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.arange(48.0).view(3, 4, 4).sin()


def refused(op):
    return pytest.raises(NotImplementedError, match=f"^{op}: results must not be dif")


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_a_derivative_or_raises(name):
    check_gradient(OPS[name])


def test_an_op_that_says_nothing_is_noticed(monkeypatch):
    """The contract can fail."""
    monkeypatch.setattr(gradient._Refused, "backward", lambda ctx, *_: (None,) * (2 + ctx.count))
    with pytest.raises(AssertionError, match=r"^apply_rope, inputs \[0, 2\], _backward: no error"):
        check_gradient(OPS["apply_rope"])


def mixed(logits):
    return (dsv4_ops.sinkhorn(logits) * WEIGHTS).sum()


def test_sinkhorn_has_the_derivative_of_its_formula():
    exact = FLOATS[:, :9].double().requires_grad_()

    def op(logits):
        return torch.ops.dsv4_ops.sinkhorn(logits, num_streams=3, iterations=3, eps=1e-6)

    assert torch.autograd.gradcheck(op, exact, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, exact)


def test_sinkhorn_has_one_derivative_in_every_form():
    logits = FLOATS.clone().requires_grad_()
    (want,) = torch.autograd.grad(mixed(logits), logits)
    assert want.abs().max() > 0.1
    each = torch.func.vmap(torch.func.grad(lambda row: mixed(row[None].expand(3, 16)) / 3))
    assert each(FLOATS).shape == FLOATS.shape
    assert torch.equal(torch.func.grad(mixed)(FLOATS), want)
    tangent = torch.func.jvp(mixed, (FLOATS,), (torch.ones_like(FLOATS),))[1]
    torch.testing.assert_close(tangent, want.sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", *nightly("AOTAutograd", "inductor")])
def test_compiled_code_has_the_derivative_or_raises(backend):
    """Code compiled for inference runs with weights that require gradients."""
    x, places = FLOATS.view(3, 2, 8).clone().requires_grad_(), torch.arange(3)
    logits, table = FLOATS.clone().requires_grad_(), FLOATS[:, :8].clone()

    def both(logits, x):
        mix = dsv4_ops.sinkhorn(logits, iterations=2) * WEIGHTS
        return mix.sum(), dsv4_ops.apply_rope(x * 2, places, table)

    (want,) = torch.autograd.grad(both(logits, x)[0], logits)
    torch._dynamo.reset()
    compiled = torch.compile(both, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(logits, x), both(logits, x))
    (found,) = torch.autograd.grad(compiled(logits, x.detach())[0], logits)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    with refused("apply_rope"):
        compiled(logits.detach(), x)[1].sum().backward()


def test_a_transform_that_is_compiled_raises():
    places, table = torch.arange(3), FLOATS[:, :8].clone()
    asked = torch.func.grad(lambda x: dsv4_ops.apply_rope(x, places, table).sum())
    torch._dynamo.reset()
    with refused("apply_rope"):
        torch.compile(asked, backend="aot_eager", fullgraph=True)(FLOATS.view(3, 2, 8))


def test_a_program_of_weights_that_require_gradients_is_that_of_inference():
    class Rotate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))
            self.register_buffer("table", FLOATS[:, :8].clone())

        def forward(self, x, places):
            return dsv4_ops.apply_rope(x * self.scale, places, self.table)

    given = FLOATS.view(3, 2, 8), torch.arange(3)
    program = torch.export.export(Rotate(), given)
    named = [node.target for node in program.graph.nodes if "dsv4_ops" in str(node.target)]
    assert named == [OPS["apply_rope"].op]
    assert torch.equal(program.module()(*given), Rotate()(*given))


@pytest.mark.parametrize("spec", [PLAIN, SPEC], ids=["plain", "fp8"])
@pytest.mark.parametrize("kind", ["window", "c4"])
def test_a_layer_computes_and_then_raises(kind, spec):
    """A layer also raises for weights that reach the output only through the caches."""
    layer = SmallLayer(kind, spec)
    inputs = layer.project(hidden_states()[0])
    batch = Engine(layer, 1).batch([60])
    want = layer.attend(inputs, *batch)
    for name in inputs:
        leaf = inputs[name].clone().requires_grad_()
        found = layer.attend({**inputs, name: leaf}, *batch)
        assert torch.equal(found, want)
        assert not any(each.requires_grad for each in layer.attention.buffers())
        with refused("attention_layer"):
            torch.autograd.backward(found, torch.ones_like(found), inputs=[leaf])
    assert not layer.attend(inputs, *batch).requires_grad


def test_a_loss_behind_our_cache_raises():
    """With weights that require gradients, and without ``no_grad``, the logits are those of
    inference; a backward raises, because gradients would be missing."""
    pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    from dsv4_ops.integrations import transformers as v4
    from dsv4_ops.testing.models import small_model
    from tests.support.hf_models import new_cache, text

    ids = text()[:2, :6]
    model = v4.patch(small_model(), kv="fp32", precision="reference")

    def logits():
        return model(ids, cache=new_cache(model, max_batch_size=2, max_cache_len=64)).logits

    want = logits()
    assert not want.requires_grad
    for trained in (model.model.layers[0].self_attn.kv_proj.weight, model.model.norm.weight):
        model.requires_grad_(False)
        trained.requires_grad_()
        found = logits()
        assert torch.equal(found, want)
        with refused("PagedCache"):
            found.sum().backward(inputs=[trained])
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    logits().sum().backward()
    assert model.lm_head.weight.grad.any()
    model.requires_grad_(True)
    cache = new_cache(model, max_batch_size=2, max_cache_len=64)
    assert model.generate(ids, cache=cache, max_new_tokens=3).shape == (2, 9)

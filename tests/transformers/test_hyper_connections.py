"""Steps whose hyper-connections are one op each have the bits of the modules, and run the modules
if a user changed them."""

import pytest
import torch

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import forwards
from dsv4_ops.testing.models import SLIDING, small_model
from tests.support.hf_models import first_step


@pytest.fixture
def decode(monkeypatch):
    """Return logits of a step, with or without ops on the CPU, and the number of ops."""
    model = v4.patch(small_model(dtype=torch.bfloat16), kv="fp8")
    ran = []
    op = forwards.hyper_connection
    monkeypatch.setattr(
        forwards, "hyper_connection", lambda *args, **rest: ran.append(1) or op(*args, **rest)
    )

    def run(devices, step=v4.decode_step, batch=None):
        monkeypatch.setattr(forwards, "FUSED_ON", devices)
        first, cache = first_step(model)
        before = len(ran)
        return step(model, batch or first, cache.tensors), len(ran) - before

    run.model = model
    return run


def test_ops_give_the_bits_of_the_modules(decode):
    """test_fused_projections.py compiles these ops."""
    (expected, none), (found, count) = decode(()), decode(("cpu",))
    assert (none, count) == (0, 6)
    assert torch.equal(found, expected)


def test_prefills_take_the_ops(decode):
    """Requests have three and two tokens; the head sees the last ones."""
    batch = v4.StepBatch(
        torch.tensor([7, 5, 3, 2, 9]),
        *(torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 5], [3, 2], [0, 1])),
    )
    (expected, none), (found, count) = (
        decode(devices, step=v4.prefill_step, batch=batch) for devices in ((), ("cpu",))
    )
    assert (none, count) == (0, 6)
    assert found.shape[0] == 2
    assert torch.equal(found, expected)


def test_modules_with_hooks_are_called(decode):
    calls = []
    layer = decode.model.model.layers[1]
    handle = layer.post_attention_layernorm.register_forward_hook(lambda *_: calls.append(1))
    assert decode(("cpu",))[1] == 4
    assert calls == [1]
    handle.remove()
    assert decode(("cpu",))[1] == 6


def test_blocks_are_added_by_the_next_layer(decode, monkeypatch):
    """The first layer gets an earlier block of zeros, so that layers of a kind share a graph."""
    given, op = [], forwards.hyper_connection
    monkeypatch.setattr(
        forwards, "hyper_connection", lambda *args, **rest: given.append(args) or op(*args, **rest)
    )
    assert decode(("cpu",))[1] == 6
    assert [len(args) for args in given] == [8] * 6
    streams, _, _, _, _, block_out, post, mix = given[0]
    assert torch.equal(streams, streams[:, :1].expand_as(streams))
    assert not block_out.any()
    assert not post.any()
    assert torch.equal(mix, torch.eye(4).expand(2, 4, 4))
    again = given[2]  # the second layer
    assert [each.stride() for each in again] == [each.stride() for each in given[0]]


def test_layers_of_a_kind_share_a_graph(monkeypatch):
    monkeypatch.setattr(forwards, "FUSED_ON", ("cpu",))
    sizes = {"layer_types": [SLIDING] * 3, "mlp_layer_types": ["moe"] * 3}
    model = v4.patch(small_model(dtype=torch.bfloat16, **sizes), kv="fp8")
    torch._dynamo.utils.counters.clear()
    step = v4.compile_step(model, mode="regional", backend="eager")
    found = step(*first_step(model))
    assert torch.equal(found, v4.decode_step(model, *first_step(model)))
    assert len(step.parts) == torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_of_layers_get_streams(decode, everywhere):
    expected, shapes = decode(())[0], []

    def hook(module, _, out):
        if type(module).__name__ == "DeepseekV4DecoderLayer":
            shapes.append(tuple(out.shape))

    if everywhere:
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = decode.model.model.layers[2].register_forward_hook(hook)
    try:
        found, _ = decode(("cpu",))
    finally:
        handle.remove()
    assert torch.equal(found, expected)
    assert shapes == [(1, 2, 4, decode.model.config.hidden_size)] * (3 if everywhere else 1)

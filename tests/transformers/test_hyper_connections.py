"""Steps whose hyper-connections are one op each: the bits of the modules', and a fall back
to modules that were changed."""

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import forwards
from dsv4_ops.testing.models import small_model


@pytest.fixture
def decode(monkeypatch):
    """Logits of a step with ops on the CPU or without, and how many ops ran."""
    model = v4.patch(small_model(dtype=torch.bfloat16), kv="fp8")
    batch = v4.StepBatch(
        torch.tensor([7, 5]),
        *(torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 2], [1, 1], [0, 1])),
    )
    ran = []
    op = forwards.hyper_connection
    monkeypatch.setattr(
        forwards, "hyper_connection", lambda *args, **rest: ran.append(1) or op(*args, **rest)
    )

    def run(devices, compiled=False, step=v4.decode_step):
        monkeypatch.setattr(forwards, "FUSED_ON", devices)
        cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=256)
        for request in "ab":
            cache.add(request, num_tokens=1)
        if compiled:
            step = torch.compile(step, fullgraph=True, backend="eager")
        before = len(ran)
        return step(model, batch, cache.tensors), len(ran) - before

    run.model = model
    return run


def test_ops_give_the_bits_of_the_modules(decode):
    (expected, none), (found, count) = decode(()), decode(("cpu",))
    assert (none, count) == (0, 6)
    assert torch.equal(found, expected)
    assert torch.equal(decode(("cpu",), compiled=True)[0], expected)


def test_prefills_take_the_ops(decode):
    (expected, none), (found, count) = (
        decode(devices, step=v4.prefill_step) for devices in ((), ("cpu",))
    )
    assert (none, count) == (0, 6)
    assert torch.equal(found, expected)


def test_modules_with_hooks_are_called(decode):
    calls = []
    layer = decode.model.model.layers[1]
    handle = layer.post_attention_layernorm.register_forward_hook(lambda *_: calls.append(1))
    assert decode(("cpu",))[1] == 4
    assert calls == [1]
    handle.remove()
    assert decode(("cpu",))[1] == 6

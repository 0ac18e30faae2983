"""Linear layers of one input that a GPU multiplies at once: their parameters stay what they are,
and the products are those of the layers."""

import copy
import tempfile

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import forwards, joined
from dsv4_ops.testing.checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def loaded():
    with tempfile.TemporaryDirectory() as folder:
        yield v4.load_quantized(write_checkpoint(folder))


PARTS = {
    joined.of_attention: "q_a_proj",
    joined.of_shared_experts: "up_proj",
    joined.of_compressor: "rotary_emb",
}


def steps(model):
    """Logits of a step, eager and traced."""
    found = []
    batch = v4.StepBatch(
        torch.tensor([7, 5]),
        *(torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 2], [1, 1], [0, 1])),
    )
    for compiled in (False, True):
        cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=256)
        for request in "ab":
            cache.add(request, num_tokens=1)
        step = v4.decode_step
        if compiled:
            step = torch.compile(step, fullgraph=True, backend="eager")
        found.append(step(model, batch, cache.tensors))
    return found


def holders(model):
    return [module for module in model.modules() if joined.JOINED in module._modules]


def test_layers_are_joined_in_place(loaded, monkeypatch):
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    expected = steps(v4.patch(loaded))
    v4.unpatch(loaded)
    assert holders(loaded) == []
    monkeypatch.setattr(joined, "JOINED_ON", ("cpu",))
    model = v4.patch(loaded)
    # 4 layers: attention, shared experts; the compressors of three
    assert len(holders(model)) == 11
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(_bytes(after[name]), _bytes(value)), name
    compressor = model.model.layers[1].self_attn.compressor
    assert joined.of_compressor(compressor)[1].weight.data_ptr() == (
        compressor.dsv4_ops_joined.weight[1024:].data_ptr()
    )
    with torch.no_grad():
        for holder in holders(model):
            own = next(
                of(holder)
                for of, name in PARTS.items()
                if name in holder._modules and holder._modules[name] is not None
            )
            x = torch.randn(3, own[0].weight.shape[1]).bfloat16()
            together = joined.joined(holder, own)(x)
            apart = torch.cat([layer(x) for layer in own], -1)
            torch.testing.assert_close(together.to(torch.bfloat16), apart)
    monkeypatch.setattr(forwards, "FUSED_ON", ("cpu",))
    found = steps(model)
    assert torch.equal(*found)
    assert float((found[0] - expected[0]).abs().max()) < float(expected[0].std())


def test_what_was_moved_or_changed_since(loaded):
    model = copy.deepcopy(loaded)
    attention = model.model.layers[0].self_attn
    # a copy has copies of every parameter
    assert not attention.dsv4_ops_joined.holds(joined.of_attention(attention))
    steps(model)
    assert attention.dsv4_ops_joined.holds(joined.of_attention(attention))
    with torch.no_grad():
        assert joined.joined(attention, joined.of_attention(attention)) is not None
        attention.kv_proj.register_forward_hook(lambda *_: None)
        assert joined.joined(attention, joined.of_attention(attention)) is None
    v4.unpatch(model)
    assert holders(model) == []


def _bytes(value):
    return value.contiguous().flatten().view(torch.uint8)

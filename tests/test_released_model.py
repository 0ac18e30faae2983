"""``testing.released_model``: what ``load_quantized`` would have loaded, without files."""

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs deepseek_v4")

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.released_model import released_model


def kinds(model):
    return {name: (t.dtype, tuple(t.shape)) for name, t in model.state_dict().items()}


def test_tensors_are_those_of_a_loaded_checkpoint(tmp_path):
    loaded = v4.load_quantized(write_checkpoint(tmp_path))
    made = released_model(TINY, device="cpu")
    assert kinds(made) == kinds(loaded)
    modules = [type(module) for module in loaded.modules()]
    assert [type(module) for module in made.modules()] == modules
    assert not any(buffer.is_meta for buffer in made.buffers())
    computed = {name: t for name, t in loaded.named_buffers() if name not in loaded.state_dict()}
    for name, buffer in computed.items():
        assert torch.equal(made.get_buffer(name), buffer), name


def test_seeds_decide_every_tensor():
    made, again, other = (released_model(TINY, device="cpu", seed=seed) for seed in (3, 3, 4))
    for name, tensor in made.state_dict().items():
        if tensor.element_size() == 1:  # NaN codes of scales never, but equal() knows few dtypes
            tensor = tensor.view(torch.uint8)
        same = again.state_dict()[name].view(tensor.dtype)
        assert torch.equal(tensor, same), name
    weight = "model.layers.0.self_attn.q_a_proj.weight"
    changed = other.state_dict()[weight].view(torch.uint8)
    assert not torch.equal(made.state_dict()[weight].view(torch.uint8), changed)


def test_it_is_patched_and_decodes():
    model = v4.patch(released_model(TINY, device="cpu"))
    cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
    row = cache.add("a", num_tokens=8)
    starts, lens, rows = (torch.tensor(v, dtype=torch.int32) for v in ([0, 8], [8], [row]))
    batch = v4.StepBatch(torch.arange(3, 11), starts, lens, rows)
    logits = v4.prefill_step(model, batch, cache)
    assert logits.isfinite().all()
    assert 0.1 < float(logits.std()) < 10

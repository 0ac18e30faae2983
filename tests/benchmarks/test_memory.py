"""``python -m benchmarks memory``: computed bytes equal Hugging Face's modules and our caches."""

import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", "5.17", reason="needs deepseek_v4")

from benchmarks import memory
from benchmarks.harness.live_bytes import peak_bytes
from dsv4_ops.checkpoint.format import weight_bytes
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers import PagedCache
from dsv4_ops.testing.checkpoint import FLASH
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.released_model import on_meta


@functools.cache
def flash():
    return on_meta(FLASH)


def part_of(name):
    if ".shared_experts." in name:
        return "shared experts"
    if ".experts." in name:
        return "experts"
    return "attention" if ".self_attn." in name else "other"


def by_part(model, num_gpus=1, is_split=lambda name: False):
    """Return the bytes of Hugging Face's parameters and buffers on a GPU."""
    found = dict.fromkeys(("experts", "attention", "shared experts", "other"), 0)
    for name, tensor in model.state_dict().items():
        found[part_of(name)] += tensor.nbytes // (num_gpus if is_split(name) else 1)
    return found


def test_weights_are_those_of_hugging_faces_modules():
    """The model is Flash; test_checkpoint.py tests Pro."""
    assert by_part(flash()) == weight_bytes(FLASH)
    assert sum(by_part(flash()).values()) == 156_016_590_300


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_gpus_have_what_hugging_faces_plans_leave_them(num_gpus):
    """The plans name the split parameters. Since transformers 5.24 they split the embedding, too,
    which ``weight_bytes`` counts as whole."""
    model = flash()
    if not hasattr(model, "_expand_parallel_plan"):
        pytest.skip("transformers before 5.24 does not expand its plans")
    expanded = {**model._expand_parallel_plan(model.tp_plan)}
    expanded |= model._expand_parallel_plan(model.ep_plan)
    split = set(expanded)
    embedding = model.model.embed_tokens.weight
    assert "model.embed_tokens.weight" in split
    found = by_part(model, num_gpus, split.__contains__)
    found["other"] += embedding.nbytes - embedding.nbytes // num_gpus
    assert found == weight_bytes(FLASH, num_gpus=num_gpus)


def test_a_cache_takes_on_meta_what_it_takes_on_a_cpu():
    sizes = {"max_batch_size": 2, "max_cache_len": 700}
    config = small_model().config
    made, paper = (PagedCache(config, **sizes, device=device) for device in ("cpu", "meta"))
    assert made.memory() == paper.memory()
    leaves = tree_leaves(made.tensors)
    assert sum(made.memory().values()) == sum(leaf.nbytes for leaf in leaves)
    assert repr(made).replace("'cpu'", "'meta'") == repr(paper)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_most_that_is_held_at_once_by_hand(device):
    x = torch.empty(1000, device=device)

    def call():
        a = x + 1  # 4000 bytes are held
        b = a * 2  # 8000
        del a  # 4000
        c = b.view(10, 100) + b.view(10, 100)  # 8000
        d = c.double()  # 16000
        del b, c  # 8000
        return d.float()  # 12000

    assert peak_bytes(call) == 16000
    assert peak_bytes(lambda: [x + 1 for _ in range(3)]) == 12000
    assert peak_bytes(lambda: x.add_(1).view(10, 100)) == 0


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_step_holds_on_meta_what_it_holds_on_a_cpu(tokens):
    """Models are float32, because a device may compute products of other dtypes in float32."""
    found = []
    for device in ("cpu", "meta"):
        model = v4.patch(small_model().to(device), kv="fp32", precision="reference")
        cache = PagedCache.for_model(model, max_batch_size=2, max_cache_len=300)
        if device == "cpu":
            for request in range(2):
                cache.add(request, 300)
        found.append(peak_bytes(memory._step(model, cache, 2, tokens, 300)))
    assert found[0] == found[1] > 0


def test_steps_hold_as_much_whatever_depth_and_context_and_by_token():
    shallow = memory.config_of(16, num_hidden_layers=3, compress_ratios=[0, 4, 128, 0])
    sizes = [memory.step_bytes(memory.config_of(16), 8, tokens, 131072) for tokens in (256, 512)]
    assert sizes[0] == memory.step_bytes(shallow, 8, 256, 131072)
    assert sizes[0] == memory.step_bytes(shallow, 8, 256, 4096)
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=1e-3)
    assert sizes[0] > 2048 * 4096 * 4 * 2  # the residual streams of 2048 tokens
    assert sizes[0] > 100 * memory.step_bytes(memory.config_of(16), 8, 1, 131072)

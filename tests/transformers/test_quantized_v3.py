"""DeepSeek-V3 in its released precision: FP8 blocks, one of which ends within a layer."""

import copy

import pytest
import torch
import transformers

import dsv4_ops as ops
from dsv4_ops.integrations import transformers as hf
from dsv4_ops.integrations.transformers.architectures.deepseek_v3 import spec
from dsv4_ops.testing.mla_checkpoint import random_model, write_model
from dsv4_ops.testing.models import small_mla_config
from tests.helpers import NIGHTLY
from tests.support.hf_models import first_step
from tests.support.v3_checkpoint import dense_model

PROMPT = torch.arange(20)[None] * 7 % 250
ODD = "model.layers.1.self_attn.kv_a_proj_with_mqa"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return written(tmp_path_factory.mktemp("v3"))


def written(path, **changed):
    """Write a folder; return it and the state of the same model with dequantised values."""
    return path, write_model(path, random_model(**changed))


def logits_of(model, ids, kv):
    """Return logits with a cache: of a prefill, and of the last token as a decode."""
    hf.patch(model, kv=kv, precision="reference" if kv == "fp32" else "serve")
    cache = hf.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
    first = model(ids[:, :-1], cache=cache).logits
    return torch.cat([first, model(ids[:, -1:], cache=cache).logits], 1).double()


def test_a_kv_b_proj_that_ends_within_a_block(tmp_path):
    """Three heads of 192 + 128 rows are 7.5 blocks. ``patch`` stores halves beside the codes;
    prefills that expand contexts multiply by the codes. A replaced scale affects both."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "qk_nope_head_dim": 192}
    made, ids = written(tmp_path, **heads), torch.arange(190)[None] * 7 % 250
    exact = dense_model(*made, torch.float32)(ids).logits.double()
    model = hf.load_quantized(tmp_path)
    found = [logits_of(each, ids, "bf16") for each in (model, dense_model(*made, torch.bfloat16))]
    errors = [(each - exact).norm() / exact.norm() for each in found]
    assert 0 < errors[0] <= 1.5 * errors[1], errors
    name = "model.layers.0.self_attn.kv_b_proj"
    layer = model.get_submodule(name)
    assert (layer.weight.shape[0], layer.weight_scale_inv.shape[0]) == (960, 8)
    layer.weight_scale_inv = torch.nn.Parameter(layer.weight_scale_inv.data * 2)
    made[1][f"{name}.weight"] *= 2
    exact = dense_model(*made, torch.float32)(ids).logits.double()
    cache = hf.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
    again = model(ids, cache=cache).logits.double()
    assert (again - exact).norm() <= 1.5 * errors[1] * exact.norm()


def test_weights_stay_as_loaded(checkpoint):
    """A copy runs by itself, and unpatch leaves no trace."""
    model = hf.load_quantized(checkpoint[0])
    before = {name: (each.shape, each.dtype) for name, each in model.state_dict().items()}
    odd = model.get_submodule(ODD)
    codes = odd.weight.view(torch.uint8).clone()
    assert (odd.weight.shape[0], odd.weight_scale_inv.shape[0]) == (576, 5)
    hf.patch(model)
    assert {name: (each.shape, each.dtype) for name, each in model.state_dict().items()} == before
    assert torch.equal(odd.weight.view(torch.uint8), codes)
    expected = model.generate(PROMPT, max_new_tokens=3, do_sample=False)
    twin = copy.deepcopy(model)
    twin.get_submodule(ODD).weight.data.view(torch.uint8).zero_()
    assert torch.equal(model.generate(PROMPT, max_new_tokens=3, do_sample=False), expected)
    hf.unpatch(model)
    assert {name: (each.shape, each.dtype) for name, each in model.state_dict().items()} == before
    assert not [name for name, _ in model.named_buffers() if "dsv4_ops" in name]


@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_what_a_gpu_goes_by_to_split_kv_b_proj_again(checkpoint, name):
    """On a GPU, steps check if codes or scales changed; on a CPU, each step splits the weight."""
    linear = hf.load_quantized(checkpoint[0]).model.layers[0].self_attn.kv_b_proj
    before = spec._identity(linear)
    assert spec._identity(linear) == before
    linear._parameters[name].zero_()
    assert spec._identity(linear) != before


def test_weights_that_are_loaded_later_count(checkpoint):
    """Later weights are loaded into the same storage, or into another."""
    model = hf.patch(hf.load_quantized(checkpoint[0]))
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    odd = model.get_submodule(ODD)
    before = odd(x)
    codes = {f"{ODD}.weight": odd.weight.detach().view(torch.uint8).flip(0).view(odd.weight.dtype)}
    model.load_state_dict(codes, strict=False)
    found = odd(x)
    assert found.shape == (3, 576)
    assert not torch.equal(found, before)
    hf.decode_step(model, *first_step(model, [7]))
    odd.weight.data = odd.weight.data.clone()
    odd.weight.data.view(torch.uint8)[:] = odd.weight.view(torch.uint8).flip(0)
    hf.decode_step(model, *first_step(model, [7]))
    assert torch.equal(odd(x), before)


@pytest.mark.parametrize("scale", ["pow2", "float32"])
def test_activations_in_fp8(checkpoint, scale):
    """With DeepSeek's scales, and with Hugging Face's, a layer that ends within a block multiplies
    rounded activations by dequantised codes, and rounds once."""
    path, state = checkpoint
    recipe = hf.Recipe.serve(activations="fp8") if scale == "pow2" else "reference"
    model = hf.patch(hf.load_quantized(path), precision=recipe)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = ops.quantize_rows(x, scale=scale, **({} if scale == "pow2" else {"min_amax": 1e-12}))
    rounded = rows.values.double() * rows.scales.double().repeat_interleave(128, 1)
    weight = state[f"{ODD}.weight"].double()
    error = (model.get_submodule(ODD)(x).double() - rounded @ weight.T).abs()
    assert (error <= 2**-8 * (rounded.abs() @ weight.abs().T)).all()
    assert (rounded @ weight.T - x.double() @ weight.T).abs().max() > 2 * error.max()


def refused(model, message):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        hf.patch(model)
    assert message in str(caught.value), caught.value
    assert not hasattr(model, "dsv4_ops_spec")


def test_a_block_of_scale_0_is_zeros(checkpoint):
    """The scale is that of a block of zeros: 0 / 448."""
    model = hf.load_quantized(checkpoint[0])
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight_scale_inv.data[0] = 0.0
    hf.patch(model)
    out = layer(torch.randn(3, 256, dtype=torch.bfloat16))
    assert out[:, :128].count_nonzero() == 0
    assert out[:, 128:].count_nonzero() > 0


def test_blocks_that_end_within_a_row_are_refused(checkpoint):
    model = hf.load_quantized(checkpoint[0])
    odd = model.get_submodule(ODD)
    odd.weight.data = odd.weight.data[:, :200].contiguous()
    refused(model, f"{ODD}.weight must have whole blocks of 128, got [576, 200]")


def test_other_models_are_not_loaded(tmp_path):
    transformers.LlamaConfig().save_pretrained(tmp_path)
    others = "must be one of deepseek_v4, deepseek_v3, deepseek_v2, deepseek_v32, glm_moe"
    with pytest.raises(NotImplementedError, match=others):
        hf.load_quantized(tmp_path)
    small_mla_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must say how weights are quantised, got None"):
        hf.load_quantized(tmp_path)


ADAPTED = (
    "must have no adapter, as it holds codes that count with their scales, got one. Adapt linear "
    "layers only, or load with FineGrainedFP8Config(dequantize=True)."
)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_adapters_of_codes_are_refused(checkpoint, first):
    """Adapters would add to codes without scales, so that an effect of 15 % became 80 %. PEFT
    adapts fused experts through their parameters."""
    peft = pytest.importorskip("peft", reason="needs peft")
    settings = peft.LoraConfig(target_modules=["gate_proj", "up_proj"], init_lora_weights=False)
    model = hf.load_quantized(checkpoint[0])
    name = "layers.1.mlp.experts.gate_up_proj"
    if first:
        peft.get_peft_model(model, settings)
        refused(model, f"patch: model.{name} {ADAPTED}")
        return
    hf.patch(model)
    cache = hf.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
    ids = torch.arange(5)[None]
    want = model(ids, cache=cache).logits
    cache.reset()
    adapters = peft.get_peft_model(model, settings)
    before = [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(cache.tensors)]
    with pytest.raises(NotImplementedError) as raised:
        model(ids, cache=cache)
    assert str(raised.value) == f"model: {name} {ADAPTED}"
    after = torch.utils._pytree.tree_leaves(cache.tensors)
    assert all(torch.equal(*both) for both in zip(before, after, strict=True))
    if NIGHTLY:  # 40 s: adapters break the graph in many places
        with pytest.raises(Exception, match="gate_up_proj must have no adapter"):
            torch.compile(hf.decode_step, backend="eager")(model, *first_step(model, [7]))
    with pytest.raises(NotImplementedError, match="model: gate_up_proj must have no adapter"):
        model(ids)  # without one of our caches
    with adapters.disable_adapter():
        assert torch.equal(model(ids, cache=cache).logits, want)

"""Models in the released precision run our ops, with the results of dequantised weights."""

import copy
import math
import sys
from functools import lru_cache

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="Hugging Face dequantises with it")

import transformers

import dsv4_ops as ops
from dsv4_ops.checkpoint.format import weight_bytes
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.modules import quantized
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.mla_checkpoint import write_mla_checkpoint
from tests.helpers import i32
from tests.oracles.mtp import dequantised_model, float32_model

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROUNDING = 2.0**-8  # of bf16, relative
LENGTH = 132  # past the window, and past an entry of C128
# all experts and entries are selected, so that no choice can flip
FORCED = {**TINY, "num_hash_layers": 4, "index_topk": 64}
QUANTIZED = ("layers.0.self_attn.q_a_proj", "layers.1.self_attn.compressor.indexer.q_b_proj")
QUANTIZED += ("layers.2.self_attn.o_a_proj", "layers.3.mlp.shared_experts.down_proj")
AGAIN = "Load the released checkpoint again; check_checkpoint says what is wrong with a file."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), FORCED)


@pytest.fixture(scope="module")
def exact(tiny):
    return float32_model(tiny)


@pytest.fixture
def loaded(tiny):
    return v4.load_quantized(tiny)


@pytest.fixture(scope="module")
def patched(tiny):
    """Return a model patched with its recipe."""

    @lru_cache
    def make(recipe):
        return v4.patch(v4.load_quantized(tiny), precision=recipe)

    return make


def values(*shape, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(3))).to(BF16)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def quantized_values(x, *, floor, power_of_two):
    """Return float64 values of activations after quantisation in blocks of 128, by definition."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=floor) / 448
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(torch.int32))
    codes = (blocks / scale).clamp(-448, 448).to(E4M3)
    return (codes.double() * scale.double()).flatten(-2)


OFFICIAL = {"floor": 1e-4, "power_of_two": True}


@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_layers_multiply_the_stored_codes(patched, exact, name):
    weight = exact.model.get_submodule(name).weight.double()
    x = values(1, 5, weight.shape[1])
    if name.endswith("o_a_proj"):  # two groups
        weight, x = weight.unflatten(0, (2, 128)), values(1, 5, 2, 2048)
    recipes = {
        v4.Recipe.serve(): x.double(),
        v4.Recipe.serve(activations="fp8"): quantized_values(x, **OFFICIAL),
        v4.Recipe.reference(): quantized_values(x, floor=1e-12, power_of_two=False),
    }
    found = []
    for recipe, inputs in recipes.items():
        module = patched(recipe).model.get_submodule(name)
        found.append(module(x))
        assert torch.equal(module(x[0]), found[-1][0])
        assert found[-1].dtype == BF16
        want = (weight @ inputs[..., None]).squeeze(-1)
        torch.testing.assert_close(found[-1].double(), want, rtol=ROUNDING, atol=1e-4)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def routed(module, x, chosen, weights):
    """Compute experts in float64, with unrounded activations."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for place, expert in enumerate(chosen[token].tolist()):
            if expert < len(module.gate_up_proj):
                both = module.gate_up_proj[expert].double() @ x[token].double()
                gate, up = both.clamp(max=10.0)[:128], both[128:].clamp(-10, 10)
                product = module.down_proj[expert].double() @ (gate * gate.sigmoid() * up)
                out[token] += weights[token, place].double() * product
    return out


def test_experts(patched, exact):
    """The last id is absent: Hugging Face gives it to experts of another rank."""
    x, name = values(4, 256, scale=2.0), "layers.1.mlp.experts"
    chosen = torch.tensor([[0, 7], [3, 3], [2, 5], [6, 8]])
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(4))
    want = routed(exact.model.get_submodule(name), x, chosen, weights)
    found = patched(v4.Recipe.serve()).model.get_submodule(name)(x, chosen, weights)
    assert found.dtype == BF16
    assert error(found, want) < ROUNDING  # rounding of the activations and of the result
    official = patched(v4.Recipe.serve(activations="fp8")).model.get_submodule(name)
    assert ROUNDING < error(official(x, chosen, weights), want) < 0.1


def test_fp8_experts_of_a_base_model(tmp_path, exact):
    small = {**FORCED, "num_hidden_layers": 1, "compress_ratios": [0, 0], "vocab_size": 64}
    path = write_checkpoint(tmp_path, small, family="base")
    model = v4.patch(v4.load_quantized(path))
    module = model.model.layers[0].mlp.experts
    assert module.gate_up_proj.dtype == E4M3
    dequantised = dequantised_model(path)
    x, chosen = values(3, 256), torch.tensor([[0, 7], [3, 3], [2, 5]])
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(4))
    want = routed(dequantised.model.layers[0].mlp.experts, x, chosen, weights)
    assert error(module(x, chosen, weights), want) < ROUNDING


def outputs(model, **given):
    """Return the logits and the outputs of all layers."""
    seen = []
    layers = model.model.layers
    handles = [each.register_forward_hook(lambda *call: seen.append(call[2])) for each in layers]
    ids = torch.randint(2, 512, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    seen.append(model(ids, **given).logits)
    for handle in handles:
        handle.remove()
    return seen


def paged(model):
    cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=LENGTH)
    return outputs(model, cache=cache)


def test_every_layer_is_as_close_as_rounding_allows(patched, exact, tiny):
    """W8A16 and W4A16 are as far from float32 as the same weights in bf16. Quantised activations
    err about as much as a simulation that rounds them in float32."""
    want = outputs(exact)
    rounded = paged(v4.patch(dequantised_model(tiny)))
    got = paged(patched(v4.Recipe.serve()))
    assert len(got) == len(want) == 5
    for ours, bf16, exactly in zip(got, rounded, want, strict=True):
        assert 0 < error(ours, exactly) < 1.5 * error(bf16, exactly)

    def quantise(_, args):
        return (quantized_values(args[0], **OFFICIAL).float(), *args[1:])

    simulated = copy.deepcopy(exact)
    for module in simulated.modules():
        grouped = type(module).__name__ in ("DeepseekV4GroupedLinear", "DeepseekV4Experts")
        linear = type(module) is nn.Linear and not is_plain(module, simulated)
        if grouped or linear:
            module.register_forward_pre_hook(quantise)
    allowed = outputs(simulated)
    got = paged(patched(v4.Recipe.serve(activations="fp8")))
    for ours, simulation, bf16, exactly in zip(got, allowed, rounded, want, strict=True):
        budget = 1.5 * (error(simulation, exactly) + error(bf16, exactly))
        assert error(bf16, exactly) < error(ours, exactly) < budget


def test_a_prefill_projects_codes_that_its_output_was_grouped_into(patched, monkeypatch):
    """The codes equal those that the projection makes from values; a hook on it gets values."""
    given = []

    def project(x, *rest, **settings):
        given.append(x.dtype)
        return ops.fp8_grouped_linear(x, *rest, **settings)

    monkeypatch.setattr(quantized, "fp8_grouped_linear", project)
    model = patched(v4.Recipe.serve(activations="fp8"))
    got = paged(model)
    assert given == [E4M3] * 4
    projection = model.model.layers[2].self_attn.o_a_proj
    handle = projection.register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))
    apart = paged(model)
    handle.remove()
    assert given[4:] == [E4M3, E4M3, BF16, BF16, E4M3]
    paged(patched(v4.Recipe.serve()))
    assert given[9:] == [BF16] * 4
    for one, other in zip(got, apart, strict=True):
        assert torch.equal(one, other)


def is_plain(module, model):
    """Return whether a projection is bf16 in the released checkpoint."""
    plain = [model.lm_head]
    for layer in model.model.layers:
        compressor = layer.self_attn.compressor
        if compressor is not None:
            plain += [compressor.kv_proj, compressor.gate_proj]
            indexer = getattr(compressor, "indexer", None)
            if indexer is not None:
                owner = getattr(indexer, "scorer", indexer)
                plain += [indexer.kv_proj, indexer.gate_proj, owner.weights_proj]
    return any(module is one for one in plain)


def test_three_lines_generate_without_a_hub(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)  # importing it raises
    model = v4.patch(v4.load_quantized(tiny))
    ids = torch.arange(2, 8)[None]
    out = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    for place in range(6, 9):
        cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=16)
        logits = model(out[:, :place], cache=cache).logits
        assert out[0, place] == logits[0, -1].argmax()


def step_of(model, tokens=(5, 6)):
    cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64)
    model(torch.arange(2, 22).view(2, 10), cache=cache)
    starts, lens, rows = i32([0, 1, 2]), i32([11, 11]), i32([0, 1])
    return v4.StepBatch(torch.tensor(tokens), starts, lens, rows), cache


@pytest.mark.nightly("test_fused_projections.py has such a step; test_opcheck traces every op")
def test_inductors_step_and_its_package(tiny, tmp_path):
    model = v4.patch(v4.load_quantized(tiny))
    (batch, cache), (_, other), (_, third) = (step_of(model) for _ in range(3))
    want = v4.decode_step(model, batch, cache.tensors)
    compiled = torch.compile(v4.decode_step, fullgraph=True, dynamic=False)
    assert error(compiled(model, batch, other.tensors), want) < 0.05
    path = v4.export_decode(model, third, path=tmp_path / "decode.pt2")
    run = torch._inductor.aoti_load_package(str(path))
    assert error(run(*v4.decode_inputs(batch, third)), want) < 0.05


def state(model):
    return {name: value.view(torch.uint8).clone() for name, value in model.state_dict().items()}


def test_parameters_stay_as_loaded_and_unpatch_restores_all(loaded):
    before, names = state(loaded), [dict(vars(module)) for module in loaded.modules()]
    names = [{**held, "_buffers": dict(held["_buffers"])} for held in names]
    v4.patch(loaded)
    now = state(loaded)
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)
    v4.unpatch(loaded)
    after = [dict(vars(module)) for module in loaded.modules()]
    for old, new in zip(names, after, strict=True):
        assert old.keys() == new.keys()
        assert old["_buffers"].keys() == new["_buffers"].keys()
        assert not any("dsv4_ops" in name for name in new["_non_persistent_buffers_set"])


def test_weights_take_what_the_table_says(loaded):
    held = {value.data_ptr(): value.nbytes for value in loaded.state_dict().values()}
    assert sum(weight_bytes(FORCED).values()) == sum(held.values())


def test_scales_are_the_models_own(loaded):
    """A scale that is written in place, loaded or replaced has effect in the next step."""
    v4.patch(loaded)
    layer = loaded.model.layers[0].self_attn.kv_proj
    x = values(2, 256)
    once = layer(x)
    doubled = layer.weight_scale_inv.view(torch.uint8) + 1
    layer.weight_scale_inv.view(torch.uint8).copy_(doubled)
    assert torch.equal(layer(x), 2 * once)
    again = (doubled + 1).view(torch.float8_e8m0fnu)
    layer.weight_scale_inv = nn.Parameter(again, requires_grad=False)
    step_of(loaded)
    assert torch.equal(layer(x), 4 * once)
    copied = copy.deepcopy(loaded)
    copied.model.layers[0].self_attn.kv_proj.weight_scale_inv.view(torch.uint8).copy_(doubled)
    step_of(copied)
    assert torch.equal(copied.model.layers[0].self_attn.kv_proj(x), 2 * once)
    assert torch.equal(layer(x), 4 * once)


def test_adapters_of_peft_add_to_quantised_layers(loaded):
    peft = pytest.importorskip("peft", reason="needs peft")
    names = r".*\.(q_b_proj|kv_proj|down_proj)"
    settings = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    v4.patch(loaded)
    x = values(3, 256)
    kept = loaded.model.layers[0].self_attn.kv_proj
    base = kept(x)
    peft.get_peft_model(loaded, settings)
    adapted = loaded.model.layers[0].self_attn.kv_proj
    assert adapted.base_layer is kept
    down, up = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    added = adapted.scaling["default"] * (x.float() @ down.float().mT @ up.float().mT)
    assert added.std() > 0.01
    torch.testing.assert_close(adapted(x).float(), base.float() + added, rtol=2e-2, atol=2e-2)
    batch, cache = step_of(loaded)
    assert v4.decode_step(loaded, batch, cache.tensors).isfinite().all()


def test_adapters_train_in_front_of_frozen_codes(patched, exact):
    for name, shape in (("q_a_proj", (3, 256)), ("o_a_proj", (3, 2, 2048))):
        models = patched(v4.Recipe.serve()), exact
        layer, weight = (each.model.layers[0].self_attn.get_submodule(name) for each in models)
        with torch.enable_grad():
            ours, exactly = (values(*shape).float().requires_grad_() for _ in range(2))
            (out := layer(ours)).square().sum().backward()
            weight(exactly).square().sum().backward()
        assert error(ours.grad, exactly.grad) < 2 * ROUNDING
        assert layer.weight.grad is None
        assert out.shape == layer(ours.detach()).shape == (*shape[:-1], out.shape[-1])


def refused(model, kind, message):
    forwards = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(kind) as raised:
        v4.patch(model)
    assert str(raised.value) == f"patch: {message}"
    assert [dict(vars(module)) for module in model.modules()] == forwards


SCALE = "model.layers.1.self_attn.q_b_proj.weight_scale_inv"


def bytes_of(*shape):
    return torch.full(shape, 120, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("value", "kind", "rule"),
    [
        (bytes_of(1, 32), ValueError, "have the shape [32, 1], got [1, 32]. It is transposed."),
        (bytes_of(32, 2), ValueError, f"have the shape [32, 1], got [32, 2]. {AGAIN}"),
        (None, ValueError, f"come with the checkpoint's codes, got None. {AGAIN}"),
        (bytes_of(32, 1).to(BF16), TypeError, "be torch.float8_e8m0fnu or torch.uint8 or "
         f"torch.float32, got torch.bfloat16. {AGAIN}"),
        (bytes_of(32, 1).fill_(255), ValueError, "hold bytes of 0 to 254, as 255 is NaN, "
         f"got 32 other values. {AGAIN}"),
    ],
    ids=["transposed", "shape", "none", "dtype", "NaN"],
)  # fmt: skip
def test_wrong_scales_are_refused(loaded, value, kind, rule):
    layer = loaded.model.layers[1].self_attn.q_b_proj
    if value is not None:
        value = nn.Parameter(value, requires_grad=False)
        value._is_hf_initialized = True
    layer._parameters["weight_scale_inv"] = value
    refused(loaded, kind, f"{SCALE} must {rule}")


WRONG = {
    E4M3: ("codes of numbers, got NaN (0x7F or 0xFF)", (0x7F, 0xFF)),
    torch.float8_e8m0fnu: ("bytes of 0 to 254, as 255 is NaN, got 1 other values", (255,)),
    torch.float32: ("finite numbers of 0 or more, got 1 other values", (math.nan, math.inf,
     -math.inf, -1e-30)),
}  # fmt: skip


def test_what_is_no_number_is_refused_in_every_weight(loaded, tmp_path):
    """NaN codes of both signs, byte 255 of scales, and V3's float32 scales that are not finite or
    are negative, which no amax is; all FP4 codes are numbers."""
    path = write_checkpoint(
        tmp_path,
        {**FORCED, "num_hidden_layers": 1, "compress_ratios": [0, 0], "vocab_size": 64},
        family="base",
    )
    v3 = tmp_path / "v3"
    v3.mkdir()
    write_mla_checkpoint(v3)
    # V3: five projections per attention, three in a dense block, experts, and a shared one
    for folder, count in ((None, None), (path, None), (v3, 2 * (2 * 5 + 3 + 2 + 3))):
        model = loaded if folder is None else v4.load_quantized(folder)
        weights = {
            name: weight
            for name, weight in model.named_parameters()
            if weight.dtype in WRONG and (weight.dtype != torch.float32 or "_scale_inv" in name)
        }
        assert any(weight.dim() == 3 for weight in weights.values())
        assert count in (None, len(weights))
        for name, weight in weights.items():
            rule, others = WRONG[weight.dtype]
            held = weight.data if weight.dtype == torch.float32 else weight.data.view(torch.uint8)
            held = held.view(-1)[weight.numel() // 2 :][:1]
            for value in others:
                kept, held[:] = held.clone(), value
                refused(model, ValueError, f"{name} must hold {rule}. {AGAIN}")
                held[:] = kept
        v4.patch(model)


def test_a_scale_that_the_file_lacks_is_refused(tiny, tmp_path, monkeypatch):
    """Hugging Face warns, and fills the scale with whatever memory holds."""
    from dsv4_ops.integrations.transformers.loading import quantized as loading
    from tests.test_checkpoint import changed

    path = write_checkpoint(tmp_path / "one", FORCED, shards=2)
    changed(path, "layers.1.attn.wq_b.scale", None)
    with pytest.raises(ValueError, match=r"^check_checkpoint: path must hold layers\.1\.attn\.wq"):
        v4.load_quantized(path)
    monkeypatch.setattr(loading, "check_checkpoint", lambda *_, **__: ("", "", "fp4"))
    with loading._any_environment():
        model = transformers.DeepseekV4ForCausalLM.from_pretrained(path)
    lacks = f"{SCALE} must come with the checkpoint's codes, got no such tensor in it. {AGAIN}"
    refused(model, ValueError, lacks)


def test_other_uses_of_these_classes_are_refused(loaded):
    layer = loaded.model.layers[0].self_attn.q_a_proj
    name = "model.layers.0.self_attn.q_a_proj"
    advice = "Load it with FineGrainedFP8Config(dequantize=True)."
    for setting, value, message in (
        ("activation_scheme", "static", "must be 'dynamic', got 'static'"),
        ("bias", torch.nn.Parameter(torch.zeros(64)), "must be None, got a Parameter"),
        ("swiglu_alpha", 1.5, "must be None, got 1.5"),
    ):
        before = getattr(layer, setting, None)
        setattr(layer, setting, value)
        refused(loaded, NotImplementedError, f"{name}.{setting} {message}. {advice}")
        setattr(layer, setting, before)


def test_a_config_that_does_not_name_its_experts_loads(tmp_path):
    """Pro's config names no format; Hugging Face takes its experts for FP8."""
    config = {**FORCED, "num_hidden_layers": 1, "compress_ratios": [0, 0], "vocab_size": 64}
    del config["expert_dtype"]
    model = v4.load_quantized(write_checkpoint(tmp_path, config))
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.int8


def test_a_path_is_a_folder(tmp_path):
    """Hugging Face would look on its hub for a path that is no folder."""
    (tmp_path / "file").touch()
    for path in ("deepseek-ai/none", tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"^load_quantized: path must be a folder, got '.*'"):
            v4.load_quantized(path)

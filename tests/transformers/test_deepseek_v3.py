"""Patched DeepSeek-V3, V2 and Kimi-K2 against Hugging Face's, in float32: equal logits for every
split of requests into steps, with absorbed queries and with expanded contexts."""

import io
from copy import deepcopy
from functools import lru_cache
from random import Random

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

from dsv4_ops.attention import MlaSpec
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.steps import padded, step as step_module
from dsv4_ops.testing.models import MLA_YARN, small_dsa_model, small_mla_model
from tests.helpers import Called, i32, nightly
from tests.support import hf_models
from tests.support.hf_models import Engine, run_randomly, text
from tests.transformers.test_deepseek_v32 import CLOSE, LENGTH, REQUESTS, same_logits, tokens

KIMI = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
VARIANTS = {
    "V3": (3, {}),
    "Kimi-K2": (3, KIMI),
    "halves rotated": (3, {"rope_interleave": False}),
    "no YaRN": (3, {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
    "cosines scaled": (3, {"rope_parameters": {**MLA_YARN, "mscale": 0.7}}),
    "odd sizes": (3,
     {"kv_lora_rank": 40, "v_head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 3,
     "attention_bias": True}),
    "V2": (2, {}),
    "V2-Lite": (2, {"q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 2}),
}  # fmt: skip


@pytest.fixture
def expands(monkeypatch):
    """Let prefills of any size expand their contexts."""
    monkeypatch.setattr(MlaSpec, "break_even", 0)


@lru_cache
def stock(name="V3"):
    version, changed = VARIANTS[name]
    return small_mla_model(version, **changed)


@lru_cache
def reference(name="V3"):
    version, changed = VARIANTS[name]
    return v4.patch(small_mla_model(version, **changed), kv="fp32", precision="reference")


@lru_cache
def expected(name="V3"):
    return stock(name)(tokens()).logits


def new_cache(model=None, **sizes):
    given = {"max_batch_size": REQUESTS, "max_cache_len": LENGTH, **sizes}
    return v4.PagedCache.for_model(model or reference(), **given)


def called_by(run):
    with Called() as called:
        run()
    return called.names


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.usefixtures("expands")
def test_variants_with_expanded_contexts(name):
    """There are several chunks, because the workspace holds 64 rows of a cache of 384."""
    model = reference(name)
    with pytest.MonkeyPatch.context() as small:
        module = "dsv4_ops.integrations.transformers.architectures.deepseek_v3.spec"
        small.setattr(f"{module}.mla_workspace_rows", lambda **sizes: 64)
        engine = run_randomly(Engine(model, new_cache(model, num_blocks=6), tokens()), Random(3))
    scale = max(1.0, float(expected(name).std()))
    assert engine.worst(expected(name)) < CLOSE * scale


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_with_absorbed_contexts(name):
    """Calls as in Hugging Face: a prompt, a chunk after it, then single tokens."""
    model, cache = reference(name), new_cache(reference(name))
    parts = [slice(0, 20), slice(20, 37), *(slice(at, at + 1) for at in range(37, 42))]
    got = torch.cat([model(tokens()[:, part], cache=cache).logits for part in parts], 1)
    assert expected(name).std() > 0.5
    scale = max(1.0, float(expected(name).std()))
    torch.testing.assert_close(got, expected(name)[:, :42], rtol=0, atol=CLOSE * scale)
    assert cache.seq_lens.tolist() == [42] * REQUESTS


def test_contexts_are_absorbed_below_the_break_even():
    """This model breaks even at 64 tokens per request: fewer run one kernel, 64 or more expand."""
    assert reference().dsv4_ops_spec.layers.break_even == 64
    cache = new_cache(max_cache_len=200)
    for length, expanded in ((1, False), (63, False), (64, True)):
        ids = tokens()[:1, :length]
        names = called_by(lambda ids=ids: reference()(ids, cache=cache))
        assert ("mla_prefill" in names) == expanded
        assert ("context_chunks" in names) == expanded
        assert "mla_insert_kv" in names


def test_one_step_serves_all_layers():
    engine = Engine(reference(), new_cache(), tokens())
    names = called_by(lambda: engine.decode({0: 1, 1: 2}))
    assert names.count("mla_decode") == 3
    assert names.count("token_map") == 1
    assert "mla_prefill" not in names


def errors_of(model, want):
    """Return the relative errors of a prefill's logits, and of later decodes'."""
    cache, errors = new_cache(model), []
    for part in (slice(0, 60), *(slice(at, at + 1) for at in range(60, LENGTH))):
        got = model(tokens()[:, part], cache=cache).logits
        errors.append(got.double() - want[:, part])
    parts = errors[0], torch.cat(errors[1:], 1)
    return [float(part.square().mean().sqrt() / want.std()) for part in parts]


@pytest.mark.parametrize("context", ["absorbed", "expanded"])
def test_queries_in_codes(context, request):
    """Against Hugging Face's model in float64, codes of queries add a quarter to the error of codes
    of rows (docs/transformers.md), but not with expanded keys; the scale of a layer matters."""
    changed = {"first_k_dense_replace": 3}
    want = small_mla_model(**changed).double()(tokens()).logits
    if context == "expanded":
        request.getfixturevalue("expands")
    plain, coded = (v4.patch(small_mla_model(**changed), kv="fp8", query=q) for q in (None, "fp8"))
    assert set(coded.state_dict()) == set(plain.state_dict())
    with Called() as called:
        found, codes = errors_of(plain, want), errors_of(coded, want)
    dtypes = {dtype for name, dtype in called.dtypes if name == "mla_decode"}
    assert dtypes == {torch.bfloat16, torch.float8_e4m3fn}
    if context == "absorbed":
        assert found[0] < codes[0] < 1.6 * found[0]
    else:
        assert codes[0] == found[0]
    assert found[1] < codes[1] < 1.6 * found[1]
    assert codes[1] < 0.3
    for attention in (layer.self_attn for layer in coded.model.layers):
        attention.dsv4_ops_q_scale.fill_(2**-12)  # values above 0.11 saturate
    assert errors_of(coded, want)[1] > 2 * codes[1]
    v4.unpatch(coded)
    assert not any("dsv4_ops" in name for name, _ in coded.named_buffers())


def test_queries_in_codes_are_one_graph_after_a_cast():
    """``model.to`` also casts buffers, such as scales."""
    made = small_mla_model(num_hidden_layers=1)
    model = v4.patch(made, kv="fp8", query="fp8").to(torch.bfloat16)
    counter, engines = CompileCounterWithBackend("eager"), []
    for step in (v4.decode_step, torch.compile(v4.decode_step, fullgraph=True, backend=counter)):
        engine = Engine(model, new_cache(model), tokens())
        engine.prefill({0: 9, 1: 30, 2: 4})
        for _ in range(3):
            engine.decode(dict.fromkeys(range(REQUESTS), 1), step=step)
        engines.append(engine)
    assert counter.frame_count == 1
    assert same_logits(*engines)


@pytest.mark.parametrize("model", ["absorbed", "expanded", "V4", "GLM-5"])
@pytest.mark.parametrize("step", [v4.prefill_step, v4.decode_step])
def test_adversarial_batches_touch_no_one_else(model, step, request, monkeypatch):
    """Absent rows, ids of padding and lengths beyond the cache are counted, but not read; other
    requests keep their bits. Eager CPU steps, which may read values, would refuse the batch."""
    if model == "expanded":
        request.getfixturevalue("expands")
    patched, want = reference(), expected()
    if model == "V4":
        patched, want = hf_models.reference(), hf_models.expected()
    elif model == "GLM-5":
        patched = v4.patch(small_dsa_model(model), kv="fp32", precision="reference")
        want = small_dsa_model(model)(tokens()).logits
    monkeypatch.setattr(step_module, "values_are_free", lambda *tensors: False)
    monkeypatch.setattr(padded, "may_wait", lambda tensor: False)
    outs = []
    for adversarial in (False, True):
        cache = new_cache(patched, max_batch_size=2, max_cache_len=160)
        engine = Engine(patched, cache, text())
        length = 130 if model == "V4" else 30
        engine.prefill({0: length, 1: 20})
        batch = v4.StepBatch(
            torch.tensor([int(text()[0, length]), -5, 2**40, 3]),
            i32([0, 1, 2, 4]),
            i32([length + 1, 2**31 - 1 if adversarial else 0, -9]),
            i32([0, 7 if adversarial else -1, -(2**31)]),
        )
        got = step(patched, batch, cache)
        assert got.isfinite().all()
        torch.testing.assert_close(got[0], want[0, length], rtol=0, atol=1e-4)
        engine.decode({1: 1})
        assert engine.worst(want) < 1e-4
        assert (int(cache.tensors.dropped) > 0) == adversarial
        kept = [leaf for leaf in tree_leaves(cache.tensors) if leaf is not cache.tensors.dropped]
        outs.append([got[0], *(leaf.clone() for leaf in kept)])
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))


def test_weights_that_change_are_absorbed_again():
    """Weights change in place or are loaded at the same addresses; copies have their own."""
    model = v4.patch(small_mla_model(), kv="fp32", precision="reference")
    places = [buffer.data_ptr() for name, buffer in model.named_buffers() if "w_u" in name]
    copy, file = deepcopy(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = small_mla_model(seed=1)
    model.load_state_dict(other.state_dict())
    for each, want in (
        (model, other(tokens()[:, :12]).logits),
        (copy, expected()[:, :12]),
        (torch.load(file, weights_only=False), expected()[:, :12]),
    ):
        got = each(tokens()[:, :12], cache=new_cache(each)).logits
        torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)
    assert places == [buffer.data_ptr() for name, buffer in model.named_buffers() if "w_u" in name]


@pytest.mark.parametrize("inference", [False, True])
def test_weights_that_change_uncounted_are_absorbed_on_a_cpu(inference):
    """Some code loads weights by ``weight.data`` or NumPy, which torch does not notice."""
    with torch.inference_mode(inference):  # outside of this mode nothing may write to its tensors
        model = v4.patch(small_mla_model(), kv="fp32", precision="reference")
        model(tokens()[:, :12], cache=new_cache(model))
    other = small_mla_model(seed=1).state_dict()
    for name, weight in model.state_dict().items():
        weight.numpy()[...] = other[name]
    got = model(tokens()[:, :12], cache=new_cache(model)).logits
    want = small_mla_model(seed=1)(tokens()[:, :12]).logits
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_is_cast_after_patching(dtype):
    cast = v4.patch(small_mla_model(), kv="fp32", precision="reference").to(dtype)
    patched = v4.patch(small_mla_model().to(dtype), kv="fp32", precision="reference")
    got, want = (m(tokens()[:, :12], cache=new_cache(m)).logits for m in (cast, patched))
    assert torch.equal(got, want)


def test_a_model_of_the_released_rope_is_cast_to_float16():
    """Low frequencies, 3e-6, are subnormal in float16: the cast changes them by up to 1 percent."""
    model = small_mla_model(num_hidden_layers=1, qk_rope_head_dim=64).half()
    frequencies = model.model.rotary_emb.inv_freq.float()
    assert frequencies.min() < torch.finfo(torch.float16).smallest_normal / 16
    v4.patch(model, kv="bf16", precision="reference")
    model.model.rotary_emb.inv_freq[-1] *= 1.1
    with pytest.raises(ValueError, match=r"model.rotary_emb must be that of"):
        model(tokens()[:, :3], cache=new_cache(model))


def test_a_model_may_be_made_on_a_device_that_rounds_differently():
    """With YaRN's factor 40, frequencies computed on a GPU differ by several units in the last
    place."""
    model = small_mla_model(num_hidden_layers=1)
    model.model.rotary_emb.inv_freq *= 1 + 40 * torch.finfo(torch.float32).eps
    v4.patch(model, kv="fp32", precision="reference")


@pytest.mark.parametrize("mode", ["regional", *nightly("regional steps", "whole")])
def test_weights_that_change_are_absorbed_by_compiled_steps(mode):
    sizes = {"num_hidden_layers": 2}
    model = v4.patch(small_mla_model(**sizes), kv="fp32", precision="reference")
    step = v4.compile_step(model, v4.prefill_step, mode=mode, backend="eager")
    ids, lens, rows = tokens()[0, :5], torch.tensor([5]).int(), torch.tensor([0]).int()
    batch = v4.StepBatch(ids, torch.tensor([0, 5]).int(), lens, rows)
    for seed in range(2):
        other = small_mla_model(seed=seed, **sizes)
        model.load_state_dict(other.state_dict())
        got = step(batch, new_cache(model))[0]
        want = other(ids[None]).logits[0, -1]
        torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)


def test_a_changed_kv_b_proj_is_refused():
    """Steps read the module's weight, and would ignore a hook or an adapter."""
    model = v4.patch(small_mla_model(), kv="fp32", precision="reference")
    cache, attention = new_cache(model), model.model.layers[1].self_attn
    handle = attention.kv_b_proj.register_forward_hook(lambda *_: None)
    name = "model.layers.1.self_attn.kv_b_proj must be Hugging Face's own as patch saw it"
    with pytest.raises(NotImplementedError, match=rf"{name}.*got a hook"):
        model(tokens()[:, :3], cache=cache)
    handle.remove()
    attention.kv_b_proj = nn.Sequential(attention.kv_b_proj)
    with pytest.raises(NotImplementedError, match=rf"^model: {name}.*got Sequential"):
        model(tokens()[:, :3], cache=cache)
    v4.unpatch(model)
    with pytest.raises(NotImplementedError, match=rf"^patch: {name}.*got Sequential"):
        v4.patch(model)


@pytest.mark.parametrize("changed", [{}, KIMI, {"norm_topk_prob": False}])
def test_the_router_is_an_op(changed):
    """The op equals Hugging Face's router, which still runs if gradients are needed."""
    model = small_mla_model(n_routed_experts=16, num_experts_per_tok=4, **changed)
    gate = model.model.layers[1].mlp.gate
    gate.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    gate.e_score_correction_bias.data = torch.linspace(-0.2, 0.2, 16)
    hidden = torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(1))
    logits, weights, ids = gate(hidden)
    v4.patch(model, kv="fp32")
    with Called() as called:
        found = gate(hidden)
    assert called.names == ["grouped_topk"]
    torch.testing.assert_close(found[0], logits)
    order, others = ids.argsort(1), found[2].argsort(1)
    assert torch.equal(found[2].gather(1, others), ids.gather(1, order))
    torch.testing.assert_close(found[1].gather(1, others), weights.gather(1, order))
    with torch.enable_grad(), Called() as called:
        gate(hidden.requires_grad_())[1].square().sum().backward()
    assert called.names == []
    assert hidden.grad.abs().sum() > 0

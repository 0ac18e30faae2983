"""Uses of a patched Hugging Face model: patching, saving, copying, training, and calls without a
``PagedCache``. ``test_calls.py`` has calls with one."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures import FAMILIES
from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.testing import models
from dsv4_ops.testing.models import MLA_YARN, small_config, small_dsa_model, small_model
from tests.helpers import nightly
from tests.support.hf_models import expected, new_cache, stock, text

CLOSE = 1e-5
LENGTH = 12


def ids(rows=2):
    return text()[:rows, :LENGTH]


def cache_of(model=None, **sizes):
    return new_cache(model, **{"max_batch_size": 2, "max_cache_len": 64, **sizes})


def patched(**settings):
    return v4.patch(small_model(), **{"kv": "fp32", "precision": "reference", **settings})


def test_save_and_load(tmp_path):
    """A patched model is saved like any other; the loaded model is not patched."""
    model = patched()
    model.save_pretrained(tmp_path)
    assert not any("dsv4" in path.read_text() for path in tmp_path.glob("*.json"))
    settings = {"experts_implementation": "batched_mm", "attn_implementation": "eager"}
    loaded = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, **settings).eval()
    torch.testing.assert_close(model.state_dict(), loaded.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="model must be patched"):
        v4.unpatch(loaded)
    torch.testing.assert_close(loaded(ids()).logits, stock()(ids()).logits, rtol=0, atol=CLOSE)
    v4.patch(loaded, kv="fp32", precision="reference")
    got = loaded(ids(), cache=cache_of(loaded)).logits
    torch.testing.assert_close(got, expected()[:2, :LENGTH], rtol=0, atol=CLOSE)


def test_a_forward_that_an_instance_had_before():
    """Other tools replace forwards on instances; these forwards still run, in copies as well."""
    model, calls = small_model(), []

    def forward(self, *args, **rest):
        calls.append(self)
        return type(self).forward(self, *args, **rest)

    model.model.forward = MethodType(forward, model.model)
    hf = model.model.forward
    v4.patch(model, kv="fp32", precision="reference")
    copy = deepcopy(model)
    copy(ids())
    model(ids())
    assert [id(self) for self in calls] == [id(copy.model), id(model.model)]
    v4.unpatch(model)
    assert model.model.forward == hf


@pytest.mark.parametrize("cache", ["none", "dynamic", "use_cache"])
@pytest.mark.parametrize("precision", ["serve", *nightly("that of serving", "reference")])
def test_calls_without_our_cache(cache, precision):
    model, tokens = patched(precision=precision), text()[:2, :140]
    if cache == "none":
        got = model(tokens, use_cache=False).logits
    else:
        given = transformers.DynamicCache(config=model.config) if cache == "dynamic" else None
        out = model(tokens[:, :130], cache=given, use_cache=True)
        assert type(getattr(out, cache_argument())) is transformers.DynamicCache
        later = model(tokens[:, 130:], cache=getattr(out, cache_argument()))
        got = torch.cat([out.logits, later.logits], 1)
    want = expected()[:2, :140]
    # relative to the largest logit: CPUs add in different orders
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE * float(want.abs().max()))


def changed(make=small_model, **fields):
    model = make()
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def with_factor(factor):
    model = small_model()
    model.config.rope_parameters["compress"]["attention_factor"] = factor
    return model


def llama():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=1, **sizes))


def compiled():
    return torch.compile(small_model())


MLA, V32, GLM = models.small_mla_model, small_dsa_model, partial(small_dsa_model, "GLM-5")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
OTHER_YARN = {**MLA_YARN, "rope_theta": 20000.0}
EXACT = {"kv": "fp32", "precision": "reference"}
CAUSAL = "model must be a DeepseekV4ForCausalLM"
LOAD = r"Load it first: transformers.AutoModelForCausalLM.from_pretrained\("
UNKNOWN = NotImplementedError
ARCHITECTURES = " or ".join(map(repr, FAMILIES))
REFUSED = {
    "patched": (patched, {}, ValueError, "model must not be patched yet, got a patched one"),
    "architecture": (llama, {}, UNKNOWN, f"model_type must be {ARCHITECTURES}, got llama"),
    "no model": (lambda: None, {}, TypeError, f"model must be a model, got a NoneType. {LOAD}path"),
    "name": (lambda: "a/V3", {}, TypeError, f"model must be a model, got its name. {LOAD}'a/V3'"),
    "folder": (lambda: Path("V3"), {}, TypeError, f"model must .* got its name. {LOAD}'V3'"),
    "class": (lambda: transformers.DeepseekV3ForCausalLM, {}, TypeError,
     f"model must be a model, got a class. {LOAD}path"),
    "compiled": (compiled, {}, TypeError, f"{CAUSAL}, got OptimizedModule. Compile it once it is"),
    "base model": (lambda: small_model().model, {}, TypeError, f"{CAUSAL}, got DeepseekV4Model"),
    "configuration": (small_config, {}, TypeError, f"model must .*a DeepseekV4Config. {LOAD}path"),
    "layer types": (lambda: changed(layer_types=["sliding_attention", "linear_attention",
     "full_attention"]), {}, UNKNOWN,
     "config.layer_types must hold only .*, got 'full_attention', 'linear_attention'"),
    "head_dim": (lambda: small_model(head_dim=128), {}, UNKNOWN, "kv must .*got 'fp8' with head_d"),
    "index_head_dim": (lambda: small_model(index_head_dim=64), {"kv": "fp32"}, UNKNOWN,
     "config.index_head_dim must be 128, got 64"),
    "rope": (lambda: with_factor(1.25), {}, UNKNOWN,
     ".* 'yarn' with attention_factor 1.0, got {.*"),
    "kv": (small_model, {"kv": "int8"}, ValueError, "kv must be 'fp8' or .* got 'int8'"),
    "precision": (small_model, {"precision": "fast"}, ValueError, "precision must be .*'fast'"),
    "impl": (small_model, {"impl": "cutlass"}, ValueError, "impl must be 'auto' or .* 'cutlass'"),
    "FlashMLA without its layout": (small_model, {"kv": "bf16", "impl": "flash_mla"}, UNKNOWN,
     "kv must be 'fp8' for impl 'flash_mla', got 'bf16'"),
    "FlashMLA with splits of its own": (lambda: small_model(head_dim=512),
     {"impl": "flash_mla", "batch_invariant": True}, UNKNOWN,
     "batch_invariant must be False for impl 'flash_mla', got True"),
    "a query of V4": (small_model, {"query": "fp8"}, UNKNOWN, "query must be None for DeepSeek-V4"),
    "V3: experts": (lambda: MLA(experts_implementation="eager"), {}, UNKNOWN,
     "experts_impl.* no graph, got 'eager'"),
    "V3: rope": (lambda: changed(MLA, rope_parameters=DYNAMIC), {}, UNKNOWN,
     ".*'llama3', got 'dynamic'"),
    "V3: buffers": (lambda: changed(MLA, rope_parameters=OTHER_YARN), {}, ValueError,
     "model.rotary_emb mus"),
    "V3: 656 bytes": (MLA, {"kv": "ds_fp8"}, UNKNOWN, "kv must .*unless kv_lora_rank is 5"),
    "V3: kv": (MLA, {"kv": "int8"}, ValueError, "kv must .*'ds_fp8' or .*, got 'int8'"),
    "V3: query": (MLA, {"query": "int8"}, ValueError, "query must be 'fp8', got 'int8'"),
    "V3: a query of other rows": (MLA, {"query": "fp8", "kv": "bf16"}, ValueError,
     "query must be None with kv 'bf16', got 'fp8'"),
    "V3: float32 by our kernels": (MLA, {"kv": "fp32", "impl": "triton"}, UNKNOWN,
     "impl must be 'auto' or 'reference' with torch.float32, got 'triton'"),
    "V3: library": (MLA, {"impl": "deep_gemm"}, UNKNOWN, "impl must .*, got 'deep_gemm'"),
    "V3: another head": (lambda: MLA().model, {}, TypeError, "model must be a Deepseek.*V3"),
    "V3.2: keys": (lambda: changed(V32, index_head_dim=64), EXACT, UNKNOWN,
     "config.index_head_dim must be 128, got"),
    "V3.2: rows": (V32, {**EXACT, "kv": "fp8"}, UNKNOWN,
     "kv must be 'bf16' or 'fp32' unless kv_lora_rank is 512"),
    "GLM-5: kv": (GLM, {"kv": "ds_fp8"}, ValueError, "kv must be 'fp8' or .*, got 'ds_fp8'"),
    "GLM-5: query": (GLM, {**EXACT, "query": "fp8"}, UNKNOWN,
     "query must be None for glm_moe_dsa"),
    "GLM-5: a layer before all indexers": (
     lambda: changed(GLM, indexer_types=["shared", "full", "full"]), EXACT, ValueError,
     "config.indexer_types must begin with 'full'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_patch_refuses(case):
    make, settings, error, message = REFUSED[case]
    model = make()
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    before = [dict(vars(module)) for module in modules]
    with pytest.raises(error, match=f"^patch: {message}"):
        v4.patch(model, **settings)
    assert [dict(vars(module)) for module in modules] == before


def test_an_unpatched_model_is_refused():
    model, cache = small_model(), cache_of()
    for call, message in (
        (lambda: v4.unpatch(model), "unpatch: .*, got an unpatched DeepseekV4ForCausalLM. There"),
        (lambda: v4.unpatch(None), "unpatch: model must be patched, got a NoneType. There is"),
        (lambda: cache_of(model),
         "PagedCache.for_model: .*, got an unpatched DeepseekV4Fo.*. Call"),
        (lambda: model(ids(), **{cache_argument(): cache}),
         "PagedCache: .* patched, got an unpatched one. Call pa"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
    assert not cache.seq_lens.any()


def test_a_head_dim_that_fp8_does_not_have():
    model = small_model(head_dim=128)
    want = model(ids()).logits
    v4.patch(model, kv="fp32", precision="reference")
    got = model(ids(), cache=cache_of(model)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["serve", *nightly("that of serving", "reference")])
@torch.enable_grad()
def test_gradients_are_hugging_faces(precision, checkpointing):
    grads = []
    for settings in (None, {"kv": "fp32", "precision": precision}):
        model = small_model().requires_grad_(True).train()
        if settings:
            v4.patch(model, **settings)
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids(), labels=ids(), use_cache=False).loss.backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
    own, ours = grads
    assert sum(grad is not None for grad in own.values()) > 40
    for name, grad in own.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-3, atol=1e-6, msg=name)


@torch.enable_grad()
def test_weights_that_require_gradients_run_from_our_cache():
    """Steps run in training mode, too, and without ``no_grad``."""
    model = patched().requires_grad_(True).train()
    out = model(ids(), cache=cache_of(model), labels=ids())
    want = stock()(ids(), labels=ids())
    torch.testing.assert_close(out.logits, want.logits, rtol=0, atol=CLOSE)
    torch.testing.assert_close(out.loss, want.loss, rtol=0, atol=CLOSE)
    cache = getattr(out, cache_argument())
    assert not any(leaf.requires_grad for leaf in tree_leaves((cache.seq_lens, cache.tensors)))

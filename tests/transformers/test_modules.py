"""Modules that users change in a patched model: hooks, adapters and other forwards run as in
Hugging Face's model, before and after ``patch``, or steps refuse them."""

import io
import pickle
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.modules.replacement import is_linear
from dsv4_ops.testing.models import small_config, small_mla_model, small_model
from tests.helpers import nightly
from tests.support.hf_models import Engine, expected, new_cache, text

CLOSE, LENGTH = 3e-5, 24
COMPRESSOR = "model.layers.{}.self_attn.compressor"
PROJECTIONS = [
    *[f"{COMPRESSOR.format(n)}.{name}" for n in (1, 2) for name in ("kv_proj", "gate_proj")],
    *[f"{COMPRESSOR.format(1)}.indexer.{name}" for name in ("kv_proj", "gate_proj")],
]
CALLED = [
    *PROJECTIONS, "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.norm",
    "model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.self_attn.kv_norm",
    "model.layers.1.self_attn.o_a_proj", "model.layers.2.self_attn.q_b_proj",
    "model.layers.2.attn_hc",
]  # fmt: skip
SKIPPED = [
    "self_attn.q_b_norm", "self_attn.compressor", "self_attn.compressor.kv_norm",
    "self_attn.compressor.indexer", "self_attn.compressor.indexer.kv_norm",
    "self_attn.compressor.indexer.scorer", "self_attn.compressor.indexer.rotary_emb",
]  # fmt: skip


class LoraLinear(nn.Module):
    """A projection plus an adapter."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        generator = torch.Generator().manual_seed(len(base_layer.weight))
        down = torch.randn(2, base_layer.weight.shape[1], generator=generator)
        self.down = nn.Parameter(down / down.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.randn(len(base_layer.weight), 2, generator=generator))

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.mT @ self.up.mT


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def doubled(_module, _args, out):
    """A hook that doubles the first result."""
    return 2 * out if isinstance(out, torch.Tensor) else (2 * out[0], *out[1:])


def hooked(model):
    for name in CALLED:
        place = 1 if name.endswith("mlp.gate") else 0  # routers' logits are not used

        def hook(_module, _args, out, place=place):
            if isinstance(out, torch.Tensor):
                return 1.5 * out
            return tuple(1.5 * one if i == place else one for i, one in enumerate(out))

        model.get_submodule(name).register_forward_hook(hook)


def adapted(model):
    for name in (*PROJECTIONS, "lm_head", "model.layers.1.self_attn.o_b_proj"):
        model.set_submodule(name, LoraLinear(model.get_submodule(name)))


def replaced(model):
    """Replace linear layers by layers with a bias, and forwards on instances."""
    for name in [*PROJECTIONS, "lm_head"]:
        old = model.get_submodule(name)
        new = nn.Linear(old.in_features, old.out_features)
        new.weight = old.weight
        new.bias.copy_(torch.linspace(-1, 1, old.out_features))
        model.set_submodule(name, new)
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda x: 3 * type(norm).forward(norm, x)


def parametrized(model):
    names = [*PROJECTIONS, "lm_head", "model.layers.1.mlp.gate", "model.layers.2.self_attn.kv_norm"]
    for name in [*names, COMPRESSOR.format(1) + ".kv_norm"]:
        module = model.get_submodule(name)
        nn.utils.parametrize.register_parametrization(module, "weight", Double())
    layer = model.model.layers[1].self_attn
    nn.utils.parametrize.register_parametrization(layer, "sinks", Double())
    nn.utils.parametrize.register_parametrization(layer.compressor, "position_bias", Double())


def run(model):
    tokens = text()[:2, :LENGTH]
    cache = new_cache(model, max_batch_size=2, max_cache_len=64)
    first = model(tokens[:, :-1], cache=cache).logits
    starts, ends, rows = ([0, 1, 2], [LENGTH] * 2, [0, 1])
    ints = (torch.tensor(each, dtype=torch.int32) for each in (starts, ends, rows))
    last = v4.decode_step(model, v4.StepBatch(tokens[:, -1], *ints), cache.tensors)
    return torch.cat([first, last[:, None]], 1)


@pytest.mark.parametrize("precision", ["serve", *nightly("that of serving", "reference")])
@pytest.mark.parametrize("change", [hooked, adapted, replaced, parametrized])
def test_what_is_in_a_models_modules_runs(change, precision):
    stock = small_model()
    change(stock)
    want = stock(text()[:2, :LENGTH]).logits
    assert (want - expected()[:2, :LENGTH]).abs().max() > 0.1
    close = CLOSE * max(1.0, float(want.std()))
    for first in (True, False):
        model = small_model()
        if first:
            change(model)
        v4.patch(model, kv="fp32", precision=precision)
        if not first:
            change(model)
        torch.testing.assert_close(run(model), want, rtol=0, atol=close)
        if change is replaced and not first and precision == "serve":
            before = [dict(vars(module)) for module in model.modules()]
            rule = "unpatch: forward of DeepseekV4RMSNorm must be the one that patch set"
            with pytest.raises(ValueError, match=f"^{rule}, got a .*. Take off first what was"):
                v4.unpatch(model)
            assert [dict(vars(module)) for module in model.modules()] == before
            continue
        v4.unpatch(model)
        got = model(text()[:2, :LENGTH]).logits
        torch.testing.assert_close(got, want, rtol=0, atol=close)


def test_adapters_of_peft():
    peft = pytest.importorskip("peft", reason="needs peft")
    names = "kv_proj|gate_proj|lm_head|q_b_proj|down_proj|weights_proj"
    settings = peft.LoraConfig(
        r=4, target_modules=rf".*\.({names})|lm_head", init_lora_weights=False
    )
    logits = []
    for order in ("stock", "before", "after"):
        torch.manual_seed(0)
        model = small_model()
        if order == "after":
            v4.patch(model, kv="fp32", precision="serve")
        adapters = peft.get_peft_model(model, settings).eval()
        if order == "before":
            v4.patch(adapters.get_base_model(), kv="fp32", precision="serve")
        if order == "stock":
            logits.append(adapters(text()[:2, :LENGTH]).logits)
        else:
            logits.append(run(adapters.get_base_model()))
            cache = new_cache(model, max_batch_size=2, max_cache_len=64)
            got = adapters(text()[:2, :LENGTH], cache=cache).logits
            torch.testing.assert_close(got, logits[0], rtol=0, atol=CLOSE)
            cache = new_cache(model, max_batch_size=2, max_cache_len=64)
            batch = Engine(model, cache, text()).batch({0: 1})
            with pytest.raises(TypeError, match=r"Pass model.get_base_model\(\)\.$"):
                v4.decode_step(adapters, batch, cache.tensors)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=CLOSE)
    torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=CLOSE)
    with pytest.raises(TypeError, match=r"got PeftModel. Pass model.get_base_model\(\)\.$"):
        v4.patch(peft.get_peft_model(small_model(), settings))


def test_which_linears_are_products():
    plain = nn.Linear(2, 2, bias=False)
    assert is_linear(plain)
    assert not is_linear(nn.Linear(2, 2))
    assert not is_linear(LoraLinear(plain))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_linear(plain)
    handle.remove()
    assert is_linear(plain)
    plain.register_forward_pre_hook(lambda *_: None)
    assert not is_linear(plain)


def refuses(model, message, error=NotImplementedError):
    """Check that every kind of step refuses the model before anything is written."""
    cache = v4.PagedCache(
        small_config(), max_batch_size=2, max_cache_len=64, kv="fp32", precision="reference"
    )
    tensors = tree_leaves((cache.seq_lens, cache.tensors))
    before = [tensor.clone() for tensor in tensors]
    engine = Engine(model, cache, text())
    batch = engine.batch({0: 3, 1: 2})
    calls = {
        "decode_step": lambda: v4.decode_step(model, batch, cache.tensors),
        "prefill_step": lambda: v4.prefill_step(model, batch, cache.tensors),
        "model": lambda: model(text()[:2, :3], cache=cache),
    }
    for op, call in calls.items():
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == f"{op}: {message}"
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))


def patched():
    return v4.patch(small_model(), kv="fp32", precision="reference")


@pytest.mark.parametrize("name", SKIPPED)
def test_hooks_where_ops_do_the_work_are_refused(name):
    model, want = patched(), expected()[:2, :LENGTH]
    handle = model.get_submodule(f"model.layers.1.{name}").register_forward_hook(lambda *_: None)
    refuses(
        model,
        f"model.layers.1.{name} must be Hugging Face's own as patch saw it, without hooks, as ops "
        "do its work, got a hook. Undo that, or pass Hugging Face's cache.",
    )
    torch.testing.assert_close(model(text()[:2, :LENGTH]).logits, want, rtol=0, atol=CLOSE)
    handle.remove()
    torch.testing.assert_close(run(model), want, rtol=0, atol=CLOSE)


def test_other_modules_where_ops_do_the_work_are_refused():
    model = patched()
    compressor = model.model.layers[2].self_attn.compressor
    norm, start = compressor.kv_norm, "model.layers.2.self_attn"
    rest = (
        "must be Hugging Face's own as patch saw it, without hooks, as ops do its work, got {}. "
        "Undo that, or pass Hugging Face's cache."
    )
    compressor.kv_norm = nn.RMSNorm(512)
    refuses(model, f"{start}.compressor.kv_norm {rest.format('RMSNorm')}")
    compressor.kv_norm = norm
    norm.forward = lambda x: x
    refuses(model, f"{start}.compressor.kv_norm {rest.format('a forward of its own')}")
    del norm.forward
    model = small_model()
    model.model.layers[2].self_attn.forward = lambda x, **_: (x, None)
    v4.patch(model, kv="fp32", precision="reference")
    refuses(model, f"{start} {rest.format('a forward of its own')}")


def test_hooks_of_the_model_run_where_it_is_called():
    model, tokens = patched(), text()[:2, :LENGTH]
    handle = model.model.norm.register_forward_hook(doubled)
    want = model(tokens).logits
    handle.remove()
    seen = []
    handle = model.model.register_forward_hook(lambda *args: seen.append(args))
    cache = new_cache(model, max_batch_size=2, max_cache_len=64)
    model(tokens, cache=cache)
    assert len(seen) == 1
    cache = new_cache(model, max_batch_size=2, max_cache_len=64)
    batch = Engine(model, cache, text()).batch({0: 1})
    for step in (v4.decode_step, v4.prefill_step):
        with pytest.raises(NotImplementedError, match=r"model\.model must have no hooks"):
            step(model, batch, cache.tensors)
    handle.remove()
    model.model.norm.register_forward_hook(doubled)
    got = model(tokens, cache=new_cache(model, max_batch_size=2, max_cache_len=64)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)


ONE_DEVICE = "Load the model on one device, without offloading, and make its cache there."
DEVICES = ["embed_tokens", "layers.0", "layers.2", "norm", "rotary_emb", "hc_head"]


@pytest.mark.parametrize("force_hooks", [True, *nightly("hooks", False)])
def test_models_of_accelerate(force_hooks, tmp_path):
    """Models on one device run; models that are split or offloaded are refused."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    on_disk = {"lm_head": "cpu", **{f"model.{name}": "cpu" for name in DEVICES}}
    on_disk["model.layers.1"] = "disk"
    settings = {"main_device": "cpu", "offload_dir": tmp_path, "force_hooks": force_hooks}
    refusal = (
        "model.layers.1.self_attn must have no hook of accelerate that loads weights or sends "
        f"inputs, got AlignDevicesHook. {ONE_DEVICE}"
    )
    for devices in ({"": "cpu"}, on_disk):
        model = accelerate.dispatch_model(small_model(), devices, **settings)
        later = accelerate.dispatch_model(patched(), devices, **settings)
        if devices is on_disk:
            refuses(later, refusal)
            with pytest.raises(NotImplementedError) as raised:
                v4.patch(model)
            assert str(raised.value) == f"patch: {refusal}"
        else:
            v4.patch(model, kv="fp32", precision="serve")
            for each in (model, later):
                torch.testing.assert_close(run(each), expected()[:2, :LENGTH], rtol=0, atol=CLOSE)


def test_weights_elsewhere_are_refused():
    model = small_model()
    model.model.layers[2].to("meta")
    with pytest.raises(NotImplementedError) as raised:
        v4.patch(model)
    assert str(raised.value) == f"patch: model must be on one device, got cpu, meta. {ONE_DEVICE}"
    model = patched()
    model.model.layers[2].to("meta")
    message = f"model.layers.2.self_attn must be on the cache's device, cpu, got meta. {ONE_DEVICE}"
    refuses(model, message, ValueError)


@pytest.mark.parametrize("impl", ["triton", "flash_mla", "deep_gemm"])
def test_executions_of_a_gpu_are_refused_at_the_first_step(impl):
    """A user may move a model after ``patch``."""
    model = v4.patch(small_model(), impl=impl)
    cache = new_cache(model, max_batch_size=2, max_cache_len=64)
    with pytest.raises(RuntimeError, match=f"^model: impl must be 'auto' or .*, got '{impl}'"):
        model(text()[:2, :3], cache=cache)
    assert not cache.seq_lens.any()


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [saved, lambda model: pickle.loads(pickle.dumps(model)), deepcopy]
)
@pytest.mark.parametrize("precision", ["serve", *nightly("that of serving", "reference")])
def test_copies_run_their_own_weights(copied, precision):
    model = v4.patch(small_model(), kv="fp32", precision=precision)
    copy = copied(model)
    for weight in model.parameters():
        weight.zero_()
    want = expected()[:2, :LENGTH]
    torch.testing.assert_close(run(copy), want, rtol=0, atol=CLOSE)
    assert not run(model).any()
    out = copy.generate(text()[:1, :5], max_new_tokens=2, do_sample=False)
    v4.unpatch(copy)
    torch.testing.assert_close(copy(text()[:2, :LENGTH]).logits, want, rtol=0, atol=CLOSE)
    own = copy.generate(text()[:1, :5], max_new_tokens=2, do_sample=False)
    assert torch.equal(out, own)
    names = {name for module in copy.modules() for name in vars(module)}
    assert names == {name for module in small_model().modules() for name in vars(module)}
    assert v4.unpatch(model) is model  # undoing the copy did not change the original


def test_a_streamer_cannot_unpatch_its_model():
    model = v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32")
    streamer = SimpleNamespace(put=lambda _: v4.unpatch(model), end=lambda: None)
    with pytest.raises(ValueError, match=r"^unpatch: model must not be generating, got a call ins"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, streamer=streamer)
    assert v4.unpatch(model) is model

"""``patch`` decides on the host what a module is; traces read neither names nor functions, which a
tracer may show differently. Users' wrappers run or are refused, in eager and compiled steps."""

import ast
import functools
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import dsv4_ops
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.modules.replacement import class_of, defining_class
from dsv4_ops.integrations.transformers.steps.export import DecodeModule
from dsv4_ops.testing.models import SPARSE, small_mla_model, small_model
from tests.helpers import nightly
from tests.support.hf_models import Engine, new_cache, text
from tests.support.ranks import run_ranks

FAMILIES = {
    "v4": functools.partial(small_model, layer_types=[SPARSE], mlp_layer_types=["moe"]),
    "v3": functools.partial(small_mla_model, num_hidden_layers=1, first_k_dense_replace=0),
}
"""Models with few layers, whose steps compile in seconds."""
V3_AND_NIGHTLY_V4 = ["v3", *nightly("the same of V3", "v4")]
LENGTH, CLOSE = 24, 1e-4
SETTINGS = {"kv": "fp32", "precision": "reference"}
STATE = "must be Hugging Face's own as patch saw it, without hooks, as ops do its work"


def modelling(model):
    """Return Hugging Face's file with the class of a model."""
    kind = model.config.model_type
    return getattr(transformers.models, kind).__dict__[f"modeling_{kind}"]


def cache_of(model):
    return new_cache(model, max_batch_size=2, max_cache_len=64)


def last_logits(model, step=v4.decode_step, cache=None, **compiled):
    """Return logits of the last of 24 tokens of two requests, by a decode step."""
    if compiled:
        step = torch.compile(v4.decode_step, backend="eager", **compiled)
    cache = cache or cache_of(model)
    engine = Engine(model, cache, text()[:2])
    engine.prefill({0: LENGTH - 1, 1: LENGTH - 1})
    engine.decode({0: 1, 1: 1}, step=step)
    return torch.stack([engine.logits[request][LENGTH - 1] for request in (0, 1)])


def stock_logits(model):
    return model(text()[:2, :LENGTH]).logits[:, -1]


def steps(model):
    """Return an eager and a compiled decode step, as functions without arguments."""
    return (lambda: last_logits(model)), (lambda: last_logits(model, fullgraph=True))


def check_steps(model, want, atol=CLOSE):
    for logits in steps(model):
        torch.testing.assert_close(logits(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("family", V3_AND_NIGHTLY_V4)
def test_names_that_a_tracer_shows_do_not_count(family, monkeypatch):
    """If a forward is decorated, Dynamo of torch 2.15 shows the wrapper's names."""
    model = FAMILIES[family]()
    want = stock_logits(model)
    v4.patch(model, **SETTINGS)
    for kind in {type(module) for module in model.modules()}:
        forward = vars(kind).get("forward")
        if forward is not None and kind.__module__.startswith("transformers."):
            for name in ("__module__", "__qualname__", "__name__"):
                monkeypatch.setattr(forward, name, "transformers.utils.deprecation")
    check_steps(model, want)


def exported(model):
    """Export the module behind ``export_decode``, strictly."""
    cache = cache_of(model)

    def step(_, batch, tensors):
        inputs = v4.decode_inputs(batch, cache)
        program = torch.export.export(DecodeModule(model, cache), inputs, strict=True)
        return program.module()(*v4.decode_inputs(batch, cache))

    return last_logits(model, step, cache)


@pytest.mark.parametrize("family", V3_AND_NIGHTLY_V4)
def test_a_strict_export_is_another_way_into_a_trace(family):
    """test_compile_step.py and test_dynamo.py test the other ones."""
    model = FAMILIES[family]()
    want = stock_logits(model)
    v4.patch(model, **SETTINGS)
    torch.testing.assert_close(exported(model), want, rtol=0, atol=CLOSE)


def test_no_trace_reads_a_name_or_a_functions_identity():
    """The exceptions are functions that run on the host: what ``patch`` calls, and cache keys."""
    host = {"defining_class", "is_library_method", "_unbound", "_package_of", "_is_of_class"}
    host |= {"_is_accelerates"}
    host_files = {"precompiled.py", "kernel_files.py", "compiled.py", "calls.py"}
    names = {"__module__", "__qualname__", "__func__", "__code__", "__wrapped__", "__globals__"}
    package = Path(dsv4_ops.__file__).parent
    traced = ("attention", "checkpoint", "core", "dispatch", "integrations/transformers", "ops")
    traced += ("reference",)
    found, files = [], 0
    for path in (file for folder in traced for file in sorted((package / folder).rglob("*.py"))):
        if path.name in host_files:
            continue
        files += 1
        tree = ast.parse(path.read_text())
        skipped = {
            inner
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name in host
            for inner in ast.walk(function)
        }
        for node in ast.walk(tree):
            if node in skipped:
                continue
            if isinstance(node, ast.Attribute) and node.attr in names:
                found.append(f"{path.name}:{node.lineno} {node.attr}")
            if isinstance(node, ast.Compare):
                inside = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
                found += [
                    f"{path.name}:{node.lineno} compares a name"
                    for each in inside
                    if each.attr == "__name__"
                ]
    assert files > 60
    # on the host: patch's check of rotary embeddings, criteria of generate, options of a step
    allowed = {"rotary.py", "draft_generation.py", "decoding.py"}
    assert [each for each in found if each.split(":")[0] not in allowed] == []


def test_the_class_of_a_module_is_that_of_its_forward():
    model = FAMILIES["v4"]()
    attention = model.model.layers[0].self_attn
    assert class_of(attention) is None
    assert defining_class(attention) == "DeepseekV4Attention"
    assert defining_class(nn.Linear(2, 2)) is None

    class Inherits(type(attention)):
        pass

    class Overrides(type(attention)):
        def forward(self, x):
            return x

    attention.__class__ = Inherits
    assert defining_class(attention) == "DeepseekV4Attention"
    attention.__class__ = Overrides
    assert defining_class(attention) is None
    patched = v4.patch(FAMILIES["v4"](), **SETTINGS)
    assert class_of(patched.model.layers[0].self_attn.compressor) == "DeepseekV4CSACompressor"
    v4.unpatch(patched)
    assert class_of(patched.model.layers[0].self_attn.compressor) is None


def doubled(forward):
    """Decorate a function as users do."""

    @functools.wraps(forward)
    def wrapper(*args, **rest):
        return 2 * forward(*args, **rest)

    return wrapper


@pytest.mark.parametrize(
    ("family", "first"), [("v3", False), *nightly("test_modules.py", ("v4", True))]
)
def test_a_wrapper_around_an_instances_forward_runs(family, first):
    """The wrapper is around a module that steps call, before or after patch; test_modules.py has
    both orders for eager steps."""
    stock = FAMILIES[family]()
    plain = stock_logits(stock)
    model = FAMILIES[family]()
    for each in (stock, model):
        if each is model and not first:
            v4.patch(model, **SETTINGS)
        for layer in each.model.layers:
            norm = layer.post_attention_layernorm
            norm.forward = doubled(norm.forward)
    if first:
        v4.patch(model, **SETTINGS)
    want = stock_logits(stock)
    assert (want - plain).abs().max() > 0.05
    check_steps(model, want)


@pytest.mark.parametrize(("family", "precision"), [("v4", "reference"), ("v3", "serve")])
def test_a_wrapper_around_a_classes_forward_runs(family, precision, monkeypatch):
    """A module that steps call is wrapped before patch; functools.wraps copies names."""
    model = FAMILIES[family]()
    plain = stock_logits(model)
    norm = type(model.model.norm)
    monkeypatch.setattr(norm, "forward", doubled(norm.forward))
    want = stock_logits(model)
    assert (want - plain).abs().max() > 0.05
    v4.patch(model, kv="fp32", precision=precision)
    if family == "v3":
        check_steps(model, want, 5e-4)
        return
    for logits in steps(model):  # kv_norm is in the compressor, which ops replace
        with pytest.raises(Exception, match=r"compressor\.kv_norm must be Hugging Face's own"):
            logits()


def test_a_wrapper_around_a_class_that_ops_stand_for_is_refused(monkeypatch):
    """All steps refuse a class wrapped before patch; an eager step refuses one wrapped later."""
    compressor = "DeepseekV4CSACompressor"
    before, after = FAMILIES["v4"](), v4.patch(FAMILIES["v4"](), **SETTINGS)
    kind = getattr(modelling(before), compressor)
    monkeypatch.setattr(kind, "forward", doubled(kind.forward))
    v4.patch(before, **SETTINGS)
    name = f"model.layers.0.self_attn.compressor {STATE}, got"
    for logits in steps(before):
        with pytest.raises(Exception, match=f"{name} {compressor}"):
            logits()
    with pytest.raises(NotImplementedError, match=f"^prefill_step: {name} another forward of its"):
        last_logits(after)


def test_a_class_that_ops_stand_for_may_be_disabled(monkeypatch):
    model = FAMILIES["v4"]()
    want = stock_logits(model)
    kind = modelling(model).DeepseekV4CSACompressor
    monkeypatch.setattr(kind, "forward", torch._dynamo.disable(kind.forward))
    v4.patch(model, **SETTINGS)
    check_steps(model, want)


def dispatched(model):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    return accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def skipped(model):
    """Return a module whose work ops do, and its name."""
    attention = model.model.layers[0].self_attn
    if model.config.model_type == "deepseek_v3":
        return attention.kv_b_proj, "model.layers.0.self_attn.kv_b_proj"
    return attention.compressor.kv_norm, "model.layers.0.self_attn.compressor.kv_norm"


@pytest.mark.nightly("test_modules.py has them in eager steps")
@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_accelerate_compile(first):
    model = FAMILIES["v3"]()
    want = stock_logits(model)
    if not first:
        v4.patch(model, **SETTINGS)
    model = dispatched(model)
    if first:
        v4.patch(model, **SETTINGS)
    logits = last_logits(model, fullgraph=False)
    torch.testing.assert_close(logits, want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("family", V3_AND_NIGHTLY_V4)
@pytest.mark.parametrize("order", ["wpd", "wdp", "pwd", "pdw", "dwp", "dpw"])
def test_a_wrapper_above_or_below_a_hook_of_accelerate_is_refused(family, order):
    """Every order of wrapping, patching and dispatching is refused, if ops do the module's work."""
    model, error = FAMILIES[family](), None
    for action in order:
        if action == "d":
            model = dispatched(model)
        elif action == "w":
            module, name = skipped(model)
            module.forward = doubled(module.forward)
        else:
            try:
                v4.patch(model, **SETTINGS)
            except NotImplementedError as refused:
                error = str(refused)
                break
    if error is None:
        with pytest.raises(NotImplementedError) as raised:
            last_logits(model)
        error = str(raised.value)
    assert f"{name} {STATE}, got a forward of its own." in error


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_derived_from_accelerates_is_refused(family):
    hooks = pytest.importorskip("accelerate.hooks", reason="needs accelerate")

    class Doubles(hooks.AlignDevicesHook):
        def post_forward(self, module, output):
            return 2 * output

    model = v4.patch(FAMILIES[family](), **SETTINGS)
    module, name = skipped(model)
    hooks.add_hook_to_module(module, Doubles(execution_device="cpu"))
    with pytest.raises(NotImplementedError, match=f"{name} {STATE}, got a forward of its own"):
        last_logits(model)


@pytest.mark.parametrize("first", [True, *nightly("test_modules.py", False)])
def test_adapters_of_peft_compile(first):
    """The model is V3; test_compile_step.py has V4 with an adapter."""
    peft = pytest.importorskip("peft", reason="needs peft")
    settings = peft.LoraConfig(
        r=4, target_modules=r".*\.(q_b_proj|o_proj|o_b_proj)|lm_head", init_lora_weights=False
    )
    torch.manual_seed(0)
    stock = FAMILIES["v3"]()
    plain = stock_logits(stock)
    want = stock_logits(peft.get_peft_model(stock, settings).eval())
    assert (want - plain).abs().max() > 0.1
    torch.manual_seed(0)
    model = FAMILIES["v3"]()
    if not first:
        v4.patch(model, **SETTINGS)
    model = peft.get_peft_model(model, settings).eval().get_base_model()
    if first:
        v4.patch(model, **SETTINGS)
    check_steps(model, want, 2 * CLOSE)


AGAIN = "Call unpatch, change the configuration with the layers, and patch again."


def removed(model):
    count = len(model.model.layers)
    del model.model.layers[0]
    return f"model.layers must be the {count} of the configuration, got {count - 1}. {AGAIN}"


def replaced(model):
    model.model.layers[0] = FAMILIES[model.config.model_type[-2:]]().model.layers[0]
    new = type(model.model.layers[0].self_attn).__name__
    return f"model.layers.0.self_attn must be one that patch saw, got a new {new}. {AGAIN}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [removed, replaced])
def test_other_layers_than_patch_saw_are_refused(family, change):
    model = v4.patch(FAMILIES[family](), **SETTINGS)
    cache = cache_of(model)
    batch = Engine(model, cache, text()).batch({0: 1})
    message = change(model)
    calls = {
        "decode_step": lambda: v4.decode_step(model, batch, cache),
        "prefill_step": lambda: v4.prefill_step(model, batch, cache),
        "model": lambda: model(text()[:1, :3], cache=cache),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match="must be") as raised:
            call()
        assert str(raised.value) == f"{op}: {message}"
    if change is removed:
        v4.unpatch(model)
        with pytest.raises(ValueError, match="must be") as raised:
            v4.patch(model, **SETTINGS)
        assert str(raised.value) == f"patch: {message}"


def sharded(rank):
    """Return logits of a V4 whose layers FSDP2 shards over two ranks, and errors of other uses."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model, errors = v4.patch(FAMILIES["v4"](), **SETTINGS), []
    for layer in model.model.layers:
        fully_shard(layer)
    logits = last_logits(model)
    fully_shard(model)
    old, latent = (v4.patch(make(), **SETTINGS) for make in FAMILIES.values())
    cpu = torch.device("cpu")
    old.model.layers[0] = FullyShardedDataParallel(old.model.layers[0], device_id=cpu)
    fully_shard(latent.model.layers[0])
    for each in (model, old, latent):
        with pytest.raises(NotImplementedError) as raised:
            last_logits(each)
        errors.append(str(raised.value))
    return logits, errors


def test_layers_of_fsdp(tmp_path):
    want = stock_logits(FAMILIES["v4"]())
    for logits, errors in run_ranks(2, sharded, tmp_path):
        torch.testing.assert_close(logits, want, rtol=0, atol=CLOSE)
        assert errors == [
            "prefill_step: model must have no hooks, nor a forward of its own, as they are not "
            "called, got one. Call the model itself with cache=cache, or remove them.",
            "prefill_step: model.layers.0.self_attn must have parameters of its own, got none. "
            "FSDP1 keeps them in one flat tensor: load with Hugging Face's tp_plan instead.",
            f"prefill_step: model.layers.0.self_attn.kv_b_proj {STATE}, got a bias, or a split "
            "weight. Undo that, or pass Hugging Face's cache.",
        ]

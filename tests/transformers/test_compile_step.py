"""``compile_step``: one graph for each kind of layer, at any depth, and a file of these graphs."""

import copy
import zipfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from dsv4_ops.core.torch_compat import SizeGuards
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.compile_cache import precompiled
from dsv4_ops.integrations.transformers.steps import compiled
from dsv4_ops.testing.models import HEAVY, SLIDING, SPARSE, small_mla_model, small_model
from tests.helpers import NIGHTLY, nightly
from tests.support.hf_models import Engine, first_step, new_cache, reference, text

KINDS = [SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY]


def compiled_step(step):
    return lambda _, batch, cache: step(batch, cache)


OF_A_KIND = {"num_hidden_layers": 2, "first_k_dense_replace": 0}


@pytest.mark.parametrize("hooked", [[0, 1], *nightly("both of them", [1])])
def test_hooks_are_of_their_layer_and_refused_where_ops_do_the_work(hooked):
    """Both layers are of one kind; a layer's hooks run for that layer, and not for the other."""
    model = v4.patch(small_mla_model(**OF_A_KIND), kv="fp32", precision="reference")
    step = v4.compile_step(model, mode="regional", backend="eager")
    batch, _ = first_step(model, (7, 9))

    def results():
        return [run(first_step(model, (7, 9))[1]) for run in (ours, eager)]

    ours, eager = partial(step, batch), partial(v4.decode_step, model, batch)
    projection = model.model.layers[1].self_attn.kv_b_proj
    handle = projection.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="got a hook"):
        results()
    handle.remove()
    assert torch.equal(*results())
    for layer in hooked:
        model.model.layers[layer].mlp.register_forward_hook(lambda *call: call[2] * 0.1)
    assert torch.equal(*results())


@pytest.mark.parametrize("small", [small_model, small_mla_model])
def test_a_prefill_norms_the_last_tokens_alone(small):
    """A prefill of two requests and padding norms 3 tokens, but a decode step norms all 7."""
    model, rows = v4.patch(small(), kv="fp32", precision="reference"), []
    model.model.norm.register_forward_hook(lambda *call: rows.append(call[2].shape[-2]))
    ours, every = (Engine(model, new_cache(model), text()) for _ in range(2))
    last = v4.prefill_step(model, ours.batch({0: 5, 1: 2}, padding=1), ours.cache)
    found = v4.decode_step(model, every.batch({0: 5, 1: 2}), every.cache)
    assert rows == [3, 7]
    torch.testing.assert_close(last[:2], found[[4, 6]])


def test_small_models_are_one_graph():
    """Unknown steps, modes and models are refused."""
    assert not v4.compile_step(reference()).regional
    assert v4.compile_step(reference(), mode="regional").regional
    for arguments, message in (
        ({"mode": "layers"}, "mode must be 'auto' or 'whole' or 'regional', got 'layers'"),
        ({"step": max}, "step must be decode_step or prefill_step, got max"),
    ):
        with pytest.raises(ValueError, match=f"^compile_step: {message}"):
            v4.compile_step(reference(), **arguments)
    with pytest.raises(ValueError, match=r"^compile_step: model must be patched"):
        v4.compile_step(small_model(layer_types=[SLIDING]))


def test_what_a_trace_refuses_is_said_as_by_the_step():
    model = v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")
    step = v4.compile_step(model, mode="whole", dynamic=True, backend="eager")
    step(*first_step(model))
    model.model.layers[0].self_attn.scaling = 3.0
    with pytest.raises(ValueError, match=r"^decode_step: model.layers.0.self_attn.scaling must"):
        step(*first_step(model))
    model = copy.deepcopy(reference())  # a copy, because other tests share the original
    model.set_experts_implementation("eager")
    with pytest.raises(NotImplementedError, match=r"^compile_step: experts_implementation must"):
        v4.compile_step(model, mode="regional", backend="eager")(*first_step(model))


def test_a_place_without_a_file_is_refused_before_anything_is_compiled(tmp_path):
    for place in (tmp_path, tmp_path / "missing" / "step.cache"):
        message = "^compile_step: cache_file must be a file, or the name for one in a folder"
        with pytest.raises(ValueError, match=message):
            v4.compile_step(reference(), cache_file=place)


@pytest.mark.parametrize("mode", ["whole", "regional"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("step", [v4.decode_step, v4.prefill_step])
def test_other_objects_are_refused_as_by_the_step(tmp_path, mode, kept, step):
    """The error comes from ``compile_step`` itself, not from Dynamo during a trace."""
    file = {"cache_file": tmp_path / "step.cache"} if kept else {}
    run, name = v4.compile_step(reference(), step, mode=mode, **file), step.__name__
    cache = new_cache()
    batch = Engine(reference(), cache, text()).batch({0: 1})
    for other in (None, "cache", torch.zeros(2)):
        with pytest.raises(TypeError, match=f"^{name}: cache must be a PagedCache, got "):
            run(batch, other)
        with pytest.raises(TypeError, match=f"^{name}: batch must be a StepBatch, got "):
            run(other, cache)
    with pytest.raises(TypeError, match=rf"^{name}: batch.tokens must be torch.int64, got "):
        run(replace(batch, tokens=batch.tokens.int()), cache)
    assert run.parts == {}
    for other, message in (("kept", "kept must be an argument of the step"), ("state_rings", None)):
        if message is None and step is v4.decode_step:
            message = "state_rings must be a bool, got int"
        with pytest.raises(TypeError, match=f"^{name}: {message or other}"):
            run(batch, cache, **{other: 3})


@pytest.fixture
def parts(monkeypatch):
    """Store parts by name, and run them uncompiled; record which were compiled and loaded."""
    made = {"compiled": [], "loaded": []}

    def compile_one(function, args, settings):
        made["compiled"].append(function.__code__.co_name)
        return part(function), function.__code__.co_name.encode()

    def load_one(content, names, place):
        made["loaded"].append(content.decode())
        return part(compiled.part_named(content.decode()))

    def part(function):
        return precompiled.Part(function, SizeGuards("True", {}))

    monkeypatch.setattr(compiled, "compiled", compile_one)
    monkeypatch.setattr(compiled, "loaded", load_one)
    return made


def test_a_file_has_a_part_for_every_kind_of_layer(tmp_path, parts):
    """Six layers are seven parts. The next step loads all from the file, and Dynamo sees none."""
    names = [
        "metadata", "window_DeepseekV4HashRouter", "c4_DeepseekV4HashRouter",
        "c128_DeepseekV4TopKRouter", "c4_DeepseekV4TopKRouter", "norm", "head",
    ]  # fmt: skip
    counters.clear()
    file = {"cache_file": tmp_path / "step.cache"}
    for start in ("compiled", "loaded"):
        mlps, announced = ["hash_moe"] * 3 + ["moe"] * 3, []
        model = small_model(layer_types=KINDS, mlp_layer_types=mlps)
        model = v4.patch(model, kv="fp32", precision="serve")
        step = v4.compile_step(model, mode="regional", on_part=announced.append, **file)
        engines = [Engine(model, new_cache(model), text()) for _ in range(2)]
        for engine in engines:
            engine.prefill({0: 9, 1: 3})
        written = None
        for _ in range(3):  # the second and third step run the parts of the first
            engines[0].decode({0: 1, 1: 1}, step=compiled_step(step))
            engines[1].decode({0: 1, 1: 1})
            assert parts[start] == names
            assert list(step.parts) == announced == names
            written = written or (tmp_path / "step.cache").stat().st_mtime_ns
            assert written == (tmp_path / "step.cache").stat().st_mtime_ns
        leaves = (torch.utils._pytree.tree_leaves(engine.cache.tensors) for engine in engines)
        assert all(torch.equal(ours, eager) for ours, eager in zip(*leaves, strict=True))
        for ours, eager in zip(*(engine.logits for engine in engines), strict=True):
            assert all(torch.equal(ours[place], eager[place]) for place in ours)
    assert parts["compiled"] == names
    assert counters["stats"]["unique_graphs"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step.cache"]


def test_a_part_is_for_what_it_was_compiled_for(tmp_path, parts):
    """Other sizes or another model need other parts, but new weights of the same form do not."""

    def ran(step, engine, tokens):
        before = len(parts["compiled"]), len(parts["loaded"])
        engine.prefill({0: tokens}, step=compiled_step(step))
        return parts["compiled"][before[0] :], parts["loaded"][before[1] :]

    kinds = {"layer_types": [SLIDING], "mlp_layer_types": ["moe"]}
    model = v4.patch(small_model(**kinds), kv="fp32", precision="reference")
    settings = {"mode": "regional", "cache_file": tmp_path / "step.cache"}
    step = v4.compile_step(model, v4.prefill_step, **settings)
    engine = Engine(model, new_cache(model), text())
    layer = "window_DeepseekV4TopKRouter"
    assert ran(step, engine, 3) == (["metadata", layer, "norm", "head"], [])
    assert ran(step, engine, 3) == ([], [])
    assert ran(step, engine, 2) == (["metadata", layer, "norm"], [])
    gate = model.model.layers[0].mlp.gate
    gate.weight = torch.nn.Parameter(gate.weight.clone(), requires_grad=False)
    assert ran(step, engine, 3) == ([], [])
    gate.weight = torch.nn.Parameter(gate.weight.double(), requires_grad=False)
    with pytest.raises(RuntimeError, match="dtype"):  # the same error as of the eager step
        ran(step, engine, 3)
    assert parts["compiled"][-1] == layer
    other = small_model(**kinds, routed_scaling_factor=3.0)
    other = v4.patch(other, kv="fp32", precision="reference")
    step = v4.compile_step(other, v4.prefill_step, **settings)
    engine = Engine(other, new_cache(other), text())
    found, loaded = ran(step, engine, 3)
    assert layer in found
    assert layer not in loaded


def test_a_file_has_torchs_caches_where_parts_cannot_be_kept(tmp_path):
    file = tmp_path / "step.cache"

    def run():
        torch._dynamo.reset()
        counters.clear()
        torch.compiler._cache.CacheArtifactManager.clear()
        with fresh_cache():
            kept = precompiled.PartsFile(file, {"fullgraph": True, "dynamic": None})
            assert not kept.takes_parts
            loaded = compiled._load(kept.caches)
            torch.compile(lambda x: (x + 1).sin())(torch.ones(3))
            content, info = torch.compiler.save_cache_artifacts()
        hits = counters["inductor"]["fxgraph_cache_hit"]
        return kept, content, loaded, compiled._keys(info), hits

    kept, content, loaded, keys, hits = run()
    assert hits == 0 == len(loaded)
    kept.write(content)
    assert run()[2:] == (keys, keys, 1)


@pytest.mark.parametrize("place", ["start", "middle", "end", "flags", "method", "half"])
def test_a_damaged_file_is_written_anew(tmp_path, place):
    file, settings = tmp_path / "step.cache", {"fullgraph": True, "dynamic": False}
    whole = precompiled.PartsFile(file, settings)
    whole.keep("part", b"of code" * 100)
    whole.write(None)
    content = bytearray(file.read_bytes())
    if place == "half":
        content = content[: len(content) // 2]
    else:
        with zipfile.ZipFile(file) as written:
            end = written.start_dir
        found = {"start": 0, "middle": 300, "end": end, "flags": end + 8, "method": end + 10}[place]
        content[found] ^= 255
    file.write_bytes(content)
    damaged = precompiled.PartsFile(file, settings)
    assert damaged.find("part") is None
    damaged.keep("part", b"of code")
    damaged.write(None)
    assert precompiled.PartsFile(file, settings).find("part") == b"of code"


@pytest.mark.parametrize("family", ["v3", *nightly("test_hyper_connections.py has V4", "v4")])
def test_one_compile_serves_every_number_of_tokens_and_requests(family):
    """The first step compiles each part; later steps compile none, also for one token or one
    request. Logits equal those of eager steps. Decodes run nightly, too."""
    model = small_model() if family == "v4" else small_mla_model(**OF_A_KIND)
    model = v4.patch(model, kv="fp32", precision="reference")
    engines = [Engine(model, new_cache(model), text()) for _ in range(2)]
    batches = {
        "prefill": ({0: 9, 1: 3}, {2: 1}, {2: 130}, {0: 1, 1: 5, 2: 2}, {0: 2}),
        "decode": ({0: 1, 1: 1}, {2: 1}, {0: 1, 1: 1, 2: 1}, {1: 2}, {0: 1}),
    }
    for name, counts_of_steps in batches.items():
        counter, run = CompileCounterWithBackend("eager"), None
        if NIGHTLY or name == "prefill":
            step = getattr(v4, f"{name}_step")
            settings = {"mode": "regional", "dynamic": True, "backend": counter}
            made = v4.compile_step(model, step, **settings)
            run = compiled_step(made)
        for counts in counts_of_steps:
            getattr(engines[0], name)(counts, step=run)
            getattr(engines[1], name)(counts)
            assert run is None or counter.frame_count == len(made.parts)
    for ours, eager in zip(*(engine.logits for engine in engines), strict=True):
        assert ours.keys() == eager.keys()
        for place in ours:
            torch.testing.assert_close(ours[place], eager[place], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "name", "settings", "options"),
    [
        ("cuda", "metadata", {}, {"max_fusion_size": 16}),
        ("cuda", "metadata", {"options": {"max_fusion_size": 9}}, {"max_fusion_size": 9}),
        ("cuda", "metadata", {"backend": "eager"}, None),
        ("cuda", "head", {}, None),
        ("cpu", "metadata", {}, None),
    ],
)
def test_metadata_is_several_kernels_on_a_gpu(device, name, settings, options):
    step = v4.compile_step(reference(), mode="regional", **settings)
    step._patched = SimpleNamespace(device=torch.device(device))
    assert step._settings_of(name).get("options") == options

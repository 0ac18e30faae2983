"""Parts of steps with symbolic sizes, which the next process loads from a folder."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4_ops.core.torch_compat import SizeGuards
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.compile_cache import precompiled
from dsv4_ops.integrations.transformers.steps import compiled as compiled_steps
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step
from dsv4_ops.testing.mla_checkpoint import random_model
from dsv4_ops.testing.models import SLIDING, small_dsa_model, small_mla_model, small_model
from dsv4_ops.testing.released_model import released_model
from tests.helpers import nightly
from tests.support.hf_models import LENGTH, Engine, expected, new_cache, text

SIZES = {
    prefill_step: ({0: 9, 1: 3}, {2: 1}, {2: 70}, {0: 1, 1: 5, 2: 2}),
    decode_step: ({0: 1, 1: 1}, {2: 1}, {0: 2, 1: 1}, {0: 1}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Use a folder of parts; graphs run without Inductor, which would take minutes."""
    monkeypatch.setenv("DSV4_OPS_CACHE", str(tmp_path))
    monkeypatch.setattr(precompiled, "environment", lambda settings: "here")
    return tmp_path


def patched(family, kv="fp32", **constants):
    """Return a patched model of one layer, or of two if the second may share a selection."""
    if family == "v3":
        model = small_mla_model(num_hidden_layers=1)
    elif family in ("V3.2", "GLM-5"):
        model = small_dsa_model(family, num_hidden_layers=2, first_k_dense_replace=0)
    else:
        model = small_model(layer_types=[SLIDING], mlp_layer_types=["moe"], **constants)
    return v4.patch(model, kv=kv, precision="reference")


def leaves(engine):
    return torch.utils._pytree.tree_leaves(engine.cache.tensors)


def files(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def ran(model, step, backend="eager", mode="regional"):
    """Run steps of all sizes; check the logits, and return the traced graphs."""
    torch._dynamo.reset()
    counters.clear()
    compiled = v4.compile_step(model, step, mode=mode, dynamic=True, backend=backend)
    engines = [Engine(model, new_cache(model), text()) for _ in range(2)]
    for counts in SIZES[step]:
        batches = [engine.batch(counts) for engine in engines]
        found = compiled(batches[0], engines[0].cache)
        expected = step(model, batches[1], engines[1].cache)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, eager in zip(*(leaves(engine) for engine in engines), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    return counters["stats"]["unique_graphs"], list(compiled.parts)


@pytest.fixture(scope="module")
def traced():
    """Return the parts that the first process traces for each family and step, and their files."""
    return {}


@pytest.fixture
def fill(folder, traced):
    """Copy the files of a family and step into the folder; return the parts."""

    def fill(family, step):
        if (family, step) not in traced:
            graphs, parts = ran(patched(family), step)
            contents = {path: (folder / path).read_bytes() for path in files(folder)}
            assert graphs == len(parts) == len(contents) == 4
            traced[family, step] = parts, contents
        parts, contents = traced[family, step]
        for path, content in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return parts

    return fill


@pytest.mark.parametrize(
    ("family", "step"),
    [
        ("v4", prefill_step),
        *nightly("V4's prefill, and test_a_file_has_a_part_for_every_kind_of_layer decodes",
         ("v3", decode_step), ("v4", decode_step), ("v3", prefill_step)),
    ],
)  # fmt: skip
def test_a_second_process_traces_nothing(folder, fill, family, step):
    """One part serves all sizes; the next process, with a copy of the model, loads the part."""
    parts = fill(family, step)
    before = files(folder)
    assert ran(patched(family), step) == (0, parts)
    assert files(folder) == before


@pytest.mark.parametrize(
    "family", ["v3", *nightly("FP8 models share their linear layers", "v32", "glm5", "v2")]
)
def test_an_fp8_model_has_one_graph_for_all_sizes(folder, family):
    """The slice of a linear layer's output does not depend on whether there is one token."""
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    config = random_model(family, **sizes).config.to_dict()
    model = v4.patch(released_model(config, device="cpu"), precision="reference")
    graphs, parts = ran(model, decode_step)
    assert graphs == len(parts) == 5


@pytest.mark.parametrize("step", [decode_step, *nightly("parts of prefills do too", prefill_step)])
def test_a_whole_step_is_one_part_for_all_sizes(folder, step):
    """The next process loads the part, and compiles another for a model with another constant."""
    for graphs, count, factor in ((1, 1, 1.5), (0, 1, 1.5), (1, 2, 3.0)):
        model = patched("v4", routed_scaling_factor=factor)
        assert ran(model, step, mode="whole") == (graphs, ["step"])
        assert len(files(folder)) == count


def test_200_ragged_steps_compile_each_kind_once(folder):
    """Prefills and decodes alternate, with all kinds of layers, all sizes and padding requests."""
    torch._dynamo.reset()
    counters.clear()
    model, rng, count = v4.patch(small_model(), kv="fp32", precision="reference"), Random(2), 0
    settings = {"dynamic": True, "mode": "regional", "backend": "eager"}
    made = [v4.compile_step(model, step, **settings) for step in SIZES]
    prefill, decode = (lambda _, *call, step=step: step(*call) for step in made)
    while count < 200:
        engine = Engine(model, new_cache(model), text())
        while min(engine.done) < LENGTH and count < 200:
            left = {each: LENGTH - done for each, done in enumerate(engine.done) if done < LENGTH}
            chosen = rng.sample(sorted(left), rng.randint(1, len(left)))
            counts = {each: min(rng.choice((1, 1, 2, 9, 40)), left[each]) for each in chosen}
            counts = dict(sorted(counts.items(), key=lambda item: item[1]))
            run, step = rng.choice(((engine.prefill, prefill), (engine.decode, decode)))
            run(counts, padding=rng.randrange(3), step=step)
            count += 1
        assert engine.worst(expected()) < 1e-4
    graphs = counters["stats"]["unique_graphs"]
    prefills, decodes = (len(step.parts) for step in made)
    assert graphs == len(files(folder)) == prefills + decodes - 1  # both have the same head


def test_a_part_is_for_its_model_and_its_cache(folder, fill, monkeypatch):
    """Another constant of the layer, or another format of the cache, needs another part."""

    def untraced(function, args, settings):
        run = lambda called, args, rest: called(*args, **rest)  # noqa: E731
        return precompiled.Part(run, SizeGuards("True", {})), b""

    fill("v4", prefill_step)
    monkeypatch.setattr(compiled_steps, "compiled", untraced)
    ran(patched("v4", routed_scaling_factor=3.0), prefill_step)
    assert len(files(folder)) == 4 + 2  # the layer, and the norm, whose argument is the model
    ran(patched("v4", kv="fp8"), prefill_step)
    assert len(files(folder)) == 4 + 2 + 3  # the head gets only a tensor, as in a decode
    ran(patched("v4"), decode_step)
    assert len(files(folder)) == 4 + 2 + 3 + 3
    model = patched("v4")
    compiled = v4.compile_step(model, prefill_step, mode="regional", dynamic=True, backend="eager")
    engine = Engine(model, new_cache(model), text())
    batch = engine.batch({0: 7})
    gaps = torch.stack((batch.tokens, batch.tokens), 1)[:, 0]
    compiled(replace(batch, tokens=gaps), engine.cache)
    assert len(files(folder)) == 4 + 2 + 3 + 3 + 3  # a graph asserts the strides of its inputs


@pytest.mark.parametrize("step", [decode_step, prefill_step])
@pytest.mark.parametrize("family", ["v3", *nightly("V3 has the same projections", "V3.2", "GLM-5")])
def test_inductor_has_one_graph_for_all_sizes(folder, family, step):
    """On a CPU, torch's attention of one token asks for another layout of its inputs, and sizes of
    the loop over keys are products of batch and tokens."""
    graphs, parts = ran(patched(family), step, "inductor")
    assert graphs <= len(parts) + (family != "v3")  # an indexer has another graph for one token


@pytest.mark.nightly("each step compiles three kinds of layers with Inductor, for minutes")
@pytest.mark.parametrize("step", [decode_step, prefill_step])
def test_one_token_in_bf16_has_the_graphs_of_several(step, monkeypatch):
    """On a CPU, Inductor asks for the number of tokens where a reference selects single bytes."""
    monkeypatch.setenv("DSV4_OPS_CACHE", "off")
    counters.clear()
    model = v4.patch(small_model(dtype=torch.bfloat16))
    compiled = v4.compile_step(model, step, mode="regional", dynamic=True)
    engine = Engine(model, new_cache(model), text())
    for counts in SIZES[step]:
        compiled(engine.batch(counts), engine.cache)
    assert counters["stats"]["unique_graphs"] == len(compiled.parts)


def test_a_graph_that_holds_for_some_sizes_has_variants(folder, fill, monkeypatch):
    """If a trace of two tokens assumes several tokens, its graph does not run for one token."""
    from dsv4_ops.integrations.transformers.steps import step as steps

    branched = steps.in_vocabulary

    def several(tokens, vocab_size):
        is_read = branched(tokens, vocab_size)
        return is_read if len(tokens) > 1 else is_read & (tokens == tokens)

    fill("v4", prefill_step)  # traces, unless an earlier test did
    monkeypatch.setattr(steps, "in_vocabulary", several)
    next(folder.rglob("metadata-*")).unlink()
    model = patched("v4")
    graphs, parts = ran(model, prefill_step)
    assert (graphs, len(parts)) == (2, 4)
    assert ran(model, prefill_step) == (0, parts)


def test_caches_of_other_sizes_share_parts(fill):
    """Caches have one row, which is a size of other tensors too, or five, and other lengths."""
    fill("v4", prefill_step)
    model = patched("v4")
    torch._dynamo.reset()
    counters.clear()
    compiled = v4.compile_step(model, prefill_step, mode="regional", dynamic=True, backend="eager")
    for rows, length in ((3, 290), (1, 64), (5, 700)):
        sizes = {"max_batch_size": rows, "max_cache_len": length}
        engines = [Engine(model, v4.PagedCache.for_model(model, **sizes), text()) for _ in range(2)]
        batches = [engine.batch({0: 7}) for engine in engines]
        found = compiled(batches[0], engines[0].cache)
        expected = prefill_step(model, batches[1], engines[1].cache)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 0


def test_what_a_part_is_for():
    """A part is for kinds of tensors and for plain values, but not for the sizes of tensors."""
    form, x = compiled_steps._form, torch.zeros(4, 6)
    assert form(x) == form(torch.ones(1, 9))
    for other in (x.double(), x[0], x.t(), x[:, ::2], torch.nn.Parameter(x)):
        assert form(other) != form(x)
    assert (form(260), form("decode"), form(None)) == (260, "decode", None)

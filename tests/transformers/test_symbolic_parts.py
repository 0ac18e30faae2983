"""Parts of steps with symbolic sizes, which the next process takes from a folder."""

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.compile_cache import precompiled
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step
from dsv4_ops.testing.models import SLIDING, small_mla_model, small_model
from tests.support.hf_models import Engine, new_cache, text

SIZES = {
    prefill_step: ({0: 9, 1: 3}, {2: 1}, {2: 70}, {0: 1, 1: 5, 2: 2}),
    decode_step: ({0: 1, 1: 1}, {2: 1}, {0: 2, 1: 1}, {0: 1}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of parts; graphs run as they are, as Inductor would take minutes."""
    monkeypatch.setenv("DSV4_OPS_CACHE", str(tmp_path))
    monkeypatch.setattr(precompiled, "environment", lambda settings: "here")
    return tmp_path


def one_layer(family):
    if family == "v3":
        return small_mla_model(num_hidden_layers=1)
    return small_model(layer_types=[SLIDING], mlp_layer_types=["moe"])


def leaves(engine):
    return torch.utils._pytree.tree_leaves(engine.cache.tensors)


def ran(model, step):
    """Run steps of all sizes; return the graphs that were traced, and check the logits."""
    torch._dynamo.reset()
    counters.clear()
    compiled = v4.compile_step(model, step, mode="regional", dynamic=True, backend="eager")
    engines = [Engine(model, new_cache(model), text()) for _ in range(2)]
    for counts in SIZES[step]:
        batches = [engine.batch(counts) for engine in engines]
        found = compiled(batches[0], engines[0].cache)
        expected = step(model, batches[1], engines[1].cache)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, eager in zip(*(leaves(engine) for engine in engines), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    return counters["stats"]["unique_graphs"], list(compiled.parts)


@pytest.mark.parametrize("step", [prefill_step, decode_step])
@pytest.mark.parametrize("family", ["v4", "v3"])
def test_a_second_process_traces_nothing(folder, family, step):
    """One part serves all sizes; the next process, of another copy of the model, loads it."""
    models = [v4.patch(one_layer(family), kv="fp32", precision="reference") for _ in range(2)]
    graphs, parts = ran(models[0], step)
    files = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert graphs == len(parts) == len(files) == 4
    assert ran(models[1], step) == (0, parts)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == files


def test_a_part_is_for_its_model_and_its_cache(folder):
    """Another constant of the layer, or a cache of another format, is another part."""
    kinds = {"layer_types": [SLIDING], "mlp_layer_types": ["moe"]}
    model = v4.patch(small_model(**kinds), kv="fp32", precision="reference")
    assert ran(model, prefill_step)[0] == 4
    other = v4.patch(
        small_model(**kinds, routed_scaling_factor=3.0), kv="fp32", precision="reference"
    )
    assert ran(other, prefill_step)[0] == 2  # the layer, and the norm, which is given the model
    stored = v4.patch(small_model(**kinds), kv="fp8", precision="reference")
    assert ran(stored, prefill_step)[0] == 4


def test_a_damaged_file_costs_time_only(folder):
    model = v4.patch(one_layer("v4"), kv="fp32", precision="reference")
    assert ran(model, prefill_step)[0] == 4
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path, content in zip(files, (b"", b"{}\n", b"{", files[3].read_bytes()[:-9]), strict=True):
        path.write_bytes(content)
    assert ran(model, prefill_step)[0] == 4
    assert ran(model, prefill_step)[0] == 0


def test_a_graph_that_holds_for_some_sizes_has_variants(folder, monkeypatch):
    """A trace of two tokens that takes for granted that there are several is not run for one."""
    from dsv4_ops.integrations.transformers.steps import step as steps

    branched = steps.in_vocabulary

    def several(tokens, vocab_size):
        is_read = branched(tokens, vocab_size)
        return is_read if len(tokens) > 1 else is_read & (tokens == tokens)

    monkeypatch.setattr(steps, "in_vocabulary", several)
    model = v4.patch(one_layer("v4"), kv="fp32", precision="reference")
    graphs, parts = ran(model, prefill_step)
    assert (graphs, len(parts)) == (5, 4)
    assert ran(model, prefill_step) == (0, parts)


def test_caches_of_other_sizes_share_parts(folder):
    """Of one row, which is the size of other tensors too, or of five; and longer ones."""
    model = v4.patch(one_layer("v4"), kv="fp32", precision="reference")
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
        assert counters["stats"]["unique_graphs"] == 4

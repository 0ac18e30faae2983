"""A patched model on a GPU: against Hugging Face's on the CPU, captured, and packaged."""

import dataclasses
from random import Random

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList

from benchmarks.harness.timing import Capture
from dsv4_ops.core import target
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.generation import decoding
from dsv4_ops.kernels.launch_plans import PLANS
from dsv4_ops.lowering.inspect import load_package
from dsv4_ops.testing.models import small_model
from tests.support.attention_batches import no_host_sync
from tests.support.hf_models import LENGTH, REQUESTS, Engine, expected, random_counts, text
from tests.transformers.test_decoding import Same


def cache_of(model, **sizes):
    return v4.PagedCache.for_model(
        model, **{"max_batch_size": REQUESTS, "max_cache_len": LENGTH, "num_blocks": 6, **sizes}
    )


def forced(**settings):
    """Return a model without discrete choices, which rounding could change: it has hash routers,
    and an indexer that selects every row."""
    return small_model(device="cuda", mlp_layer_types=["hash_moe"] * 3, index_topk=128, **settings)


def test_reference_model_on_a_gpu():
    model = v4.patch(small_model(device="cuda"), kv="fp32", precision="reference")
    engine, rng = Engine(model, cache_of(model), text()), Random(0)
    while min(engine.done) < LENGTH:
        run = engine.decode if rng.random() < 0.5 else engine.prefill
        run(random_counts(rng, engine.done, 130), padding=rng.randrange(3))
    assert engine.worst(expected()) < 1e-4


@pytest.fixture(scope="module")
def drift():
    """Return a bf16 model, float32 logits, and the rms error of the model with an FP8 cache."""
    want = forced()(text().cuda()).logits
    model = v4.patch(forced(dtype=torch.bfloat16))
    cache = cache_of(model)
    engine = Engine(model, cache, text())
    engine.prefill(dict.fromkeys(range(REQUESTS), 120))
    for _ in range(20):
        engine.decode(dict.fromkeys(range(REQUESTS), 1))
    return model, want, engine.rms(want)


def test_captured_decode(drift, monkeypatch):
    """One CUDA graph serves 60 steps of a changing batch, without a host sync, and is as close to
    float32 as eager steps."""
    model, want, eager = drift
    assert eager < 0.3  # logits have a standard deviation of one
    monkeypatch.setattr(torch._inductor.config.triton, "cudagraph_or_error", True)
    step = torch.compile(v4.decode_step, fullgraph=True, mode="reduce-overhead")
    cache, rng = cache_of(model), Random(1)
    engine = Engine(model, cache, text())
    engine.prefill(dict.fromkeys(range(REQUESTS), 120))
    for request in range(REQUESTS):
        cache.reserve(request, 200)
    torch._dynamo.utils.counters.clear()
    for place in range(60):
        counts = dict.fromkeys(sorted(rng.sample(range(REQUESTS), rng.randint(1, REQUESTS))), 1)
        padding = REQUESTS - len(counts)
        batch = engine.batch(counts, padding=padding)
        with no_host_sync(place > 3):
            logits = step(model, batch, cache.tensors)
        for row, request in enumerate(counts):
            engine.logits[request][engine.done[request]] = logits[row].clone()
            engine.done[request] += 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert engine.rms(want) < 1.5 * eager


def test_kernels_that_start_early_compute_the_same(drift, monkeypatch):
    """Called and captured steps have the bits and caches of kernels that start one by one."""
    cache = cache_of(drift[0])
    engine = Engine(drift[0], cache, text())
    engine.prefill(dict.fromkeys(range(REQUESTS), 120))
    batch = engine.batch(dict.fromkeys(range(REQUESTS), 1))
    state = tree_leaves(cache.tensors)
    before = [each.clone() for each in state]
    compiled = v4.compile_step(drift[0], v4.decode_step, dynamic=True, backend="aot_eager")
    assert target.TARGETS[target.HOPPER].dependent_launch

    def bits(run):
        for each, old in zip(state, before, strict=True):
            each.copy_(old)
        return [each.contiguous().flatten().view(torch.uint8).clone() for each in (run(), *state)]

    def step():
        return compiled(batch, cache)

    def replay():
        capture.graph.replay()
        return capture.outputs[0]

    PLANS.plans.clear()
    with monkeypatch.context() as patch:
        late = dataclasses.replace(target.TARGETS[target.HOPPER], dependent_launch=False)
        patch.setitem(target.TARGETS, target.HOPPER, late)
        expected = bits(step)
    PLANS.plans.clear()
    capture = Capture([step])
    for run in (step, *20 * [replay]):
        assert all(map(torch.equal, bits(run), expected))


def test_package_on_a_gpu(drift, tmp_path):
    """The captured package of a decode has the logits and the cache of the model."""
    model, _, _ = drift
    ours, other = (cache_of(model, num_blocks=None) for _ in range(2))
    path = v4.export_decode(model, ours, path=tmp_path / "decode.pt2")
    run = load_package(path, run_single_threaded=True)
    engine = Engine(model, ours, text())
    batch = engine.batch(dict.fromkeys(range(REQUESTS), 1))
    inputs = v4.decode_inputs(batch, other)
    run(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*inputs)
    difference = []
    for place in range(40):
        step = engine.batch(dict.fromkeys(range(REQUESTS), 1))
        for into, new in zip(inputs, v4.decode_inputs(step, other)[:4], strict=False):
            into.copy_(new)
        graph.replay()
        want = v4.decode_step(model, step, ours.tensors)
        difference.append((captured - want).square().mean().sqrt())
        for request in range(REQUESTS):
            engine.done[request] = place + 1
    assert float(torch.stack(difference).max()) < 0.3


def test_a_package_of_prefills_on_a_gpu(drift, tmp_path):
    """One package runs steps of several sizes, decodes among them. Its logits are the model's, and
    the model can continue from its cache."""
    model, _, _ = drift
    ours, other = (cache_of(model, num_blocks=None) for _ in range(2))
    path = v4.export_prefill(model, ours, path=tmp_path / "prefill.pt2")
    run = load_package(path, run_single_threaded=True)
    engine = Engine(model, ours, text())
    difference = []
    for counts in ((60, 1, 7), (1, 140, 1), (1, 1, 1), (130, 2, 90), (1, 1, 1)):
        batch = engine.batch(dict(enumerate(counts)))
        want = v4.prefill_step(model, batch, ours.tensors)
        got = run(*v4.decode_inputs(batch, other))
        difference.append((got - want).square().mean().sqrt())
        for request, count in enumerate(counts):
            engine.done[request] += count
    batch = engine.batch(dict.fromkeys(range(REQUESTS), 1))
    want, got = (v4.decode_step(model, batch, cache.tensors) for cache in (ours, other))
    difference.append((got - want).square().mean().sqrt())
    assert not ours.tensors.dropped.any()
    assert not other.tensors.dropped.any()
    assert float(torch.stack(difference).max()) < 0.3


GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def generated(model, ids, **more):
    return model.generate(ids, **{**GREEDY, **more}).tolist()


def test_generate_compiles_each_part_once():
    """One graph per kind of layer, and three for the rest, serve caches of other sizes, other
    numbers of rows and lengths, and captured steps; an error names a guard that would recompile."""
    ids = text().cuda()[:REQUESTS, :40]
    want = generated(small_model(device="cuda"), ids)
    model = v4.patch(small_model(device="cuda"), kv="fp32", precision="reference")
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert generated(model, ids[:2], cache=cache_of(model)) == want[:2]
        (step,) = getattr(model, decoding.STEPS).values()
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == len(step.parts) == len(model.dsv4_ops_spec.kinds) + 3
        assert generated(model, ids[:1]) == want[:1]
        assert generated(model, ids) == want
        assert generated(model, ids[:2, :9], max_new_tokens=40)
    assert counters["stats"]["unique_graphs"] == graphs
    assert generated(model, ids, disable_compile=True) == want


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "top_k": 40, "top_p": 0.9}])
def test_sampled_texts_are_hugging_faces(more):
    """The loop samples as ``torch.multinomial`` does, and leaves the same random state."""
    model = v4.patch(small_model(device="cuda"), kv="fp32", precision="reference")
    ids, results = text().cuda()[:2, :40], []
    settings = {"max_new_tokens": 24, "do_sample": True, "eos_token_id": None, **more}
    for processors in ([], [Same()]):
        torch.manual_seed(7)
        out = model.generate(
            ids, logits_processor=LogitsProcessorList(processors), disable_compile=True, **settings
        )
        results.append((out.tolist(), torch.rand(1, device="cuda").item()))
    assert results[0] == results[1]


def test_captured_steps_end_with_their_texts():
    """If texts end in captured steps, between two checks, the cache is that of eager steps."""
    model = v4.patch(small_model(device="cuda"), kv="fp32", precision="reference")
    ids = text().cuda()[:2, :40]
    plain = model.generate(ids, **{**GREEDY, "max_new_tokens": 24})
    for at in (45, 51, 58):
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        settings["eos_token_id"] = sorted({int(plain[0, at]), int(plain[1, at - 2])})
        results = []
        for disabled in (False, True):
            cache = cache_of(model)
            out = model.generate(ids, cache=cache, disable_compile=disabled, **settings)
            results.append((out.tolist(), cache.seq_lens.tolist()))
        assert results[0] == results[1]


def test_generate_of_the_defaults():
    """FP8, the official recipe, a cache that ``generate`` makes, and prompts of two lengths."""
    model = v4.patch(small_model(device="cuda", dtype=torch.bfloat16))
    ids = text().cuda()[:2, :40].clone()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    whole = {"return_dict_in_generate": True, "output_logits": True, "attention_mask": mask}
    eager = model.generate(ids, **GREEDY, **whole, disable_compile=True)
    compiled = model.generate(ids, **GREEDY, **whole)
    assert torch.equal(compiled.sequences[:, :41], eager.sequences[:, :41])  # one new token
    assert compiled.sequences.shape == (2, 52)
    drift = (compiled.logits[1] - eager.logits[1]).float().square().mean().sqrt()
    assert drift < 0.3  # logits have a standard deviation of one

"""Patched DeepSeek-V3.2 and GLM-5 against Hugging Face's, in float32: equal logits for every split
of requests into steps, with contexts shorter than a selection, as long, and longer; and tests that
are the same for DeepSeek-V3."""

from copy import deepcopy
from functools import lru_cache, partial
from random import Random
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

from dsv4_ops.attention import MlaSpec
from dsv4_ops.core.versions import release
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.batching import hooks
from dsv4_ops.integrations.transformers.steps import export
from dsv4_ops.testing.models import (
    MLA_YARN,
    small_dsa_config,
    small_dsa_model,
    small_mla_config,
    small_mla_model,
    small_model,
)
from tests.helpers import Called, i32, nightly
from tests.support import hf_models
from tests.support.hf_models import Engine, run_changing, run_packaged, run_randomly, text

CLOSE, LENGTH, REQUESTS, TOPK = 1e-5, 70, 3, 16
FAMILIES = ("V3.2", "GLM-5")
each_model = pytest.mark.parametrize("family", ["V3", *FAMILIES])
each_context = pytest.mark.parametrize("family", ["V3", "V3, expanded", *FAMILIES], indirect=True)
LONG = {"max_batch_size": REQUESTS, "max_cache_len": LENGTH}
EXACT = {"kv": "fp32", "precision": "reference"}


@pytest.fixture
def family(request, monkeypatch):
    """Return the name of a model; in "V3, expanded", prefills of any size expand their contexts."""
    name, _, expanded = request.param.partition(", ")
    if expanded:
        monkeypatch.setattr(MlaSpec, "break_even", 0)
    return name


def small(family, **changed):
    if family in ("V2", "V3"):
        return small_mla_model(int(family[1]), **changed)
    return small_dsa_model(family, **changed)


def first_of_ties(self, k, dim=-1, **_):
    """Run ``Tensor.topk``, but of equal values select the first; torch may select any."""
    values, indices = self.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


ordered_ties = partial(mock.patch.object, torch.Tensor, "topk", first_of_ties)
"""Make Hugging Face's indexer select the first of equal scores. Many scores are equal, because a
score is 0 wherever no head has a positive product."""


def logits_of(model, ids):
    with ordered_ties():
        return model(ids).logits


def tokens():
    return text()[:, :LENGTH].contiguous()


stock = lru_cache(small)


@lru_cache
def reference(family):
    return v4.patch(small(family), **EXACT)


@lru_cache
def expected(family):
    return logits_of(stock(family), tokens())


def new_cache(model, **sizes):
    return v4.PagedCache.for_model(model, **{**LONG, **sizes})


def same_logits(*engines):
    """Return whether two engines stored the same logits, bit for bit."""
    return all(
        ours.keys() == others.keys() and all(torch.equal(ours[at], others[at]) for at in ours)
        for ours, others in zip(*(engine.logits for engine in engines), strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_random_steps(family):
    """Prefills, chunks of prompts, decodes of several tokens, padding, and blocks in any order.
    Half of the tokens see more rows than they attend to."""
    model = reference(family)
    engine = Engine(model, new_cache(model, num_blocks=6), tokens())
    run_randomly(engine, Random(3))
    assert engine.worst(expected(family)) < CLOSE
    all_rows = small_dsa_model(family, index_topk=LENGTH)(tokens()).logits
    apart = (expected(family) - all_rows).abs().amax((0, 2))
    assert apart[: TOPK - 2].max() < CLOSE
    assert apart[TOPK:].min() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_as_hugging_face_has_them(family):
    """A prompt, a chunk after it, then single tokens; one step serves all layers."""
    model = reference(family)
    cache = new_cache(model)
    parts = [slice(0, 20), slice(20, 37), *(slice(at, at + 1) for at in range(37, 42))]
    got = torch.cat([model(tokens()[:, part], cache=cache).logits for part in parts], 1)
    torch.testing.assert_close(got, expected(family)[:, :42], rtol=0, atol=CLOSE)
    assert cache.seq_lens.tolist() == [42] * REQUESTS
    with Called() as called:
        model(tokens()[:, 42:43], cache=cache)
    names = called.names
    indexers = 2 if family == "GLM-5" else 3  # GLM's second layer uses the selection of the first
    counts = {name: names.count(name) for name in ("mla_sparse", "indexer_select", "token_map")}
    assert counts == {"mla_sparse": 3, "indexer_select": indexers, "token_map": 0}
    assert "mla_decode" not in names


@each_context
def test_requests_that_are_preempted_start_again(family):
    """The blocks hold less than two requests: if none is free, the youngest request frees its
    blocks, and is prefilled again later."""
    model = reference(family)
    engine = Engine(model, new_cache(model, num_blocks=3), tokens())
    assert hf_models.run_preempted(engine, Random(1)) > 0
    assert engine.worst(expected(family)) < CLOSE


@each_model
def test_positions_may_go_back(family):
    """The cache has a row for every position, so no position overwrites another."""
    model = reference(family)
    cache = new_cache(model)
    model(tokens()[:, :40], cache=cache)
    got = model(tokens()[:, 30:33], position_ids=torch.arange(30, 33)[None], cache=cache).logits
    torch.testing.assert_close(got, expected(family)[:, 30:33], rtol=0, atol=CLOSE)
    assert cache.seq_lens.tolist() == [33] * REQUESTS


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_no_longer_than_a_selection_attend_to_all_rows(family):
    """Every row of a cache this short is selected, so dense attention runs, without an indexer."""
    model, cut = reference(family), tokens()[:, :TOPK]
    cache = new_cache(model, max_cache_len=TOPK)
    with Called() as called:
        parts = (slice(0, 11), slice(11, 12), slice(12, TOPK))
        got = torch.cat([model(cut[:, part], cache=cache).logits for part in parts], 1)
    torch.testing.assert_close(got, expected(family)[:, :TOPK], rtol=0, atol=CLOSE)
    names = set(called.names)
    assert "mla_decode" in names
    assert names.isdisjoint({"mla_sparse", "indexer_select"})
    # the cache has no indexer keys, so a copy to a longer cache is an error
    assert cache.memory()["indexer"] == 0
    longer = new_cache(model)
    with pytest.raises(IndexError):
        longer.tensors.layers[0].indexer[0] = cache.tensors.layers[0].indexer[0]


WIDE = {"v_head_dim": 256, "qk_nope_head_dim": 192}


@pytest.mark.parametrize(("family", "sizes"), [("V3.2", {}), ("GLM-5", WIDE)])
def test_prompts_expand_where_our_kernel_takes_the_keys(family, sizes, monkeypatch):
    """Prompts expand in caches with at most ``index_topk`` rows. GLM-5's values are too wide for
    our kernel, and would run the reference on a GPU."""
    monkeypatch.setattr(MlaSpec, "break_even", 0)
    sizes = {"index_topk": LENGTH, **sizes}
    want = small_dsa_model(family, **sizes)(tokens()).logits
    model = v4.patch(small_dsa_model(family, **sizes), **EXACT)
    with Called() as called:
        got = model(tokens(), cache=new_cache(model)).logits
    assert ("mla_prefill" in called.names) == (family == "V3.2")
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE * max(1.0, float(want.std())))


def sampled(rng, family):
    heads, groups, layers = map(rng.choice, ([1, 2, 4], [1, 2], [1, 2, 4]))
    values = {
        "q_lora_rank": [32, 96], "kv_lora_rank": [16, 48, 512], "qk_nope_head_dim": [8, 32, 192],
        "qk_rope_head_dim": [4, 16, 64], "v_head_dim": [8, 40, 256],
        "first_k_dense_replace": [0, 1, 3],
        "rope_parameters": [{"rope_type": "default", "rope_theta": 1e4},
         {**MLA_YARN, "factor": 4.0}],
    }  # fmt: skip
    changed = {name: rng.choice(allowed) for name, allowed in values.items()}
    changed |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
    changed |= {"num_hidden_layers": layers, "n_group": groups, "topk_group": groups}
    if family in ("V2", "V3"):
        changed["q_lora_rank"] = rng.choice([None, 32])
    else:
        changed["index_n_heads"] = rng.choice([1, 2, 3, 8])
        changed["index_topk"] = rng.choice([1, 5, 16, 33, LENGTH - 1, LENGTH, 200])
    if family != "V2":
        changed["norm_topk_prob"] = rng.random() < 0.5
    if family == "V3":
        changed["rope_interleave"] = rng.random() < 0.5
    if family == "GLM-5":
        others = [rng.choice(["full", "shared"]) for _ in range(layers - 1)]
        changed["indexer_types"] = ["full", *others]
    return changed


NIGHTLY_V3 = nightly("eight configurations in test_deepseek_v3.py", "V2", "V3", "V3, expanded")


@pytest.mark.parametrize("family", [*FAMILIES, *NIGHTLY_V3], indirect=True)
@pytest.mark.parametrize("seed", [0, 1, *nightly("two of the configurations", *range(2, 60))])
def test_sampled_configurations(seed, family):
    """Most configurations have ties: with one indexer head, half of all scores are 0."""
    rng = Random(seed)
    changed = sampled(rng, family)
    want = logits_of(small(family, **changed), tokens())
    model = v4.patch(small(family, **changed), **EXACT)
    engines = [Engine(model, new_cache(model, num_blocks=count), tokens()) for count in (6, 3)]
    run_randomly(engines[0], rng)
    assert hf_models.run_preempted(engines[1], rng) > 0
    worst = max(engine.worst(want) for engine in engines)
    assert worst < CLOSE * max(1.0, float(want.std())), changed


ROWS_656 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
OF_V3 = (("bf16", {}, 0.1, 160), ("fp8", {}, 0.3, 80), ("ds_fp8", ROWS_656, 0.3, 656))
OF_DSA = (("bf16", {}, 0.35, 160), ("fp8", ROWS_656, 0.35, 656))


@pytest.mark.parametrize(
    ("family", "indexers", "kv", "sizes", "near", "width"),
    [
        *(("V3", 0, *case) for case in OF_V3),
        *(("V3.2", 3, *case) for case in OF_DSA),
        *(("GLM-5", 2, *case) for case in OF_DSA),
    ],
)
def test_smaller_caches_are_near(family, indexers, kv, sizes, near, width):
    """In all caches, indexer keys are FP8: 132 bytes per token and the padding of a block. Layers
    are dense, because another choice of experts would change a whole token."""
    sizes = {"first_k_dense_replace": 3, **sizes}
    want = logits_of(small(family, **sizes), tokens())
    model = v4.patch(small(family, **sizes), kv=kv)
    cache, parts = new_cache(model), (slice(0, 60), slice(60, LENGTH))
    got = torch.cat([model(tokens()[:, part], cache=cache).logits for part in parts], 1)
    assert near / 60 < float((got - want).square().mean().sqrt() / want.std()) < near
    memory = cache.memory()
    assert memory["latents"] // (3 * 6 * 64) == width
    assert memory.get("indexer", 0) == indexers * 6 * 8640


@each_model
def test_generate_is_hugging_faces(family):
    """Greedy, for prompts of different lengths, with fewer and more rows than are selected."""
    ids, mask = tokens()[:2, :20].clone(), torch.ones(2, 20, dtype=torch.int64)
    ids[1, :9], mask[1, :9] = 99, 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with ordered_ties():
        want = stock(family).generate(ids, **settings)
    with Called() as called:
        assert torch.equal(reference(family).generate(ids, **settings), want)
    assert ("mla_decode" if family == "V3" else "mla_sparse") in called.names
    cache = new_cache(reference(family), max_batch_size=2)
    assert torch.equal(reference(family).generate(ids, cache=cache, **settings), want)
    assert cache.seq_lens.tolist() == [27, 18]


@pytest.mark.skipif(release(transformers.__version__) < hooks.OLDEST, reason="refused by name")
def test_generate_batch_is_generate():
    """Requests of Hugging Face's continuous batching have more rows than are selected."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = v4.patch(small_dsa_model("GLM-5", num_hidden_layers=2), **EXACT)
    model.generation_config.eos_token_id = None
    prompts = [text()[0, :length].tolist() for length in (20, 3, 14)]
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    rows = [model.generate(torch.tensor([each]), settings)[0, len(each) :] for each in prompts]
    config = ContinuousBatchingConfig(max_batch_tokens=64, max_requests_per_batch=4, num_blocks=8)
    found = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=config, progress_bar=False
    )
    got = {tuple(each.prompt_ids): each.generated_tokens for each in found.values()}
    assert [got[tuple(prompt)] for prompt in prompts] == [each.tolist() for each in rows]


@each_model
@pytest.mark.parametrize("steps", [25, *nightly("25 steps", 200)])
def test_one_graph_of_a_changing_batch(family, steps):
    """Requests pause, end, and give their rows to other requests."""
    model = small(family, num_hidden_layers=2 if family == "GLM-5" else 1)
    want = logits_of(model, tokens())
    v4.patch(model, **EXACT)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(v4.decode_step, fullgraph=True, backend=counter)
    engine = Engine(model, new_cache(model, num_blocks=4), tokens())
    assert run_changing(engine, Random(0), steps, compiled) > 2
    assert counter.frame_count == 1
    assert engine.worst(want) < CLOSE


@pytest.mark.parametrize("family", ["GLM-5", *nightly("GLM-5 has both kinds of layers", "V3.2")])
def test_parts_of_a_step(family):
    """Kinds of layers: with an indexer or another layer's selection, dense or with experts. GLM-5's
    fifth layer has the selection of the fourth."""
    model = small_dsa_model(family, num_hidden_layers=6)
    want = logits_of(model, tokens())
    v4.patch(model, **EXACT)
    step = v4.compile_step(model, v4.prefill_step, mode="regional", backend="eager")
    engines = [Engine(model, new_cache(model), tokens()) for _ in range(2)]
    for counts in ({0: 30, 1: 4, 2: 20}, {0: 1, 1: 17, 2: 2}):
        engines[0].prefill(counts, step=lambda _, *arguments: step(*arguments))
        engines[1].prefill(counts)
    assert same_logits(*engines)
    assert engines[0].worst(want) < CLOSE
    layers = {name for name in step.parts if "indexed" in name or "shared" in name}
    assert len(layers) == (3 if family == "GLM-5" else 2)


@pytest.mark.parametrize("family", ["V3, expanded", *FAMILIES], indirect=True)
def test_the_exported_prefill_takes_any_number_of_tokens(family):
    """The test runs the module behind ``export_prefill``; V3's contexts are expanded in chunks."""
    model = v4.patch(small(family, num_hidden_layers=2), **EXACT)
    engines = [Engine(model, new_cache(model, max_batch_size=2), tokens()) for _ in range(2)]
    cache = engines[0].cache
    inputs = v4.decode_inputs(export.padding_batch(cache, 2, 7), cache)
    shapes = export.prefill_shapes(inputs, 20_000)
    prefill = export.PrefillModule(model, cache)
    program = torch.export.export(prefill, inputs, dynamic_shapes=shapes, strict=False)
    (size,) = program.range_constraints.values()
    assert (size.lower, size.upper) == (1, 20_000)
    step = program.module(check_guards=False)
    for counts in ({0: 9, 1: 40}, {0: 1}, {1: 1, 0: 20}, {0: 30, 1: 2}):
        padding = 2 - len(counts)

        def run(_, batch, __):
            return step(*v4.decode_inputs(batch, cache))

        engines[0].prefill(counts, padding=padding, step=run)
        engines[1].prefill(counts, padding=padding)
    assert same_logits(*engines)
    pairs = zip(*(tree_leaves(engine.cache.tensors) for engine in engines), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.nightly("`make demo` packages a step of V4; test_export.py runs packages in C++")
@each_model
def test_a_package_decodes(family, tmp_path):
    """Inductor's code of a whole step: selection, attention, and caches."""
    model = small(family, num_hidden_layers=2)
    want = logits_of(model, tokens())
    v4.patch(model, **EXACT)
    cache = new_cache(model, max_batch_size=2)
    assert run_packaged(model, cache, tokens(), tmp_path).worst(want) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "added"), [("V4", 0), ("V3", 6), ("V3.2", 6), ("GLM-5", 6)])
def test_unpatching_gives_the_same_bits(family, added, dtype):
    """State dict, modules and attributes stay; halves of kv_b_proj are buffers. A copy of the
    patched model still runs."""
    settings = EXACT if family in FAMILIES else {}  # FP8 rows have other sizes
    model, ids = (small_model if family == "V4" else partial(small, family))(dtype=dtype), tokens()
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = model(ids[:1, :20]).logits
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    buffers = {name for name, _ in model.named_buffers()}
    assert v4.patch(model, **settings) is model
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    halves = {name for name, _ in model.named_buffers()} - buffers
    assert len(halves) == added
    assert all(name.endswith(("dsv4_ops_w_uk_t", "dsv4_ops_w_uv")) for name in halves)
    assert list(model.state_dict()) == list(kept)
    if settings:
        assert torch.equal(model(ids[:1, :20]).logits, before)
    got, copy = model(ids[:1, :20], cache=new_cache(model)).logits, deepcopy(model)
    assert v4.unpatch(model) is model
    assert {name for name, _ in model.named_buffers()} == buffers
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(model(ids[:1, :20]).logits, before)
    assert all(torch.equal(kept[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(copy(ids[:1, :20], cache=new_cache(copy)).logits, got)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_indexer_is_refused(family):
    """Steps call the indexer's projections, which may have hooks, but not the indexer itself."""
    model = v4.patch(small_dsa_model(family), **EXACT)
    layer = model.model.layers[2].self_attn
    seen = []
    handle = layer.indexer.wk.register_forward_hook(lambda *call: seen.append(call[2].shape))
    model(tokens()[:, :3], cache=new_cache(model))
    assert seen == [(9, 128)]
    handle.remove()
    handle = layer.indexer.register_forward_hook(lambda *_: None)
    name = "model.layers.2.self_attn.indexer must be Hugging Face's own as patch saw it"
    with pytest.raises(NotImplementedError, match=rf"^model: {name}.*got a hook"):
        model(tokens()[:, :3], cache=new_cache(model))
    handle.remove()
    layer.indexer = nn.Identity()
    with pytest.raises(NotImplementedError, match=rf"^model: {name}.*got Identity"):
        model(tokens()[:, :3], cache=new_cache(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_attributes_that_steps_do_not_read_must_be_those_of_the_configuration(family):
    """``patch`` and calls check these attributes, because Hugging Face reads them."""
    stock, model = (small_dsa_model(family, num_hidden_layers=1) for _ in range(2))
    v4.patch(model, **EXACT)
    for each, run in (
        (stock, lambda: v4.patch(stock, **EXACT)),
        (model, lambda: model(tokens(), cache=v4.PagedCache.for_model(model, **LONG))),
    ):
        attention = each.model.layers[0].self_attn
        attention.indexer.index_topk = 4
        with pytest.raises(ValueError, match=r"indexer.index_topk must be 16, .* got 4"):
            run()
        attention.indexer.index_topk = TOPK
        attention.scaling *= 2
        with pytest.raises(ValueError, match=r"self_attn.scaling must be .* got "):
            run()
        attention.scaling /= 2
        run()


@each_model
def test_a_changed_rotary_embedding_is_refused(family):
    """Steps read a table that the cache made from it; an unchanged embedding is read once."""
    model = v4.patch(small(family, num_hidden_layers=1), **EXACT)
    cache, rotary = new_cache(model), model.model.rotary_emb
    batch = Engine(model, cache, tokens()).batch({0: 3})
    step = v4.compile_step(model, backend="eager")
    runs = (
        lambda: model(tokens()[:, :3], cache=new_cache(model)),
        lambda: v4.decode_step(model, batch, cache),
        lambda: step(batch, cache),
    )
    other = "model.rotary_emb must be that of config.rope_parameters, got one of other freq"
    for run in runs:
        run()
        for change in (lambda: rotary.inv_freq.mul_(2), lambda: rotary.inv_freq.data.mul_(2)):
            change()
            with pytest.raises(ValueError, match=other):
                run()
            rotary.inv_freq.div_(2)
            run()
        rotary.attention_scaling *= 2
        with pytest.raises(ValueError, match=other):
            run()
        rotary.attention_scaling /= 2
    handle = rotary.register_forward_hook(lambda *_: None)
    for run in runs[:2]:
        with pytest.raises(NotImplementedError, match=r"model.rotary_emb must be Hugging Face"):
            run()
    handle.remove()


def test_types_of_indexers_are_read_of_glm_alone():
    """DeepSeek-V3.2 has an indexer in every layer, whatever its configuration says."""
    model = v4.patch(small_dsa_model("V3.2", indexer_types=["full", "shared", "shared"]), **EXACT)
    assert model.dsv4_ops_spec.kinds == ("indexed",) * 3
    model = small_dsa_model("GLM-5")
    model.config.indexer_types = ["full"] * 3
    with pytest.raises(ValueError, match=r"layers.1.self_attn.indexer must be one, .* got none"):
        v4.patch(model, **EXACT)


@each_context
def test_autocast_is_as_close_to_float32_as_in_hugging_faces_model(family):
    """Errors are compared for prompts with a cache, and for calls without one."""
    ids, stock = tokens()[:1, :16], small(family, num_hidden_layers=2)
    exact, model = stock(ids).logits, v4.patch(small(family, num_hidden_layers=2), **EXACT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [each(ids).logits for each in (stock, model)]
        found += [model(ids, cache=new_cache(model)).logits]
    stocks, *own = ((each - exact).square().mean() for each in found)
    assert all(0 < each <= 1.5 * stocks for each in own)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("V3", small_model().config, "the layers of the model, mla"),
        ("V3", small_mla_config(rope_parameters={**MLA_YARN, "rope_theta": 5.0}), "the model's ro"),
        ("GLM-5", small_mla_config(), "the layers of the model"),
        ("GLM-5", small_dsa_config("GLM-5", indexer_types=["full"] * 2 + ["shared"]), "the lay"),
        ("V3.2", small_dsa_config(index_topk=64), "the model's index_topk=16"),
    ],
)
def test_caches_of_other_models_are_refused(family, config, message):
    """Caches of another family or rotary embedding, with indexers in other layers, and of so few
    tokens that its model needs no indexer keys."""
    cache = v4.PagedCache(config, max_batch_size=2, max_cache_len=64, **EXACT)
    with hf_models.refuses(cache, f"model: cache must have {message}"):
        reference(family)(tokens()[:2, :3], cache=cache)
    batch = v4.StepBatch(tokens()[0, :1], i32([0, 1]), i32([1]), i32([0]))
    with hf_models.refuses(cache, f"decode_step: cache must have {message}"):
        v4.compile_step(reference(family), mode="whole", backend="eager")(batch, cache)

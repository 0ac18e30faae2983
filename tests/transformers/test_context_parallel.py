"""DeepSeek-V3, V3.2 and GLM-5 with caches that ranks share have the logits of one process. The
tests start gloo processes."""

import dataclasses
import re
import time
from random import Random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.utils._pytree import tree_leaves

from dsv4_ops import attention
from dsv4_ops.attention import ContextParallel, MlaInputs, MlaSpec, build_mla_step, mla_layer
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.generation import kept
from dsv4_ops.ops.mla import split_kv_b_proj
from dsv4_ops.testing.contract.compare import equal
from dsv4_ops.testing.models import small_dsa_model, small_mla_model
from tests.fakes import graphs
from tests.helpers import NIGHTLY, i32, nightly
from tests.support.hf_models import Engine, padded_to, text
from tests.support.ranks import run_ranks
from tests.support.selected_rows import SelectedRows
from tests.transformers.test_deepseek_v32 import logits_of

CLOSE, LENGTH, REQUESTS = 1e-5, 150, 3  # past a block of 64 rows on both ranks
V3 = "dsv4_ops.integrations.transformers.architectures.deepseek_v3.spec"


def patched(**settings):
    model = small_mla_model(num_hidden_layers=2)
    parallel = ContextParallel.of(**settings)
    return v4.patch(model, kv="fp32", precision="reference", parallel=parallel)


def cache_of(model, **changed):
    sizes = {"max_batch_size": REQUESTS, "max_cache_len": LENGTH, "num_blocks": 6, **changed}
    return v4.PagedCache.for_model(model, **sizes)


def boundaries(rng, engine, turn, most):
    """Choose counts after which a request ends before, at or after a round of the ranks."""
    waiting = [request for request, done in enumerate(engine.done) if done < LENGTH]
    counts = {}
    for request in rng.sample(waiting, rng.randint(1, len(waiting))):
        done = engine.done[request]
        stops = [done + 1, done + turn, (done // turn + 2) * turn + rng.randint(-1, 1), 128, 129]
        stop = rng.choice([each for each in stops if done < each <= LENGTH] or [LENGTH])
        counts[request] = min(stop - done, most)
    return dict(sorted(counts.items(), key=lambda item: item[1]))


def rank_steps(model, want, seed, expands, decode=None, most=LENGTH):
    """Run a changing batch: decodes, chunks, padding requests, and requests that pause."""
    interleave = model.dsv4_ops_spec.parallel.interleave
    rng, cache = Random(seed), cache_of(model)
    engine = Engine(model, cache, text()[:, :LENGTH].contiguous())
    with mock.patch.object(MlaSpec, "break_even", 0 if expands else 10**6):
        while min(engine.done) < LENGTH:
            counts = boundaries(rng, engine, dist.get_world_size() * interleave, most)
            padding = rng.randrange(3)
            if decode is None and rng.random() < 0.5:
                engine.prefill(counts, padding=padding)
            else:
                engine.decode(counts, padding=padding, step=decode)
    worst = engine.worst(want)
    assert worst < CLOSE, (interleave, seed, expands, worst)
    return cache


def rank_layer(rank, world):
    """Each rank has some of the heads, whose outputs equal those of a rank with all heads."""
    seed = torch.Generator().manual_seed(0)
    whole = MlaSpec(
        num_heads=2 * world, softmax_scale=0.2, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, kv_lora_rank=32, block_size=4, dtype=torch.float32, context="chunked",
        max_decode_tokens=4, next_n=2, workspace_rows=8 * world, max_chunks=4,
    )  # fmt: skip
    starts = i32([0, 2, 3, 8, 8])  # 2 decode tokens, a decode, a chunk, padding
    lens, num_tokens = i32([7, 1, 17, 0]), 9
    q = torch.randn(num_tokens, whole.num_heads, 32, generator=seed)
    latents = torch.randn(32, 3, 32, generator=seed), torch.randn(32, 3, 16, generator=seed)
    w_kv_b = torch.randn(whole.num_heads * 32, 32, generator=seed) / 5
    dims = {"qk_nope_head_dim": 16, "v_head_dim": 16}
    angles = torch.arange(32.0)[:, None] * torch.rand(8, generator=seed)
    rope = torch.cat((angles.cos(), angles.sin()), 1)

    def run(spec, heads, cp_rank):
        part = w_kv_b.unflatten(0, (whole.num_heads, -1))[heads].flatten(0, 1)
        w_uk_t, w_uv = split_kv_b_proj(part, num_heads=spec.num_heads, **dims)
        weights = attention.MlaWeights(rope, w_uk_t, w_uv, part)
        local = dataclasses.replace(spec, context="absorbed")
        cache = attention.MlaCache.allocate(spec, 24)
        if cache.kv.dtype.is_floating_point:
            cache.kv.fill_(torch.nan)  # unwritten rows must not be read
        table = torch.arange(24).view(4, 6).int()
        context = torch.tensor([5, 0, 12, 0])
        for request, length in enumerate(context.tolist()):  # write the cached context
            given = [each[:length, request % 3] for each in latents]
            bounds = i32([0] * (request + 1) + [length] * (4 - request))
            some = i32([length if each == request else 0 for each in range(4)])
            step = build_mla_step(local, bounds, some, table, cp_rank=cp_rank, num_tokens=length)
            inputs = MlaInputs(torch.zeros(length, spec.num_heads, 32), *given)
            mla_layer(local, inputs, weights, cache, step)
        step = build_mla_step(spec, starts, lens, table, cp_rank=cp_rank, num_tokens=num_tokens)
        new = [each[15 : 15 + num_tokens, 0].clone() for each in latents]
        inputs = MlaInputs(q[:, heads].clone(), *(each.to(spec.dtype) for each in new))
        return mla_layer(spec, inputs, weights, cache, step), cache

    want, plain = run(whole, slice(None), None)
    assert not want.isnan().any()
    for via in ("reduce_scatter", "all_to_all"):
        for interleave in (1, 4) if NIGHTLY else (4,):
            parallel = ContextParallel.of(interleave=interleave, via=via, shards_heads=True)
            spec = dataclasses.replace(whole, num_heads=2, parallel=parallel)
            heads = slice(2 * rank, 2 * rank + 2)
            got, cache = run(spec, heads, parallel.rank())
            own = want.unflatten(1, (whole.num_heads, -1))[:, heads].flatten(1)
            torch.testing.assert_close(got, own, rtol=0, atol=CLOSE)
    assert not plain.kv.equal(cache.kv)


def rank_fp8(rank):
    """Ranks gather codes: each rank expands the same rows as one process."""
    model = small_mla_model(num_hidden_layers=1, dtype=torch.bfloat16)
    outs = []
    for parallel in (None, ContextParallel.of(interleave=4)):
        v4.patch(model, kv="fp8", precision="reference", parallel=parallel)
        cache = cache_of(model, num_blocks=None)
        engine = Engine(model, cache, text()[:, :LENGTH].contiguous())
        with mock.patch.object(MlaSpec, "break_even", 0):
            engine.prefill({0: 40, 1: 3})
            engine.prefill({0: 40, 1: 20})
        outs.append(torch.stack([engine.logits[0][79], engine.logits[1][22]]))
        v4.unpatch(model)
    assert torch.equal(*outs)  # no outputs are merged, and all are rounded alike


def rows_of(cache, layer, name, positions, ranks=None):
    """Return the first request's rows at positions, from the cache of one process or of ranks."""
    row = cache.requests[0]
    table, place = cache.tensors.tables.blocks[row].long(), positions
    if ranks is not None:
        turn, within = place // ranks.interleave, place % ranks.interleave
        place = turn // ranks.world_size * ranks.interleave + within
    pages = getattr(cache.tensors.layers[layer], name) if isinstance(name, str) else name
    return pages[table[place // 64], place % 64]


def rank_selects(rank, family):
    """Each rank stores half of the rows and indexer keys; selections equal those of one process."""
    tokens, length = text()[:, :LENGTH].contiguous(), LENGTH - 1
    want = logits_of(small_dsa_model(family), tokens)
    ranks = ContextParallel.of(interleave=4)
    single, model = (
        v4.patch(small_dsa_model(family), kv="fp32", precision="reference", parallel=parallel)
        for parallel in (None, ranks)
    )
    cache = rank_steps(model, want, 3, False)
    assert cache.memory()["indexer"] * 2 == cache_of(single, num_blocks=12).memory()["indexer"]
    caches = [cache_of(each, num_blocks=None) for each in (single, model)]
    pairs = zip((single, model), caches, strict=True)
    engines = [Engine(each, cache, tokens) for each, cache in pairs]
    for counts in ({0: 100, 1: 5}, {0: 30, 1: 60}, {0: length - 130}):
        for engine in engines:
            engine.prefill(counts)
    positions = torch.arange(length)
    own = positions[positions // 4 % 2 == rank]
    for layer in range(3):
        for name in ("kv", "indexer"):
            if getattr(caches[0].tensors.layers[layer], name) is None:
                continue
            one = rows_of(caches[0], layer, name, own)
            part = rows_of(caches[1], layer, name, own, ranks)
            # the first layer computes its rows from the same numbers
            torch.testing.assert_close(part, one, rtol=0, atol=CLOSE if layer else 0)
            assert one.abs().amax(-1).min() > 0
    rank_selects_codes(rank, family, tokens)


def rank_selects_codes(rank, family, tokens):
    """With FP8 keys, equal bytes give equal selections."""
    sizes = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    found, own = [], torch.arange(rank, 90, 2)
    for ranks in (None, ContextParallel.of()):
        model = small_dsa_model(family, dtype=torch.bfloat16, **sizes)
        model = v4.patch(model, parallel=ranks)
        cache = cache_of(model, num_blocks=None)
        engine = Engine(model, cache, tokens)
        with SelectedRows(16) as selected:
            engine.prefill({0: 90})
            rows = selected.take(90)
        latents = rows_of(cache, 0, "kv", own, ranks)
        pages = cache.tensors.layers[0].indexer[:, : 64 * 128].unflatten(1, (64, 128))
        found.append((rows, latents, rows_of(cache, 0, pages, own, ranks)))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["V3.2", "GLM-5"])
def test_ranks_select_the_rows_of_one(family, tmp_path):
    run_ranks(2, rank_selects, tmp_path, family)


def rank_generates(rank, folder):
    """Ranks keep a cache and graphs for later calls, unless another rank lacks them."""
    prompt, single = text()[:2, :20], small_mla_model(num_hidden_layers=2)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = single.generate(prompt, **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        captures, model = graphs.install(monkeypatch, folder), patched(interleave=4)

        def numbers_of_captures(calls):
            for _ in range(calls):
                found = model.generate(prompt, compile_config=graphs.CONFIG, **settings)
                assert torch.equal(found, want)
                yield len(captures)

        assert list(numbers_of_captures(4)) == [1, 1, 2, 2]  # of the decode, then of the prompt
        if rank:  # only one rank's graph holds an old address
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
        with monkeypatch.context() as eager_prefills:  # on a CPU these compare shapes
            eager_prefills.setattr(kept, "MOST_TOKENS", 0)
            assert list(numbers_of_captures(2)) == [3, 3]
        for given, name in (({"do_sample": True}, "random state"), ({}, "prompts")):
            torch.manual_seed(rank)
            with pytest.raises(ValueError, match=f"^generate: call must be the same {name} on"):
                model.generate(prompt + rank * (not given), **settings | given)
        with pytest.raises(ValueError, match=r"^generate: call must be the same max_cache_len on"):
            model.generate(prompt, **settings | {"max_new_tokens": 6 + rank})
        if rank:  # the other rank needs this rank's steps until the end
            failing = SimpleNamespace(put=lambda tokens: 1 // 0, end=None)
            with pytest.raises(ZeroDivisionError):
                model.generate(prompt, streamer=failing, **settings)
            assert len(getattr(model, kept.STEPS).kept._caches) == 1
            v4.empty_cache(model)
        else:
            assert torch.equal(model.generate(prompt, **settings), want)
        before, make, makes = kept.captured, kept._cache, []

        def short(model, *sizes):
            makes.append(sizes)
            cache = make(model, *sizes)
            if rank and len(makes) == 1:
                raise torch.OutOfMemoryError
            return cache

        monkeypatch.setattr(kept, "_cache", short)

        def lacking(run, pool):
            replay = before(run, pool)  # a simulated capture sends to the other rank
            if rank:
                raise torch.OutOfMemoryError
            return replay

        monkeypatch.setattr(kept, "captured", lacking)
        assert list(numbers_of_captures(4)) == [4, 4, 5, 5]  # rank 1 fails
        assert [each[:2] for each in makes] == [(2, 128), (2, 26)]
        [only] = getattr(model, kept.STEPS).kept._caches
        assert only.prefill is None


@pytest.mark.slow
def test_ranks_keep_graphs(tmp_path):
    run_ranks(2, rank_generates, tmp_path, tmp_path)


def rank_refuses(rank, model):
    with pytest.raises(ValueError, match=r"^PagedCache: cache must be the same max_cache_len on"):
        cache_of(model, max_cache_len=LENGTH + rank)
    with pytest.raises(ValueError, match=r"^patch: model must be the same interleave on all"):
        patched(interleave=2**rank)
    cache = cache_of(model)
    cache.add("a", 10)
    ids = torch.zeros(2 + rank, dtype=torch.int64)
    batch = v4.StepBatch(ids, i32([0, len(ids)]), i32([len(ids)]), i32([0]))
    with pytest.raises(ValueError, match=r"^decode_step: batch must be the same num_tokens on"):
        v4.decode_step(model, batch, cache)
    for mode in ("whole", "regional"):
        step = v4.compile_step(model, mode=mode, backend="eager")
        with pytest.raises(ValueError, match=r"^compile_step: batch must be the same num_tok"):
            step(batch, cache)
    assert not cache.tensors.layers[0].kv.any()
    with pytest.raises(ValueError, match=r"^decode_step: cache must have the model's ranks=\d"):
        v4.decode_step(model, batch, cache_of(patched(interleave=1)))


def rank_checks(rank, world):
    rank_layer(rank, world)
    with torch.no_grad():
        want = small_mla_model(num_hidden_layers=2)(text()[:, :LENGTH]).logits
    single = v4.patch(small_mla_model(num_hidden_layers=2), kv="fp32", precision="reference")
    for interleave in (1, 4) if NIGHTLY else (4,):
        model = patched(interleave=interleave)
        for seed, expands in enumerate((False, True)):
            with mock.patch(f"{V3}.mla_workspace_rows", return_value=24):
                cache = rank_steps(model, want, seed, expands)
        padded = cache_of(model, num_blocks=None)
        got = model(text()[:, :20], cache=padded).logits
        torch.testing.assert_close(got, want[:, :20], rtol=0, atol=CLOSE)
    rank_refuses(rank, model)
    rank_fp8(rank)
    if NIGHTLY:  # test_tensor_parallel.py compiles a step on two ranks
        counter = CompileCounter()
        compiled = torch.compile(v4.decode_step, backend=counter, fullgraph=True)

        def step(model, batch, cache):
            return compiled(model, padded_to(batch, 96, 6), cache)

        rank_steps(model, want, 7, False, step, most=32)
        assert counter.frame_count == 1, counter.frame_count
    sizes = {"max_cache_len": 1024, "num_blocks": None}
    whole, part = (cache_of(each, **sizes) for each in (single, model))
    assert world * part.memory()["latents"] == whole.memory()["latents"]
    return repr(cache)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *nightly("the same on two ranks", 4)])
def test_ranks_have_the_logits_of_one(world, tmp_path):
    for shown in run_ranks(world, rank_checks, tmp_path, world):
        assert re.search(
            rf"one of {world} ranks; .*: latents [^,]+ \(1/{world}\), tables [^(]+\)$", shown
        )


def rank_dies(rank):
    model = patched(interleave=4)
    cache = cache_of(model)
    cache.add("a", 10)
    batch = v4.StepBatch(torch.zeros(2, dtype=torch.int64), i32([0, 2]), i32([2]), i32([0]))
    v4.decode_step(model, batch, cache)
    if rank == 1:
        return 0.0
    before = [tensor.clone() for tensor in tree_leaves(cache.tensors)]
    began = time.monotonic()

    def steps():
        for _ in range(3):  # collectives from before the other rank left may still succeed
            v4.decode_step(model, batch, cache)

    with pytest.raises(RuntimeError):
        steps()
    # the rank stores the same rows again: no row is half written, and no other row changes
    assert all(map(equal, tree_leaves(cache.tensors), before))
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.nightly("steps of ranks that live; the error of one that left is torch's")
def test_a_rank_that_dies_is_an_error_for_the_others(tmp_path):
    assert max(run_ranks(2, rank_dies, tmp_path, seconds=20, together=False)) < 40

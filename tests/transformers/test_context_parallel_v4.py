"""DeepSeek-V4 whose compressed rows ranks share: the logits of one process, on gloo processes that
the test starts."""

import re
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.lowering.inspect import load_package
from dsv4_ops.testing.models import small_model
from tests.support.hf_models import Engine
from tests.support.ranks import free_collectives, of_ranks, run_ranks
from tests.transformers.test_context_parallel import padded_to

CLOSE = 1e-5
LENGTHS = (530, 60)  # past a block of two ranks, which has 512 positions
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


def text():
    seed = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (len(LENGTHS), max(LENGTHS)), generator=seed)


def patched(**settings):
    parallel, model = ContextParallel.of(**settings), small_model(compress_rates=RATES)
    return v4.patch(model, kv="fp32", precision="reference", parallel=parallel)


def cache_of(model, **changed):
    sizes = {"max_batch_size": len(LENGTHS), "max_cache_len": max(LENGTHS), **changed}
    return v4.PagedCache.for_model(model, **sizes)


def rank_steps(model, want, seed, stops=LENGTHS, decode=None, most=200):
    """A changing batch: decodes, chunks that stop around ends of rows and blocks, padding."""
    rng, cache = Random(seed), cache_of(model, num_blocks=3)
    engine = Engine(model, cache, text())
    while True:
        left = [stop - done for stop, done in zip(stops, engine.done, strict=True)]
        waiting = [request for request, count in enumerate(left) if count]
        if not waiting:
            break
        counts = {}
        for request in rng.sample(waiting, rng.randint(1, len(waiting))):
            near = 505 < engine.done[request] < 520
            some = rng.choice((1, 2, 3) if near else (1, 2, 3, 5, 127, 128, 129, 200))
            counts[request] = min(some, most, left[request])
        counts = dict(sorted(counts.items(), key=lambda item: item[1]))
        padding = rng.randrange(3)
        if decode is None and rng.random() < 0.5:
            engine.prefill(counts, padding=padding)
        else:
            engine.decode(counts, padding=padding, step=decode)
    cache.raise_if_dropped()
    worst = engine.worst(want)
    assert worst < CLOSE * want.abs().max(), (seed, worst)
    return cache


def rank_checks(rank, world):
    stock = small_model(compress_rates=RATES)
    with torch.no_grad():
        want = stock(text()).logits
    for interleave, stops in ((1, (40, 20)), (4, LENGTHS)):
        model = patched(interleave=interleave)
        part = rank_steps(model, want, interleave, stops)
    padded = cache_of(model)  # rows of input_ids
    got = model(text()[:, :20], cache=padded).logits
    assert (got - want[:, :20]).abs().max() < CLOSE * want.abs().max()
    counter = CompileCounter()
    compiled = torch.compile(v4.decode_step, backend=counter, fullgraph=True)

    def step(model, batch, cache):
        return compiled(model, padded_to(batch, 64, 4), cache)

    rank_steps(model, want, 7, (40, 70), step, most=31)
    assert counter.frame_count == 1, counter.frame_count
    with pytest.raises(ValueError, match=r"parallel\.interleave must divide c128_block_size"):
        patched(interleave=64)
    sizes, plain = {"max_cache_len": 1024}, v4.patch(stock, kv="fp32", precision="reference")
    of_one, of_rank = (cache_of(each, **sizes).memory() for each in (plain, model))
    for name in ("compressed", "indexer"):
        assert world * of_rank[name] == of_one[name]
    return repr(part)


OVER_TIME = pytest.mark.nightly("test_ranks_over_time.py has a changing batch of V4")


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(each, marks=OVER_TIME) for each in (2, 4)])
def test_ranks_have_the_logits_of_one(world, tmp_path):
    for shown in run_ranks(world, rank_checks, tmp_path, world, seconds=120):
        part = rf"[^,]+ \(1/{world}\)"
        sizes = rf"window [^(]+, compressed {part}, indexer {part}, states [^(]+, tables [^(]+\)$"
        assert re.search(rf"one of {world} ranks; .*: {sizes}", shown), shown


def rank_package(rank, folder):
    """Rank 0 makes the package, which both run: the rank is one of its inputs."""
    stock = small_model(compress_rates=RATES)
    with torch.no_grad():
        want = stock(text()[:, :70]).logits
    model = patched(interleave=2)
    cache = cache_of(model, max_cache_len=80)
    path = folder / "decode.pt2"
    if rank == 0:
        v4.export_decode(model, cache, path=path)
    dist.barrier()
    package = of_ranks(load_package(path))
    engine = Engine(model, cache, text()[:, :70].contiguous())
    engine.prefill({0: 62, 1: 3})
    free_collectives()
    for counts in ({0: 1, 1: 1}, {1: 1}, {0: 1, 1: 1}, {0: 1}):
        engine.decode(
            counts,
            padding=2 - len(counts),
            step=lambda _, batch, __: package(*v4.decode_inputs(batch, cache)),
        )
    cache.raise_if_dropped()
    assert engine.worst(want) < CLOSE * want.abs().max()


@pytest.mark.slow
@pytest.mark.nightly("the step that the package holds is compiled and run by both ranks")
def test_two_ranks_run_one_package(tmp_path):
    run_ranks(2, rank_package, tmp_path, tmp_path, seconds=900)

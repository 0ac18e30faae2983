"""Hugging Face's plans split heads over the ranks that share a cache: logits and rows equal those
of one process. The tests start gloo processes."""

import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers", "5.24", reason="splits parameters since")
pytest.importorskip("accelerate", reason="transformers loads split models with it")
import transformers
from transformers.distributed import DistributedConfig

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.generation import decoding
from dsv4_ops.testing.models import head_plan, small_dsa_model, small_mla_model, small_model
from tests.helpers import NIGHTLY, nightly
from tests.support.hf_models import Engine, checkpoints, padded_to  # noqa: F401  # a fixture
from tests.support.ranks import run_ranks
from tests.support.selected_rows import SelectedRows
from tests.transformers.test_deepseek_v32 import logits_of

CLOSE, LENGTHS, REQUESTS, TOPK = 1e-5, (75, 40), 2, 4
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
MODELS = {
    "v3": (small_mla_model, {"num_hidden_layers": 2}),
    "v4": (small_model, {"compress_rates": RATES, "index_topk": TOPK}),
    "v32": (small_dsa_model, {"num_hidden_layers": 2, "index_topk": TOPK}),
    "glm": (partial(small_dsa_model, "GLM-5"), {"index_topk": TOPK}),
}


def text() -> torch.Tensor:
    seed = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (REQUESTS, max(LENGTHS)), generator=seed)


def whole(family: str) -> Any:
    made, settings = MODELS[family]
    return made(**settings)


def split(family: str, folder: Path, **config: Any) -> Any:
    """Load this rank's part of the model with Hugging Face."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    config = DistributedConfig(tp_size=world, **config)
    kind = transformers.AutoModelForCausalLM
    found = kind.from_pretrained(folder / family, distributed_config=config)
    return found.eval()


def patched(model: Any, **settings: Any) -> Any:
    return v4.patch(model, kv="fp32", precision="reference", **settings)


def cache_of(model: Any) -> v4.PagedCache:
    return v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=max(LENGTHS))


def run(model: Any, seed: int, step: Any = None, most: int = 40) -> tuple[Engine, list[Any]]:
    """Run a changing batch, in which requests are preempted and start again; return the logits and
    the rows that the indexers select."""
    rng, engine, rows = Random(seed), Engine(model, cache_of(model), text()), []
    with SelectedRows(TOPK) as selected:
        while engine.done != list(LENGTHS):
            left = [stop - done for stop, done in zip(LENGTHS, engine.done, strict=True)]
            waiting = [request for request, count in enumerate(left) if count]
            chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
            victim = rng.choice(waiting)
            if victim not in chosen and engine.done[victim] and rng.random() < 0.5:
                engine.cache.free(victim)
                engine.done[victim] = 0
            counts = {each: min(rng.choice((1, 2, 5, 31, 33)), most, left[each]) for each in chosen}
            counts = dict(sorted(counts.items(), key=lambda item: item[1]))
            padding = rng.randrange(2)
            if step is None and rng.random() < 0.5:
                engine.prefill(counts, padding=padding)
            else:
                engine.decode(counts, padding=padding, step=step)
            rows.append(selected.take(sum(counts.values())))
    engine.cache.raise_if_dropped()
    return engine, rows


def one_size(step: Any) -> Any:
    return lambda model, batch, cache: step(model, padded_to(batch, 64, 4), cache)


def rank_splits(rank: int, family: str, folder: Path) -> None:
    world = dist.get_world_size()
    stock = whole(family)
    want = logits_of(stock, text())
    _, of_one = run(patched(stock), 5)
    model = split(family, folder, tp_plan=head_plan(family))
    for settings in (
        [{}, {"interleave": 2, "via": "all_to_all"}] if NIGHTLY else [{"interleave": 2}]
    ):
        patched(model, parallel=ContextParallel.of(**settings))
        ranks = model.dsv4_ops_spec.parallel
        assert ranks.shards_heads
        assert ranks.shards_index_heads == (family == "v4")
        engine, rows = run(model, 5)
        assert engine.worst(want) < CLOSE * want.abs().max()
        assert all(torch.equal(*both) for both in zip(rows, of_one, strict=True))
        got = model(text()[:, :20], cache=cache_of(model)).logits
        assert (got - want[:, :20]).abs().max() < CLOSE * want.abs().max()
        same = {"inputs": text()[:, :9], "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**same), whole(family).generate(**same))
        assert decoding._calls_only_ours(model)  # it ran our loop
        if settings:
            counter, step = CompileCounter(), None
            if NIGHTLY or family == "v3":
                compiled = torch.compile(v4.decode_step, backend=counter, fullgraph=True)
                step = one_size(compiled)
            engine, _ = run(model, 6, step, most=30)
            assert engine.worst(want) < CLOSE * want.abs().max()
            assert counter.frame_count == (step is not None)
            rule = "model must be whole on every rank, got 'model.embed_tokens.weight'"
            with pytest.raises(NotImplementedError, match=f"^export_decode: {rule}.*DTensor"):
                v4.export_decode(model, engine.cache, path="split.pt2")
            sizes = {"max_batch_size": REQUESTS, "max_cache_len": 1024}
            part, of_one = (v4.PagedCache.for_model(m, **sizes).memory() for m in (model, stock))
            for name in {"v4": ("compressed", "indexer"), "v3": ("latents",)}.get(
                family, ("latents", "indexer")
            ):
                assert world * part[name] == of_one[name]
        if family == "v4":
            with pytest.raises(NotImplementedError, match=r"^model: cache must be a PagedCache"):
                model(text())
        v4.unpatch(model)
    projection = "o_a_proj" if family == "v4" else "o_proj"
    plan, rule = head_plan(family, without=projection), rf".*\.{projection} must .*over {world}"
    if family in ("v32", "glm"):  # their own plan splits all heads
        plan = {"model.layers.*.self_attn.indexer.wq_b": "colwise"}
        rule = r"model.layers.0.self_attn.indexer must be whole on every rank, .* got split"
    with pytest.raises(
        NotImplementedError,
        match=r"^patch: .*self_attn\.q_b_proj must be split over the ranks of parallel.*over 1",
    ):
        patched(model)
    part = split(family, folder, tp_plan=plan)
    with pytest.raises(NotImplementedError, match=rf"^patch: {rule}"):
        patched(part, parallel=ContextParallel.of())
    own = [dist.new_group([each]) for each in range(world)][rank]
    with pytest.raises(NotImplementedError, match=r"^patch: .*q_b_proj must be split"):
        patched(model, parallel=ContextParallel.of(own))


@pytest.mark.nightly("test_tensor_parallel.py runs the plan of Hugging Face on two ranks")
@pytest.mark.slow
@pytest.mark.parametrize("family", [*nightly("the same of V4", "v3"), "v4", "v32", "glm"])
def test_heads_of_two_ranks(family, checkpoints, tmp_path):  # noqa: F811
    run_ranks(2, rank_splits, tmp_path, family, checkpoints, seconds=120)

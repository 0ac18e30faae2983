"""Models whose heads and experts Hugging Face splits over GPUs that share a cache have the logits
and tokens of Hugging Face's model: compiled, captured and replayed. A model that is whole on each
GPU has one package for all GPUs."""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", "5.24", reason="splits parameters since")
pytest.importorskip("accelerate", reason="transformers loads split models with it")

from torch.utils._pytree import tree_leaves, tree_map

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.generation import kept
from dsv4_ops.lowering.inspect import load_package
from dsv4_ops.testing.models import head_plan, small_dsa_model
from dsv4_ops.testing.stored_rows import differences
from tests.gpu.test_dsa_model import FAMILIES, SIZES
from tests.support.hf_models import Engine, checkpoints, padded_to  # noqa: F401  # a fixture
from tests.support.ranks import free_collectives, gpu_ranks, of_ranks, run_ranks
from tests.transformers.test_deepseek_v32 import logits_of
from tests.transformers.test_split_heads import LENGTHS, MODELS, REQUESTS, patched, split, text

DEVICE = os.environ.get("DSV4_OPS_SPLIT_DEVICE", "cuda")
VIA = "symmetric_memory" if DEVICE == "cuda" else "reduce_scatter"
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs 2 GPUs"
)

CLOSE, TOKENS = 1e-4, 4  # tolerance, as with one GPU in float32; tokens of a captured step
COUNTS = ({0: 1, 1: 1}, {1: 1}, {0: 2, 1: 1}, {0: 1}, {1: 2})


def whole(family):
    """Return a model whose heads and groups four ranks can split."""
    made, settings = MODELS[family]
    return made(**settings, **{"v4": {"o_groups": 4, "num_hidden_layers": 6}}.get(family, {}))


def cache_of(model):
    return v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=max(LENGTHS))


def started(model, then=(), step=None):
    """Prefill requests, the second one in two steps, and then decode; return their engine."""
    engine = Engine(model, cache_of(model), text())
    engine.prefill({0: 40, 1: 9})
    engine.decode({1: 3})
    for counts in then:
        engine.decode(counts, padding=REQUESTS - len(counts), step=step)
    return engine


def captured(step, batch, cache):
    """Capture the step; return a function that replays the graph with another batch."""
    given = tree_map(torch.clone, batch)
    for _ in range(2):
        step(given, cache)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(given, cache)

    def replay(batch):
        for mine, new in zip(tree_leaves(given), tree_leaves(batch), strict=True):
            mine.copy_(new)
        graph.replay()
        return out

    return replay


def one_graph():
    """Return a compiled step of padded batches, which CUDA captures once."""
    compiled = torch.compile(v4.decode_step, fullgraph=True, dynamic=False)
    replays = []

    def step(model, batch, cache):
        batch = padded_to(batch, TOKENS, REQUESTS)
        if DEVICE == "cpu":
            return compiled(model, batch, cache)
        if not replays:  # the warm-up writes what the step writes again
            replays.append(captured(lambda *given: compiled(model, *given), batch, cache))
        return replays[0](batch)

    return step


def check(engine, want, what, one=None):
    """Check logits, and tokens wherever the best two logits differ by more than the error. Compare
    the caches of all layers with those of ``one``, which a single GPU computed."""
    scale, error = float(want.abs().max()), engine.worst(want)
    if dist.get_rank() == 0:
        print(f"{what}: error {error:.1e} of {scale:.1e}", flush=True)
    assert error < CLOSE * scale, what
    equal = 0
    for request, places in enumerate(engine.logits):
        for place, logits in places.items():
            best = want[request, place].topk(2).values
            if best[0] - best[1] > 2 * error:
                assert logits.cpu().argmax() == want[request, place].argmax(), (what, request)
                equal += 1
    assert equal > len(COUNTS)
    if one is not None:
        most = max((each.worst, each.layer, each.name) for each in differences(engine.cache, one))
        print(f"{what}: rank {dist.get_rank()}'s rows are off by {most}", flush=True)
        assert most[0] < CLOSE, most


@torch.no_grad()
def rank_model(rank: int, family: str, folder: Path) -> None:
    want = logits_of(whole(family), text())
    model = split(family, folder, tp_plan=head_plan(family), ep_size=dist.get_world_size())
    model = model.to(DEVICE)
    # in float32, grouped products read lengths on the host, which no graph can capture
    model.set_experts_implementation("batched_mm")
    patched(model, parallel=ContextParallel.of(interleave=2, via=VIA))
    one = started(patched(whole(family).to(DEVICE)), COUNTS).cache if family == "v4" else None
    check(started(model, COUNTS), want, f"{family} eager", one)
    check(started(model, COUNTS, one_graph()), want, f"{family} captured", one)
    if family in ("v32", "glm"):
        generates(rank, model, family)


def generates(rank: int, model: Any, family: str) -> None:
    """``generate`` returns Hugging Face's tokens, also if a rank changed or cannot capture."""
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt, capture, made = text()[:, : min(LENGTHS)], kept.captured, []
    want = whole(family).generate(prompt, **settings)

    def captured(run, pool=None):
        replay = capture(run, pool)
        made.append(replay)
        if rank and change == "fails":
            raise RuntimeError("a capture that fails")
        return replay

    with mock.patch.object(kept, "captured", captured):
        for change in ("", "", "", "", "weights", "", "fails", ""):
            if rank and change:
                model.lm_head.weight.data = model.lm_head.weight.data.clone()
            began = time.time()
            got = model.generate(prompt.to(DEVICE), **settings).cpu()
            if rank == 0:
                print(f"{family}: {len(made)} graphs, {time.time() - began:.2f} s", flush=True)
            assert torch.equal(got, want)
    assert len(made) > 2 or DEVICE == "cpu"


@torch.no_grad()
def rank_shares(rank: int, family: str) -> None:
    """Ranks share FP8 rows and FP8 keys, of which tokens select a few."""
    sizes = {**SIZES, "index_topk": 16, "device": DEVICE}
    want = small_dsa_model(family, **sizes)(text().to(DEVICE)).logits
    model = small_dsa_model(family, dtype=torch.bfloat16, **sizes)
    one = started(v4.patch(model), COUNTS).rms(want)
    model = small_dsa_model(family, dtype=torch.bfloat16, **sizes)
    v4.patch(model, parallel=ContextParallel.of(interleave=2, via=VIA))
    many = [started(model, COUNTS, step).rms(want) for step in (None, one_graph())]
    print(f"{family}: one {one:.3f}, ranks {many[0]:.3f}, captured {many[1]:.3f}", flush=True)
    assert max(many) < 1.2 * one < 0.4  # logits have a standard deviation of one


@torch.no_grad()
def rank_package(rank: int, folder: Path) -> None:
    """Rank 0 makes the package, for which the rank is an input; all ranks share the cache."""
    stock = whole("v3")
    want = stock(text()).logits
    model = patched(stock.to(DEVICE), parallel=ContextParallel.of(interleave=2))
    engine, path = started(model), folder / "decode.pt2"
    if rank == 0:
        v4.export_decode(model, engine.cache, path=path)
    dist.barrier()
    package = load_package(path)
    if DEVICE == "cpu":
        free_collectives()
        package = of_ranks(package)
    for counts in ({0: 1, 1: 1}, {1: 1}, {0: 1}, {0: 1, 1: 1}):  # a token for each request
        engine.decode(
            counts,
            padding=REQUESTS - len(counts),
            step=lambda _, batch, __: package(*v4.decode_inputs(batch, engine.cache)),
        )
    check(engine, want, "v3 package")


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu():
    """Skip without a GPU, unless the variable names another device."""


@pytest.mark.parametrize("family", MODELS)
def test_a_split_model(family, checkpoints, tmp_path):  # noqa: F811
    run_ranks(gpu_ranks(), rank_model, tmp_path, family, checkpoints, backend=BACKEND, seconds=150)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_share_fp8_rows(family, tmp_path):
    run_ranks(gpu_ranks(), rank_shares, tmp_path, family, backend=BACKEND, seconds=150)


def test_ranks_run_one_package(tmp_path):
    run_ranks(gpu_ranks(), rank_package, tmp_path, tmp_path, backend=BACKEND, seconds=150)

"""Attention layers whose compressed rows are spread over ranks, compared with one process that has
all rows. Starting the ranks takes seconds, so each test runs many checks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._dynamo.utils import counters

from dsv4_ops.attention import KINDS, ContextParallel, LayerSpec, attention_layer
from dsv4_ops.attention.layer import select
from dsv4_ops.attention.metadata import BlockTables
from dsv4_ops.attention.sharded import select_own, with_sink
from dsv4_ops.attention.step import AttentionStep, StateTables, build_attention_step
from dsv4_ops.attention.tensors import LayerCaches, LayerCall, LayerInputs
from dsv4_ops.core.types import IndexerQuery
from tests.helpers import NIGHTLY, i32, nightly
from tests.support import layers
from tests.support.layers import PLAIN, SPEC, Engine, SmallLayer, hidden_states, in_chunks
from tests.support.ranks import run_ranks


def ranks_of(world: int, turn: int, via: str = "", **settings: bool) -> ContextParallel:
    """Return ranks that split heads and merge ``via`` a collective; with "", each has all heads."""
    heads = {"via": via, "shards_heads": True, "shards_index_heads": True} if via else {}
    parallel = ContextParallel.of(interleave=turn, **(heads | settings))
    assert parallel.world_size == world
    return parallel


class RankLayer(SmallLayer):
    """A rank's part of the layer with the same kind and spec: its heads, rows and blocks."""

    def __init__(
        self, kind: str, spec: LayerSpec, rank: int, parallel: ContextParallel, device: str = "cpu"
    ) -> None:
        super().__init__(kind, spec, device)
        self.rank, self.ranks, self.parts = rank, parallel.world_size, parallel.head_parts
        self.index_parts = parallel.index_head_parts
        self.spec = replace(spec, num_groups=spec.num_groups // self.parts, parallel=parallel)
        for name in ("compressed_cache", "indexer_cache"):
            if hasattr(self.attention, name):
                cache = getattr(self.attention, name)
                setattr(self.attention, name, cache[: len(cache) // self.ranks])

    def step(self, *batch: Tensor) -> AttentionStep:
        starts, lens, slots, swa, rows, states = batch
        tables, held = BlockTables(swa=swa, c4=rows, c128=rows), StateTables(c4=states, c128=states)
        rank, heads = i32([self.rank]).to(starts.device), self.plan_heads
        batch = (starts, lens, slots)
        return build_attention_step(self.spec, *batch, tables, held, plan_heads=heads, cp_rank=rank)

    def own(self, whole: Tensor, dim: int, parts: int = 0) -> Tensor:
        """Return this rank's heads: all heads if they are not split."""
        parts = parts or self.parts
        return whole.chunk(parts, dim)[self.rank % parts]

    def attend(self, inputs: dict[str, Tensor], *batch: Tensor) -> Tensor:
        weights, caches = self.attention.weights, self.attention.caches
        weights = replace(weights, attn_sink=self.own(weights.attn_sink, 0))
        index_parts = dict.fromkeys(("indexer_q", "indexer_weights"), self.index_parts)
        parts = {"q": self.parts, **index_parts}
        own = {name: self.own(inputs[name], 1, parts[name]) for name in parts if name in inputs}
        given = (LayerInputs(**inputs | own), weights, caches, self.step(*batch))
        settings = {"schedule": self.schedule, "state_rings": self.state_rings}
        found = attention_layer(self.spec, self.kind, *given, **settings)
        assert isinstance(found, Tensor)
        return found


def cuts(rng: Random, length: int) -> list[list[int]]:
    """Sample tokens per step: decodes, speculative tokens, chunks, and none."""
    found = []
    for _ in range(rng.randint(1, 4)):
        counts = [rng.choice((0, 1, 1, 2, 3, 4, 7, 8, 9, 16, 17, 33)) for _ in range(6)]
        while sum(counts) > length:
            counts.pop()
        found.append(counts)
    if not any(map(sum, found)):
        found[0] = [1]
    return found


def variants(world: int) -> Iterator[tuple[LayerSpec, ContextParallel]]:
    """Yield specs, with uneven windows or more candidates than rows, and ranks with interleaves."""
    for window, topk, ratio, turn, via in (
        (8, 6, 16, 1, ""),
        (7, 1, 8, 2, "reduce_scatter"),
        (1, 40, 8, 4, "all_to_all"),
        (8, 3, 16, 2, "symmetric_memory"),  # on CPUs, with whole heads on every rank
    ):
        attention = replace(PLAIN.attention, window_size=window, index_topk=topk, c128_ratio=ratio)
        whole = {"shards_heads": False} if via == "symmetric_memory" else {}
        parallel = ranks_of(world, turn, via, **whole)
        yield replace(PLAIN, attention=attention, num_groups=4), parallel


def rank_layers(rank: int, world: int, rounds: int) -> None:
    """A rank's heads have the outputs that one process computes, in every kind of step."""
    rng = Random(rounds)
    hidden = hidden_states()
    chosen = [*product(variants(world), ("c4", "c128"))]
    if not NIGHTLY:
        chosen = [chosen[2], chosen[5]]
    for (spec, parallel), kind in [*chosen, (chosen[0][0], "window")]:
        whole, part = SmallLayer(kind, spec), RankLayer(kind, spec, rank, parallel)
        inputs = [whole.project(rows) for rows in hidden]
        for rows in inputs:
            if kind == "c4":  # weights of 0 make all scores equal
                rows["indexer_weights"][torch.arange(len(rows["q"])) % 3 == 0] = 0
        for _ in range(rounds):
            how: dict[str, Any] = {"cuts": cuts(rng, 60), "padding": rng.choice((0, 0, 1, 5))}
            whole.state_rings = part.state_rings = rng.random() < 0.3
            part.schedule = rng.choice(("decode", "prefill"))
            part.plan_heads = rng.choice((0, len(part.own(part.attention.attn_sink, 0))))
            count = len(how["cuts"])
            want = in_chunks(whole, inputs[:count], **how)
            found = in_chunks(part, inputs[:count], seed=1, **how)
            for out, expected in zip(found, want, strict=True):
                expected = part.own(expected, 1)
                error = (out - expected).abs().amax() if len(out) else torch.zeros(())
                assert error <= 1e-5 * expected.abs().amax(), (kind, spec, parallel, how, error)


def rank_quantised(
    rank: int, world: int, via: str = "reduce_scatter", device: str = "cpu", **settings: bool
) -> None:
    """FP8 caches and bfloat16 outputs, also with the fused insert of decodes. Ranks round four more
    times: a partial result, its share, the sum of shares, and the sum with the sink."""
    for kind in KINDS if NIGHTLY or device != "cpu" else ("c4",):
        spec = replace(SPEC, num_groups=4)
        parallel = ranks_of(world, 2, via, **settings)
        whole = SmallLayer(kind, spec, device)
        part = RankLayer(kind, spec, rank, parallel, device)
        inputs = [whole.project(rows.to(device)) for rows in hidden_states(2)]
        how = [[30, *[1] * 7], [7, 2, 1, 20, *[1] * 3]]
        if not NIGHTLY and device == "cpu":
            how = [[30, 1, 1], [7, 2, 1]]
        outs = (in_chunks(each, inputs, how) for each in (part, whole))
        for out, expected in zip(*outs, strict=True):
            expected = part.own(expected, 1).float()
            error = (out.float() - expected).abs().amax((1, 2))
            budget = (0.01 + 4 * 2**-9) * expected.abs().amax((1, 2))
            assert (error <= budget).all(), (kind, error.max())


def random_batch(rng: Random, ratio: int) -> tuple[Tensor, Tensor]:
    """Sample requests that end near the end of a row, with several new tokens or none."""
    queries, lens = [], []
    for _ in range(rng.randint(1, 5)):
        rows = rng.choice((0, 0, 1, 2, 3, 7, 8, 9, 30, 64))
        length = max(0, rows * ratio + rng.randint(-1, ratio))
        query = min(rng.choice((0, 1, 1, 2, 5)), length)
        queries.append(query)
        lens.append(length if query else rng.choice((0, length)))
    return i32([0, *queries]).cumsum(0).int(), i32(lens)


def selects_as_one(rng: Random, seed: torch.Generator, rank: int, world: int) -> None:
    """Each row that one GPU would select is selected by one rank. Scores are small integers, so
    many are equal and none is rounded."""
    (block, turn), topk = rng.choice(((8, 1), (8, 4), (2, 2), (4, 1))), rng.choice((1, 3, 9))
    sizes = {"block_tokens": block * 16, "c4_ratio": 16, "c128_ratio": 16, "index_topk": topk}
    most_bytes = rng.choice((4, 3000, 2**20))
    attention = replace(PLAIN.attention, max_logits_bytes=most_bytes, **sizes)
    spec, parallel = replace(PLAIN, attention=attention), ranks_of(world, turn)
    starts, lens = random_batch(rng, 16)
    num_reqs, num_tokens = len(lens), int(starts[-1]) + rng.choice((0, 2))
    most = 66  # maximum rows of a request

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=seed).float()

    keys = integers(num_reqs, most, 128)
    keys[..., 3:] = 0
    keys[torch.rand(num_reqs, most, generator=seed) < 0.02] = torch.nan
    query = IndexerQuery(integers(num_tokens, 4, 128), integers(num_tokens, 4))

    def on(spec: LayerSpec, held: list[int]) -> LayerCall:
        """Return a layer that stores the rows ``held`` of every request, and its step."""
        columns = -(-most // (block * (1 if spec.ranks is None else world)))
        table = torch.randperm(num_reqs * columns, generator=seed).view(num_reqs, columns)
        pages = torch.full((num_reqs * columns, block, 128), torch.nan)
        for place, row in enumerate(held):
            pages[table[:, place // block], place % block] = keys[:, row]
        none = torch.zeros(num_reqs, 0).int()
        tables = BlockTables(swa=none, c4=table.int(), c128=table.int())
        batch = (starts, lens, torch.arange(num_tokens), tables, StateTables(c4=none, c128=none))
        step = build_attention_step(spec, *batch, cp_rank=i32([rank]))
        return LayerCall(spec, "c4", None, None, LayerCaches(swa=pages, indexer=pages), step)

    selected = select(on(spec, list(range(most))), query, slots=False).long()
    own = [row for row in range(most) if row // turn % world == rank]
    spec = replace(spec, parallel=parallel)
    layer = on(spec, own)
    step = layer.step
    found, counts = select_own(layer, parallel, query)
    chosen = torch.zeros(num_tokens, most + 1)
    for token, (slots, count) in enumerate(zip(found.tolist(), counts.tolist(), strict=True)):
        assert [slot >= 0 for slot in slots] == [at < count for at in range(topk)]
        blocks = step.c4.block_table[step.req_indices[token]].tolist()
        for slot in slots[:count]:
            chosen[token, own[blocks.index(slot // block) * block + slot % block]] += 1
    dist.all_reduce(chosen)
    want = torch.zeros_like(chosen).scatter(1, selected.where(selected >= 0, most), 1.0)
    assert torch.equal(chosen[:, :most], want[:, :most]), (block, turn, topk)


def rank_compiles(rank: int, world: int, kinds: tuple[str, ...], backend: str) -> None:
    """One graph serves steps of all sizes."""
    for kind in kinds:
        spec = replace(PLAIN, num_groups=4)
        part = RankLayer(kind, spec, rank, ranks_of(world, 2, "reduce_scatter"))
        inputs = [part.project(rows) for rows in hidden_states(3)]
        how = [[9, 2, 4, 20], [3, 2, 2, 11], [30, 2, 1, 2]]
        want = in_chunks(part, inputs, how, padding=2)
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(part.attend, backend=backend, fullgraph=True, dynamic=True)
        part.attend = compiled  # type: ignore[method-assign]
        # Dynamo would trace twice if a float begins as a symbol and ends as a constant
        once = {"error_on_recompile": True, "specialize_float": True}
        with torch._dynamo.config.patch(once):
            found = in_chunks(part, inputs, how, padding=2)
        for out, expected in zip(found, want, strict=True):
            error = (out - expected).abs().amax()
            assert error <= 1e-5 * expected.abs().amax(), (kind, error)
        assert counters["stats"]["unique_graphs"] == 1


def rank_checks(rank: int, world: int, rounds: int) -> None:
    rng, seed = Random(5), torch.Generator().manual_seed(5)
    for _ in range(20 * rounds if NIGHTLY else 8):
        selects_as_one(rng, seed, rank, world)
    rank_layers(rank, world, rounds)
    rank_quantised(rank, world)
    if NIGHTLY:  # half a minute of tracing; test_one_rank_is_the_plain_graph traces a layer
        rank_compiles(rank, world, ("c4",), "eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "rounds"), [(2, 1), *nightly("two ranks and fewer batches", (4, 20))]
)
def test_ranks_attend_as_one_process(world: int, rounds: int, tmp_path: Path) -> None:
    run_ranks(world, rank_checks, tmp_path, world, rounds)


@pytest.mark.slow
@pytest.mark.nightly("the ops alone are compiled, and the layer's graph is taken")
def test_ranks_run_the_code_of_inductor(tmp_path: Path) -> None:
    args = (2, ("c4", "c128"), "inductor")
    run_ranks(2, rank_compiles, tmp_path, *args, seconds=900)


def test_the_sink_counts_once() -> None:
    """Keys and sink of exp(0) give half of the value. Without keys, or with a sink of inf, the
    result is 0; with a sink of -inf it is the whole value."""
    inf = torch.inf
    out, lse = torch.full((1, 5, 2), 4.0), torch.tensor([[0.0, -inf, 0.0, 0.0, -inf]])
    out[0, [1, 4]] = 0
    sink = torch.tensor([0.0, 0.0, inf, -inf, -inf])
    assert with_sink(out, lse, sink)[0, :, 0].tolist() == [2.0, 0.0, 0.0, 4.0, 0.0]


def a_step(layer: SmallLayer) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Return inputs and batch of two requests' first tokens."""
    inputs = [layer.project(rows[:5]) for rows in hidden_states(2)]
    batch = Engine(layer, 2).batch([5, 5])
    return {name: torch.cat([rows[name] for rows in inputs]) for name in inputs[0]}, batch


def test_one_rank_is_the_plain_graph() -> None:
    backend = EagerAndRecordGraphs()
    for parallel in (None, ContextParallel(group="none", world_size=1)):
        layer = SmallLayer("c4", replace(PLAIN, parallel=parallel))
        inputs, batch = a_step(layer)
        torch._dynamo.reset()
        torch.compile(layer.attend, backend=backend, fullgraph=True)(inputs, *batch)
    bare, of_one_rank = (graph.code for graph in backend.graphs)
    assert bare == of_one_rank
    assert "dsv4_ops.cp_" not in bare


def test_errors() -> None:
    """The group does not exist, so a collective would fail; the caches must not change."""
    parallel = ContextParallel(group="none", world_size=2, shards_heads=True)
    wrong = [
        ({"parallel": replace(parallel, interleave=4)}, ValueError, "must divide c128_block_size"),
        ({"parallel": 2}, TypeError, "parallel must be a ContextParallel or None, got int"),
        (
            {"impl": "flash_mla", "layout": "v4_fp8", "sm_parts": 2, "parallel": parallel},
            NotImplementedError,
            "sm_parts must be 0 on several ranks, got 2",
        ),
    ]
    for changed, kind, message in wrong:
        with pytest.raises(kind, match=f"^LayerSpec: .*{message}"):
            replace(PLAIN, **changed)
    layer = SmallLayer("c128", replace(PLAIN, parallel=parallel))
    inputs, batch = a_step(layer)
    with pytest.raises(TypeError, match=r"^build_attention_step: cp_rank must be a"):
        layer.step(*batch)
    step = SmallLayer("c128", PLAIN).step(*batch)
    tensors = (LayerInputs(**inputs), layer.attention.weights, layer.attention.caches)
    with pytest.raises(ValueError, match=r"^attention_layer: step must be of a rank"):
        attention_layer(layer.spec, "c128", *tensors, step)
    part = RankLayer("c4", PLAIN, 0, parallel)
    inputs, batch = a_step(part)
    with pytest.raises(ValueError, match=r"^attention_layer: group must be the name of an init"):
        part.attend(inputs, *batch)
    for written in (layer, part):
        assert not any(cache.count_nonzero() for cache in layers.caches_of(written).values())

"""Small attention layers of each kind, and an engine that runs requests through a layer: chunks of
any size, paged caches with reused blocks, tables with stale entries."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.attention import KINDS, AttentionLayer, LayerSpec, attention_layer
from dsv4_ops.attention.metadata import AttentionSpec, BlockTables
from dsv4_ops.attention.step import StateTables, build_attention_step
from dsv4_ops.attention.tensors import LayerCaches, LayerInputs
from tests.helpers import i32, i64
from tests.oracles.layer import LayerResult, Sizes, attention_layer as oracle_layer

HIDDEN, HEADS, INDEX_HEADS, LENGTH, REQUESTS = 128, 4, 16, 60, 4
SIZES = {"window_size": 8, "c4_ratio": 4, "c128_ratio": 16, "index_topk": 6}
SIZES |= {"block_tokens": 32, "swa_block_size": 4, "max_model_len": 64}
SPEC = LayerSpec(attention=AttentionSpec(**SIZES), num_groups=2)
PLAIN = replace(SPEC, layout="plain", indexer_layout="plain", dtype=torch.float32)
INPUTS = ("q", "kv", "kv_score", "indexer_q", "indexer_weights", "indexer_kv_score")


def sizes_of(spec: LayerSpec, kind: str) -> Sizes:
    """Return the configuration in the form for the oracle."""
    compressed = kind != "window"
    return Sizes(
        window=spec.attention.window_size,
        ratio=spec.ratio(kind) if compressed else 0,
        overlap=kind == "c4",
        topk=spec.attention.index_topk if kind == "c4" else 0,
        groups=spec.num_groups,
        eps=spec.eps,
        theta=160000.0 if compressed else 10000.0,
        factor=16.0 if compressed else 1.0,
        fp8=spec.layout == "v4_fp8",
        indexer_fp8=spec.indexer_layout == "v4_indexer_fp8",
    )


class SmallLayer(nn.Module):
    """A layer of input projections, attention, and the output projection."""

    schedule, state_rings, save_first, plan_heads, ranks = "decode", False, False, 0, 1

    def __init__(self, kind: str, spec: LayerSpec, device: str = "cpu") -> None:
        super().__init__()
        made = torch.Generator().manual_seed(KINDS.index(kind))
        self.kind, self.spec = kind, spec
        self.dtype = torch.bfloat16 if spec.layout == "v4_fp8" else spec.dtype
        self.index_dtype = torch.bfloat16 if spec.indexer_layout == "v4_indexer_fp8" else spec.dtype
        dim, index_dim = spec.head_dim, 128
        widths = {"q": HEADS * dim, "kv": dim}
        if kind != "window":
            widths["kv_score"] = 2 * spec.compressor_width(kind, dim)
        if kind == "c4":
            widths["indexer_q"] = INDEX_HEADS * index_dim
            widths["indexer_weights"] = INDEX_HEADS
            widths["indexer_kv_score"] = 2 * spec.compressor_width(kind, index_dim)
        for name, width in widths.items():
            scale = (2.0 if name.endswith("score") else 1.0) * HIDDEN**-0.5
            weight = torch.randn(width, HIDDEN, generator=made) * scale
            self.register_buffer(f"{name}_proj", weight)
        self.names = tuple(widths)
        table = spec.rope_table(kind, spec.attention.max_model_len)
        pages = {"swa_blocks": 90, "compressed_blocks": 16, "state_blocks": 90}
        self.attention = AttentionLayer(spec, kind, table, num_heads=HEADS, **pages)
        for parameter in self.attention.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=made))
            parameter.requires_grad_(False)
        out = torch.randn(HIDDEN, HEADS * dim, generator=made) * (HEADS * dim) ** -0.5
        self.register_buffer("out_proj", out.to(self.dtype))
        self.to(device)

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """Return ``LayerInputs`` of hidden states [num_tokens, HIDDEN], by name."""
        found = {name: x @ getattr(self, f"{name}_proj").mT for name in self.names}
        found["q"] = found["q"].unflatten(1, (HEADS, -1)).to(self.dtype)
        found["kv"] = found["kv"].to(self.dtype)
        if self.kind == "c4":
            queries = found["indexer_q"].unflatten(1, (INDEX_HEADS, -1))
            found["indexer_q"] = queries.to(self.index_dtype)
        return found

    def step(self, *batch: Tensor) -> Any:
        """Build a step from query_start_loc, seq_lens, slot_mapping and block tables."""
        starts, lens, slots, swa, rows, states = batch
        tables, held = BlockTables(swa=swa, c4=rows, c128=rows), StateTables(c4=states, c128=states)
        heads = self.plan_heads
        return build_attention_step(self.spec, starts, lens, slots, tables, held, plan_heads=heads)

    def attend(self, inputs: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Return the grouped attention outputs of projected tokens."""
        weights, caches = self.attention.weights, self.attention.caches
        given, step = LayerInputs(**inputs), self.step(*batch)
        held, chosen = (weights, caches), {"schedule": self.schedule}
        chosen |= {"state_rings": self.state_rings, "save_first": self.save_first}
        return attention_layer(self.spec, self.kind, given, *held, step, **chosen)

    def on_caches(self, x: Tensor, batch: tuple[Tensor, ...], caches: tuple[Tensor, ...]) -> Tensor:
        """Run ``forward`` with caches as arguments."""
        weights, given = self.attention.weights, LayerInputs(**self.project(x))
        step, held = self.step(*batch), LayerCaches(*caches)
        rings = {"state_rings": self.state_rings, "save_first": self.save_first}
        grouped = attention_layer(self.spec, self.kind, given, weights, held, step, **rings)
        return grouped.flatten(1) @ self.out_proj.mT

    def forward(self, x: Tensor, *batch: Tensor) -> Tensor:
        """Run the whole layer: metadata, projections, attention, output projection."""
        grouped = self.attention(self.step(*batch), **self.project(x))
        return grouped.flatten(1) @ self.out_proj.mT


def caches_of(layer: SmallLayer) -> dict[str, Tensor]:
    caches = vars(layer.attention.caches)
    return {name: cache for name, cache in caches.items() if cache is not None}


def poison(layer: SmallLayer) -> None:
    """Fill every cache with bytes that read as NaN."""
    for cache in caches_of(layer).values():
        cache.view(torch.uint8).fill_(0xFF)


@contextmanager
def changed(layer: SmallLayer, **attributes: Any) -> Iterator[SmallLayer]:
    """Change attributes while the context is open."""
    before = {name: getattr(layer, name) for name in attributes}
    vars(layer).update(attributes)
    try:
        yield layer
    finally:
        vars(layer).update(before)


@contextmanager
def unwritten(layer: SmallLayer) -> Iterator[None]:
    """Assert that no byte of any cache changes."""
    before = {name: cache.clone() for name, cache in caches_of(layer).items()}
    yield
    for name, cache in caches_of(layer).items():
        assert torch.equal(cache.view(torch.uint8), before[name].view(torch.uint8)), name


def hidden_states(requests: int = REQUESTS, length: int = LENGTH, seed: int = 9) -> Tensor:
    """Sample hidden states [requests, length, HIDDEN]."""
    return torch.randn(requests, length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def oracle(layer: SmallLayer, inputs: dict[str, Tensor]) -> LayerResult:
    """Return the oracle's result for all tokens of one request."""
    weights = {name: weight.cpu() for name, weight in layer.attention.named_parameters()}
    on_host = {name: tensor.cpu() for name, tensor in inputs.items()}
    return oracle_layer(sizes_of(layer.spec, layer.kind), on_host, weights)


@dataclass
class Pages:
    """Blocks of ``size`` positions of one cache group; unused table entries are stale."""

    size: int
    table: Tensor
    free: list[int]

    def __post_init__(self) -> None:
        self.of: dict[tuple[int, int], int] = {}

    def allot(self, request: int, start: int, stop: int) -> None:
        for block in range(start // self.size, -(-stop // self.size)):
            if (request, block) not in self.of:
                self.of[request, block] = self.table[request, block] = self.free.pop()

    def release(self, request: int, stop: int) -> None:
        """Free the blocks that end at or before ``stop``; their table entries stay."""
        for block in [block for owner, block in self.of if owner == request]:
            if (block + 1) * self.size <= stop:
                self.free.append(self.of.pop((request, block)))

    def slot(self, request: int, position: int) -> int:
        page = self.of[request, position // self.size]
        return page * self.size + position % self.size


class Engine:
    """Requests in the caches of one layer, and steps that advance them."""

    def __init__(self, layer: SmallLayer, requests: int = REQUESTS, *, seed: int = 0) -> None:
        self.layer, self.done = layer, [0] * requests
        spec, kind, rng = layer.spec, layer.kind, Random(seed)
        caches = caches_of(layer)

        def pages(name: str, size: int) -> Pages:
            order = list(range(caches[name].shape[0])) if name in caches else [0] * 999
            rng.shuffle(order)
            columns = LENGTH // size + 2
            stale = [[rng.choice(order) for _ in range(columns)] for _ in range(requests)]
            return Pages(size, i32(stale), order)

        self.swa = pages("swa", spec.attention.swa_block_size)
        self.rows = pages("compressed", spec.attention.block_tokens * layer.ranks)
        self.states = pages("states", spec.state_block_size(kind))
        self.kept = 2 * spec.ratio(kind) if kind == "c4" else spec.ratio(kind)

    def batch(self, counts: list[int], padding: int = 0) -> tuple[Tensor, ...]:
        """Return the tensors of a step that advances request r by counts[r] tokens, followed by
        ``padding`` tokens and one padding request."""
        slots = []
        for request, count in enumerate(counts):
            start = self.done[request]
            for pages in (self.swa, self.rows, self.states):
                pages.allot(request, start, start + count)
            slots += [self.swa.slot(request, start + i) for i in range(count)]
        total = i64([0, *counts, 0]).cumsum(0).int()
        lens = [done + n if n else 0 for done, n in zip(self.done, counts, strict=True)]
        slots += [-1] * padding
        groups = (self.swa, self.rows, self.states)
        tables = [torch.cat([pages.table, pages.table[:1]]) for pages in groups]
        return total, i32([*lens, 0]), i64(slots), *tables

    def finish(self, counts: list[int]) -> None:
        """Mark the step as done, and free the blocks that no later token sees."""
        window = self.layer.spec.attention.window_size
        for request, count in enumerate(counts):
            self.done[request] += count
            self.swa.release(request, self.done[request] - window + 1)
            self.states.release(request, self.done[request] - self.kept + 1)

    def run(
        self, inputs: list[dict[str, Tensor]], counts: list[int], padding: int = 0
    ) -> list[Tensor]:
        """Run a step, and return the outputs of every request's new tokens."""
        device = inputs[0]["q"].device
        batch = [tensor.to(device) for tensor in self.batch(counts, padding)]
        tokens = []
        for rows, done, count in zip(inputs, self.done, counts, strict=True):
            tokens.append({name: tensor[done : done + count] for name, tensor in rows.items()})
        joined = {
            name: torch.cat([*(part[name] for part in tokens), junk(inputs[0][name], padding)])
            for name in inputs[0]
        }
        out = self.layer.attend(joined, *batch)
        assert not out[sum(counts) :].any(), "padding tokens give 0"
        self.finish(counts)
        return list(out[: sum(counts)].split(counts))


def junk(like: Tensor, rows: int) -> Tensor:
    """Return rows of NaN, for padding tokens."""
    return torch.full((rows, *like.shape[1:]), float("nan"), device=like.device).to(like.dtype)


def in_chunks(
    layer: SmallLayer,
    inputs: list[dict[str, Tensor]],
    cuts: list[list[int]],
    *,
    padding: int = 0,
    seed: int = 0,
) -> list[Tensor]:
    """Run requests that advance by ``cuts[request][step]`` tokens in each step, on caches full of
    NaN; return their outputs."""
    poison(layer)
    engine = Engine(layer, len(inputs), seed=seed)
    found: list[list[Tensor]] = [[] for _ in inputs]
    for step in range(max(map(len, cuts))):
        counts = [cut[step] if step < len(cut) else 0 for cut in cuts]
        for outs, out in zip(found, engine.run(inputs, counts, padding), strict=True):
            outs.append(out)
    return [torch.cat(outs) for outs in found]


def projected(layer: SmallLayer, hidden: Tensor) -> list[dict[str, Tensor]]:
    """Return the projected inputs of every request."""
    return [layer.project(rows) for rows in hidden]

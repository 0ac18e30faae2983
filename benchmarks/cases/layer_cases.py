"""Cases of an attention layer in one decode step: the stages between its projections."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.draw import Draw
from benchmarks.harness.work import Args, Case, Work
from dsv4_ops.attention import (
    AttentionStep,
    CompressedStep,
    LayerCaches,
    LayerInputs,
    LayerSpec,
    LayerWeights,
    StateTables,
    attention_layer,
    build_attention_step,
)
from dsv4_ops.attention.metadata import BlockTables
from dsv4_ops.core.layout import IndexerLayout, MainLayout

INDEX_HEADS = 64
OUT = Tolerance(1e-3, 2.01 / 128, 2e-5)
"""Maximum difference between the output and the CPU's reference: FlashMLA's own tolerance, plus one
e4m3 code of a row that the step writes."""

TOKEN_COSINE = 1e-4
"""Maximum cosine difference of a token; a few wrong rows cause a hundred times more."""

INPUTS, WEIGHTS, CACHES, GROUP = map(
    len, map(fields, (LayerInputs, LayerWeights, LayerCaches, CompressedStep))
)
"""Numbers of tensors in LayerInputs, LayerWeights, LayerCaches and CompressedStep. The arguments of
a call are the tensors of the first three in this order, then those of AttentionStep, with the C4
group before the C128 group."""

_STEP = INPUTS + WEIGHTS + CACHES
_STEP_FIELDS = [each.name for each in fields(AttentionStep)]  # Dynamo cannot trace fields()

_MAX_SETS = 8
_ROPE_ROWS = 64  # the table repeats these rows, because a benchmark needs no other angles


@dataclass(frozen=True)
class Model:
    """Sizes of a released model on which the cases depend."""

    name: str
    heads: int
    spec: LayerSpec


FLASH = Model("Flash", 64, LayerSpec.deepseek_v4_flash())
PRO = Model("Pro", 128, LayerSpec.deepseek_v4_pro())


def parts_of(args: Args) -> tuple[LayerInputs, LayerWeights, LayerCaches, AttentionStep]:
    """Group the tensors of a call into the arguments of ``attention_layer``."""
    rest, step = args[INPUTS:], args[_STEP:]
    groups = CompressedStep(*step[-2 * GROUP : -GROUP]), CompressedStep(*step[-GROUP:])
    named: dict[str, Any] = dict(zip(_STEP_FIELDS, (*step[: -2 * GROUP], *groups), strict=False))
    return (
        LayerInputs(*args[:INPUTS]),
        LayerWeights(*rest[:WEIGHTS]),
        LayerCaches(*rest[WEIGHTS : WEIGHTS + CACHES]),
        AttentionStep(**named),
    )


@functools.cache
def layer_call(kind: str, spec: LayerSpec) -> Callable[..., Tensor]:
    """Return a layer as a function of tensors."""

    def call(*args: Any) -> Tensor:
        out = attention_layer(spec, kind, *parts_of(args), state_rings=False)
        assert isinstance(out, Tensor)
        return out

    return call


def layer_cases(kind: str, models: Sequence[Model], sizes: Sequence[tuple[int, int]]) -> list[Case]:
    """Make decode steps of (requests, context), in which every request ends a window."""
    return [
        Case(
            kind,
            f"{model.name}, {requests} x {context} tokens",
            functools.partial(layer_work, kind, model, requests, context),
            rows=requests,
            requests=requests,
            labels={"context": context, "heads": model.heads},
        )
        for model in models
        for requests, context in sizes
    ]


def cost(kind: str, model: Model, requests: int, context: int) -> tuple[int, int]:
    """Return the bytes that must move, and FLOP. FP8 FLOP count half: they take half as long."""
    spec, dim = model.spec, MainLayout.head_dim
    row, index_row = MainLayout(1).row_bytes, IndexerLayout(1).row_bytes
    keys, flop = min(context, spec.attention.window_size), 0
    moved = 2 * model.heads * dim * 2 + 2 * dim + 4 * keys + row
    if kind != "window":
        rows, width = context // spec.ratio(kind), spec.compressor_width(kind, dim)
        selected = min(rows, spec.attention.index_topk) if kind == "c4" else rows
        before = (2 if kind == "c4" else 1) * spec.ratio(kind) - 1
        keys += selected
        moved += 2 * 8 * width + before * 8 * dim + row
        if kind == "c4":
            index_width = spec.compressor_width(kind, IndexerLayout.head_dim)
            moved += 2 * 8 * index_width + before * 8 * IndexerLayout.head_dim
            moved += (rows + 1) * index_row + INDEX_HEADS * (2 * IndexerLayout.head_dim + 4)
            flop += rows * INDEX_HEADS * IndexerLayout.head_dim  # 2 FLOP per value, halved for FP8
    moved += keys * row
    flop += 4 * model.heads * keys * dim
    return requests * moved, requests * flop


def layer_work(kind: str, model: Model, requests: int, context: int, device: torch.device) -> Work:
    """Build a case. Input sets share weights, but have their own caches and tables."""
    moved, flop = cost(kind, model, requests, context)
    draw = LayerDraw(kind, model, requests, context, device)
    count = min(rotating_sets(moved, device), _MAX_SETS)
    weights = draw.weights()
    return Work(
        call=layer_call(kind, model.spec), sets=[draw.arguments(weights) for _ in range(count)],
        moved_bytes=moved, flop=flop, difference=differs, details=(kind, model.spec),
    )  # fmt: skip


def differs(_: Args, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Describe the difference of two outputs if it exceeds the tolerances, else return None."""
    ours, want = actual[0], expected[0].to(actual[0].device)
    found = outside("out", ours, want, OUT)
    if found:
        return found
    left, right = ours.double().flatten(1), want.double().flatten(1)
    cosine = 1 - 2 * (left * right).sum(1) / (left * left + right * right).sum(1)
    token = int(cosine.argmax())
    if not float(cosine[token]) <= TOKEN_COSINE:
        return f"out: cosine difference {float(cosine[token]):.2g} of token {token}"
    return None


class LayerDraw(Draw):
    """Random inputs of one case."""

    def __init__(
        self, kind: str, model: Model, requests: int, context: int, device: torch.device
    ) -> None:
        super().__init__(device, requests + context)
        self.kind, self.spec, self.heads = kind, model.spec, model.heads
        self.requests, self.context = requests, context

    def weights(self) -> tuple[Any, ...]:
        table = self.spec.rope_table(self.kind, _ROPE_ROWS, self.device)
        table = table.repeat(-(-self.context // _ROPE_ROWS), 1)
        found: list[Any] = [table, self.normal(self.heads)]
        for dim, there in (
            (MainLayout.head_dim, self.kind != "window"),
            (IndexerLayout.head_dim, self.kind == "c4"),
        ):
            width = self.spec.compressor_width(self.kind, dim)
            ape = self.normal(self.spec.ratio(self.kind), width)
            found += [ape, 1 + self.normal(dim) * 0.1] if there else [None, None]
        return tuple(found)

    def arguments(self, weights: tuple[Any, ...]) -> Args:
        step = self.step()
        toward = torch.zeros(self.requests, IndexerLayout.head_dim, device=self.device)
        toward[:, : IndexerLayout.head_dim // 2] = self.normal(
            self.requests, IndexerLayout.head_dim // 2
        ).sign()  # the half without RoPE
        caches = self.caches(step, toward)
        shared = (step.req_indices, step.positions, step.slot_mapping, step.swa_indices)
        groups = (*vars(step.c4).values(), *vars(step.c128).values())
        return (*self.inputs(toward), *weights, *caches, *shared, step.swa_lens, *groups)

    def inputs(self, toward: Tensor) -> tuple[Any, ...]:
        """Sample projections, with the indexer's queries in the direction of ``toward``."""
        tokens, dim, index_dim = self.requests, MainLayout.head_dim, IndexerLayout.head_dim
        found: list[Any] = [None] * INPUTS
        found[0] = self.normal(tokens, self.heads, dim).bfloat16()
        found[1] = self.normal(tokens, dim).bfloat16()
        if self.kind != "window":
            found[2] = self.normal(tokens, 2 * self.spec.compressor_width(self.kind, dim))
        if self.kind == "c4":
            noise = self.normal(tokens, INDEX_HEADS, index_dim)
            found[3] = (toward[:, None] + 0.25 * noise).bfloat16()
            found[4] = self.normal(tokens, INDEX_HEADS).abs()
            found[5] = self.normal(tokens, 2 * self.spec.compressor_width(self.kind, index_dim))
        return tuple(found)

    def table(self, tokens_per_page: int, pages: int) -> Tensor:
        """Make a table with random blocks for the last ``pages`` blocks of every request."""
        columns = torch.arange(-(-self.context // tokens_per_page), device=self.device)
        stops = -(-self.lens()[:, None] // tokens_per_page)
        used = (columns < stops) & (columns >= stops - pages)
        table = torch.full(used.shape, -1, dtype=torch.int32, device=self.device)
        table[used] = self.order(int(used.sum()))
        return table

    def lens(self) -> Tensor:
        return torch.full((self.requests,), self.context, dtype=torch.int32, device=self.device)

    def step(self) -> AttentionStep:
        """Build the step; if ranks share the rows, the table has this rank's blocks."""
        attention, ranks = self.spec.attention, self.spec.ranks
        size = attention.swa_block_size
        swa = self.table(size, attention.window_size // size + 1)
        share = 1 if ranks is None else ranks.world_size
        rows = self.table(attention.block_tokens * share, self.context)
        states = {
            kind: self.table(self.spec.state_block_size(kind), self.state_blocks(kind))
            for kind in ("c4", "c128")
        }
        last = self.lens()[:, None].long() - 1
        slots = (swa.gather(1, last // size) * size + last % size).flatten()
        starts = torch.arange(self.requests + 1, dtype=torch.int32, device=self.device)
        tables = BlockTables(swa=swa, c4=rows, c128=rows.clone())
        given = (starts, self.lens(), slots, tables, StateTables(**states))
        rank = None if ranks is None else ranks.rank(self.device)
        return build_attention_step(self.spec, *given, cp_rank=rank)

    def state_blocks(self, kind: str) -> int:
        window = self.spec.ratio(kind) * (2 if kind == "c4" else 1)
        return window // self.spec.state_block_size(kind) + 1

    def caches(self, step: AttentionStep, toward: Tensor) -> tuple[Any, ...]:
        layouts = self.spec.layouts(self.kind)
        found: dict[str, Tensor] = {}
        for name, layout in layouts.items():
            if isinstance(layout, MainLayout):
                table = step.swa_indices if name == "swa" else self._group(step).block_table
                pages = int(table.max()) // (layout.block_size if name == "swa" else 1) + 1
                found[name] = self.full(layout, pages)
            elif isinstance(layout, IndexerLayout):
                found[name] = self.indexer_keys(layout, step, toward)
            else:
                pages = int(self._group(step).state_block_table.max()) + 1
                found[name] = self.normal(*layout.shape(pages))
        return tuple(found.get(each.name) for each in fields(LayerCaches))

    def _group(self, step: AttentionStep) -> CompressedStep:
        return step.c4 if self.kind == "c4" else step.c128

    def indexer_keys(self, layout: IndexerLayout, step: AttentionStep, toward: Tensor) -> Tensor:
        """Sample keys. Keys that should be selected have much larger components along ``toward``
        than other keys, so that the rounding of scores does not change the selection."""
        table = step.c4.block_table
        cache = layout.allocate(int(table.max()) + 1, self.device)
        rows = self.context // self.spec.attention.c4_ratio
        row = torch.arange(rows, device=self.device)
        for request in range(self.requests):
            share = self.uniform(rows) / 2
            order = self.order(rows - 1, torch.int64)  # the step itself writes the last row
            share[order[: self.spec.attention.index_topk]] += 1
            key = toward[request] * share[:, None] + 0.25 * self.normal(rows, toward.shape[1])
            page = table[request, row // layout.block_size].long()
            slots = page * layout.block_size + row % layout.block_size
            dsv4_ops.quantize_and_insert_indexer_k(
                key.bfloat16(), cache, slots, block_size=layout.block_size
            )
        return cache

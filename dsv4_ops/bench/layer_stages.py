"""The stages of a layer one by one: ours, and those of a peer that the anchor bundle has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dsv4_ops
from dsv4_ops.attention import LayerSpec, output
from dsv4_ops.attention import layer as stages
from dsv4_ops.bench import anchors, deep_gemm, flash_mla
from dsv4_ops.bench.layer_cases import parts_of
from dsv4_ops.bench.report import one_line
from dsv4_ops.bench.work import Args

LEFT_OUT = {
    "window": "query norm and RoPE, RoPE of the keys, inverse RoPE",
    "c4": "query norm and RoPE, RoPE of the keys, both compressors, indexer queries, inverse RoPE",
    "c128": "query norm and RoPE, RoPE of the keys, the compressor, inverse RoPE; the slots of all "
    "compressed rows are there before",
}
"""What the anchor sequence of a kind of layer does not do: the bundle has no kernels for it."""


class Stage(NamedTuple):
    """A part of the layer, and the arguments that it takes of one input set."""

    name: str
    call: Callable[..., Any]
    args: Args


@functools.cache
def _stage(name: str, kind: str, spec: LayerSpec) -> Callable[..., Any]:
    """A stage as a function of the layer's tensors, behind those of stages before it."""

    def window(*args: Any) -> Any:
        return stages.insert_window(spec, *parts_of(args))

    def compressed(*args: Any) -> Any:
        return stages.insert_compressed(spec, kind, *parts_of(args), state_rings=False)

    def indexer_keys(*args: Any) -> Any:
        return stages.insert_indexer_keys(spec, *parts_of(args), state_rings=False)

    def selection(*args: Any) -> Any:
        return stages.select(spec, *parts_of(args))

    def attention(q: Tensor, selected: Tensor | None, *args: Any) -> Any:
        turned = output.turns_back(spec, q)
        return output.attend(spec, kind, q, selected, *parts_of(args)[1:], turned=turned)

    def projected(out: Tensor, *args: Any) -> Any:
        _, weights, _, step = parts_of(args)
        return output.grouped(spec, out, weights, step, turned=False)

    found: dict[str, Callable[..., Any]] = {
        "window": window,
        "compressed": compressed,
        "indexer_keys": indexer_keys,
        "selection": selection,
        "attention": attention,
        "output": projected,
    }
    return found[name]


class Results(NamedTuple):
    """What stages give to stages behind them; ``out`` is the attention before its rotation is
    undone."""

    q: Tensor
    selected: Tensor | None
    out: Tensor


def our_stages(kind: str, spec: LayerSpec, args: Args) -> tuple[list[Stage], Results]:
    """The stages of a layer in their order, with the arguments that the ones before left. There is
    no output stage where attention undoes the rotation: what is left of it is a view."""
    found: list[Stage] = []

    def run(name: str, *args: Any) -> Any:
        found.append(Stage(name, _stage(name, kind, spec), args))
        return found[-1].call(*args)

    q, selected = run("window", *args), None
    if kind != "window":
        run("compressed", *args)
    if kind == "c4":
        run("indexer_keys", *args)
        selected = run("selection", *args)
    out = run("attention", q, selected, *args)
    if output.turns_back(spec, q):
        rest = parts_of(args)[1:]
        out = output.attend(spec, kind, q, selected, *rest, turned=False)
    else:
        run("output", out, *args)
    return found, Results(q, selected, out)


class Libraries(NamedTuple):
    """The anchors of a bundle; an exception where one of them failed to load."""

    vllm: Any
    deep_gemm: Any
    flash_mla: Any


def load(folder: Path) -> Libraries:
    """Whatever of the bundle loads.

    Raises:
        FileNotFoundError: there is no bundle.
    """
    anchors.library(folder)

    def attempt(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # what needs it says so, in its row
            return error

    return Libraries(
        attempt(lambda: anchors.load(folder, needed=("cache",)).cache),
        attempt(lambda: deep_gemm.load(folder)),
        attempt(lambda: flash_mla.load(folder)),
    )


class AnchorStages:
    """The same step by the anchors, of one input set: each stage takes what the one before left."""

    def __init__(
        self, libraries: Libraries, kind: str, spec: LayerSpec, args: Args, ours: Results
    ) -> None:
        self.libraries, self.kind, self.spec, self.ours = libraries, kind, spec, ours
        self.inputs, self.weights, self.caches, self.step = parts_of(args)
        # what is left out is done before; RoPE makes the bytes of the key ours
        self.kv = dsv4_ops.apply_rope(
            self.inputs.kv, self.step.positions, self.weights.cos_sin_cache
        )
        self.swa = self.caches.swa.clone()
        self.extra: tuple[Any, Any, Any] = (None, None, None)
        self.logits: Tensor | None = None
        self.rows: Tensor | None = None

    def calls(self) -> list[tuple[str, Callable[[], Callable[[], Any]]]]:
        """(name, what makes its call: it may plan, and runs before its time is taken)."""
        found: list[tuple[str, Callable[[], Callable[[], Any]]]] = [("window", self._window)]
        if self.kind == "c4":
            found += [("logits", self._logits), ("topk", self._topk), ("slots", self._slots)]
        return [*found, ("attention", self._attention)]

    def _library(self, name: str) -> Any:
        library = getattr(self.libraries, name)
        if isinstance(library, Exception):
            raise ImportError(f"{name} failed to load: {one_line(library)}")
        return library

    def _window(self) -> Callable[[], Any]:
        insert, size = self._library("vllm").quantize_and_insert_k_cache, self._swa_size
        return lambda: insert(self.kv, self.swa, self.step.slot_mapping, block_size=size)

    @property
    def _swa_size(self) -> int:
        return self.spec.attention.swa_page_size

    def _logits(self) -> Callable[[], Any]:
        size, group = self.spec.page_size("c4"), self.step.c4
        assert self.inputs.indexer_q is not None
        assert self.inputs.indexer_weights is not None
        assert self.caches.indexer is not None
        query = dsv4_ops.indexer_quantize_q(
            self.inputs.indexer_q,
            self.inputs.indexer_weights,
            self.step.positions,
            self.weights.cos_sin_cache,
        )
        theirs = deep_gemm.arguments(
            *query, self.caches.indexer, group.lens, group.block_table, block_size=size
        )
        compute = deep_gemm.logits_call([theirs], size, self._library("deep_gemm"))

        def call() -> None:
            self.logits = compute(*theirs)

        return call

    def _topk(self) -> Callable[[], Any]:
        def call() -> None:
            assert self.logits is not None
            count = min(self.spec.attention.index_topk, self.logits.shape[1])
            self.rows = self.logits.topk(count, sorted=False).indices.to(torch.int32)

        return call

    def _slots(self) -> Callable[[], Any]:
        translate = self._library("vllm").compute_global_topk_indices_and_lens
        valid = torch.ones_like(self.step.req_indices, dtype=torch.bool)
        group, size = self.step.c4, self.spec.page_size("c4")

        def call() -> None:
            found = translate(self.rows, self.step.req_indices, group.block_table, size, valid)
            self.extra = (self.caches.compressed, found[0], found[1])

        return call

    def _attention(self) -> Callable[[], Any]:
        if self.kind == "c128":
            group, size = self.step.c128, self.spec.page_size("c128")
            dense = dsv4_ops.dense_compressed_indices(
                self.step.positions,
                self.step.req_indices,
                group.block_table,
                block_size=size,
                compress_ratio=self.spec.attention.c128_ratio,
                max_compressed=group.block_table.shape[1] * size,
            )
            self.extra = (self.caches.compressed, dense.indices, dense.lens)
        sizes = (self._swa_size, 1 if self.kind == "window" else self.spec.page_size(self.kind))
        scale, library = self.spec.softmax_scale, self._library("flash_mla")

        def arguments() -> Args:
            return flash_mla.decode_arguments(
                self.ours.q,
                self.swa,
                self.step.swa_indices,
                self.step.swa_lens,
                *self.extra,
                self.weights.attn_sink,
                block_sizes=sizes,
            )

        attend = flash_mla.decode_call([arguments()], scale, library)
        return lambda: attend(*arguments())


def anchor_calls(
    sets: Sequence[AnchorStages],
) -> tuple[dict[str, list[Callable[[], Any]]], list[str]]:
    """Calls of every stage over all input sets, and what stands in the way of the others: after a
    failure only the insert, on which no stage depends, lets the next ones be tried. Every call has
    run once."""
    found: dict[str, list[Callable[[], Any]]] = {}
    errors: list[str] = []
    for place, held in enumerate(sets):
        for name, make in held.calls():
            if place and name not in found:
                continue  # failed before
            try:
                call = make()
                call()
                found.setdefault(name, []).append(call)
            except Exception as error:  # a broken peer is a note in the row
                found.pop(name, None)
                errors.append(f"{name}: {one_line(error)}")
                if name != "window":  # those behind it would take what is not there
                    break
    return found, errors

"""A decode step of a layer on the baselines' kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.baselines import deep_gemm, flash_mla, vllm_metadata, vllm_ops
from benchmarks.cases.layer_cases import parts_of
from benchmarks.cases.layer_check import Found, Rows, compare_codes
from benchmarks.cases.layer_stages import Results
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.harness.report import one_line
from benchmarks.harness.work import Args
from benchmarks.sparse_mla import DECODE_OUT
from dsv4_ops.attention import LayerSpec
from dsv4_ops.core.layout import IndexerLayout, MainLayout, StateLayout
from dsv4_ops.ops.rope import ROPE_DIM

Call = Callable[[], Any]

_QUERY = Tolerance(1e-2, 1e-2)  # of vLLM's test of its query norm
_WITHOUT_EXTENSION = "query norm and RoPE, RoPE of the keys"
_NOTES = {
    "window": "",
    "c4": "vLLM's kernels of the compressor and of the indexer's queries are those in Triton, "
    "where on an NVIDIA GPU it takes others in the CuTe DSL; ",
    "c128": "vLLM's kernel of the compressor is that in Triton, where on an NVIDIA GPU it takes "
    "another in the CuTe DSL; the slots of all compressed rows are there before, as its metadata "
    "makes them once a step; ",
}


class Libraries(NamedTuple):
    """The baselines of a bundle; an exception where one of them failed to load. The last five are
    files that bundles did not always have."""

    vllm: Any
    deep_gemm: Any
    flash_mla: Any
    extension: Any
    states: Any
    compressor: Any
    indexer_query: Any
    inverse_rope: Any


def load(folder: Path) -> Libraries:
    """Whatever of the bundle loads.

    Raises:
        FileNotFoundError: there is no bundle.
    """
    vllm_metadata.library(folder)

    def attempt(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # what needs it says so, in its row
            return error

    return Libraries(
        attempt(lambda: vllm_metadata.load(folder, needed=("cache",)).cache),
        attempt(lambda: deep_gemm.load(folder)),
        attempt(lambda: flash_mla.load(folder)),
        attempt(lambda: vllm_ops.extension(folder)),
        attempt(lambda: vllm_ops.triton_file(folder, "save_partial_states")),
        attempt(lambda: vllm_ops.triton_file(folder, "fused_compress_quant_cache")),
        attempt(lambda: vllm_ops.triton_file(folder, "fused_indexer_q")),
        attempt(lambda: vllm_ops.triton_file(folder, "fused_inv_rope_fp8_quant")),
    )


def note(libraries: Libraries, kind: str) -> str:
    """What the baseline sequence of a kind of layer leaves out, or does otherwise than ours."""
    text = f"{_NOTES[kind]}vLLM's inverse RoPE quantises to FP8, ours leaves bf16"
    if isinstance(libraries.extension, Exception):
        why = one_line(libraries.extension)
        text = f"the baselines do without {_WITHOUT_EXTENSION} ({why}); {text}"
    return text


class Making(NamedTuple):
    """A stage: ``make`` returns its call, may plan, and runs before its time is taken. It takes
    what the stages ``behind`` which it is left, and is not tried without them."""

    name: str
    make: Callable[[], Call]
    behind: tuple[str, ...] = ()


class BaselineStages:
    """The baseline's step of one input set: each stage takes what the ones before it left, or what
    ours left where a stage of the baseline does not run."""

    def __init__(
        self, libraries: Libraries, kind: str, spec: LayerSpec, args: Args, ours: Results
    ) -> None:
        self.libraries, self.kind, self.spec, self.ours = libraries, kind, spec, ours
        self.inputs, self.weights, self.caches, self.step = parts_of(args)
        self.group = self.step.c4 if kind == "c4" else self.step.c128
        self.layouts = spec.layouts(kind)
        self.own = {name: getattr(self.caches, name).clone() for name in self.layouts}
        self.q = ours.q
        self.query: tuple[Tensor, Tensor] | None = None
        if kind == "c4":
            self.query = self._our_query()
        self.extra: tuple[Any, Any, Any] = (None, None, None)
        self.logits: Tensor | None = None
        self.rows: Tensor | None = None
        self.out: Tensor | None = None
        self.quantized: tuple[Tensor, Tensor] | None = None

    def makings(self) -> list[Making]:
        """The stages in their order."""
        found = [Making("window", self._window)]
        if self.kind != "window":
            found.append(Making("compressed", lambda: self._compress("", "compressed")))
        if self.kind == "c4":
            found += [
                Making("indexer_keys", lambda: self._compress("indexer_", "indexer")),
                Making("indexer_query", self._indexer_query),
                Making("logits", self._logits),
                Making("topk", self._topk, ("logits",)),
                Making("slots", self._slots, ("topk",)),
            ]
        selected = ("slots",) if self.kind == "c4" else ()
        return [
            *found,
            Making("attention", self._attention, selected),
            Making("inverse_rope_fp8", self._inverse_rope, ("attention",)),
        ]

    def written(self, name: str) -> list[Rows]:
        """The rows that a stage writes to the baseline's copies of the caches."""
        group, step = self.group, self.step
        of = {
            "window": (("swa", step.slot_mapping),),
            "compressed": (
                ("states", group.state_slot_mapping),
                ("compressed", group.slot_mapping),
            ),
            "indexer_keys": (
                ("indexer_states", group.state_slot_mapping),
                ("indexer", group.slot_mapping),
            ),
        }
        return [
            Rows(cache, self.layouts[cache], self.own[cache], getattr(self.caches, cache), slots)
            for cache, slots in of.get(name, ())
        ]

    def compare(self, name: str, found: Found) -> None:
        """Compare what a stage left beside rows of caches with ours."""
        checks = {
            "window": self._compare_q,
            "indexer_query": self._compare_query,
            "slots": self._compare_slots,
            "attention": self._compare_out,
            "inverse_rope_fp8": self._compare_quantized,
        }
        if name in checks:
            checks[name](found)

    def _compare_q(self, found: Found) -> None:
        if text := outside("query", self.q, self.ours.q, _QUERY):
            found.wrong.append(text)

    def _compare_query(self, found: Found) -> None:
        assert self.query is not None
        compare_codes("indexer_query", self.query, self._our_query(), found)

    def _compare_slots(self, found: Found) -> None:
        assert self.ours.slots is not None
        pair = [slots.sort(1).values for slots in (self.extra[1], self.ours.slots)]
        if wrong := int((pair[0] != pair[1]).any(1).sum()):
            tokens = pair[0].shape[0]
            found.wrong.append(f"selection: other rows of {wrong} of {tokens} tokens")

    def _compare_out(self, found: Found) -> None:
        assert self.out is not None
        if text := outside("attention", self.out, self.ours.out, DECODE_OUT):
            found.wrong.append(text)

    def _compare_quantized(self, found: Found) -> None:
        """With ours of the same attention output."""
        assert self.out is not None
        assert self.quantized is not None
        ours = dsv4_ops.inverse_rope_group_quantize(
            self.out, self.step.positions, self.weights.cos_sin_cache,
            num_groups=self.spec.num_groups, scale_layout="row",
        )  # fmt: skip
        baseline = [part.transpose(0, 1).contiguous() for part in self.quantized]
        pairs = [
            (codes.unflatten(-1, (scales.shape[-1], -1)), scales)
            for codes, scales in (baseline, ours)
        ]
        compare_codes("inverse_rope_fp8", pairs[0], pairs[1], found)

    def _library(self, name: str) -> Any:
        library = getattr(self.libraries, name)
        if isinstance(library, Exception):
            raise ImportError(f"{name} failed to load: {one_line(library)}")
        return library

    def _window(self) -> Call:
        """Its fused query norm, RoPE and insert; without the extension the insert alone, of keys
        that are rotated before."""
        step, swa, size = self.step, self.own["swa"], self.spec.attention.swa_block_size
        table = self.weights.cos_sin_cache
        if isinstance(self.libraries.extension, Exception):
            insert = self._library("vllm").quantize_and_insert_k_cache
            kv = dsv4_ops.apply_rope(self.inputs.kv, step.positions, table)
            return lambda: insert(kv, swa, step.slot_mapping, block_size=size)
        fused = self.libraries.extension.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        q, kv, eps = self.inputs.q, self.inputs.kv, self.spec.eps

        def call() -> None:  # 64 and 128 heads are those that it need not pad
            heads = q.shape[1]
            self.q = fused(
                q, kv, swa, step.slot_mapping, step.positions, table, heads, eps, size
            )  # fmt: skip

        return call

    def _compress(self, prefix: str, cache: str) -> Call:
        """States saved, then the finished windows compressed and stored."""
        save = self._library("states").save_partial_states
        store = self._library("compressor").compress_norm_rope_store_triton
        layout, states = self.layouts[cache], self.layouts[f"{prefix}states"]
        assert isinstance(layout, (MainLayout, IndexerLayout))
        assert isinstance(states, StateLayout)
        group, step, rows = self.group, self.step, states.rows(self.own[f"{prefix}states"])
        width = rows.shape[2] // 2
        kv, score = getattr(self.inputs, f"{prefix}kv_score").split(width, 1)
        shared: dict[str, Any] = {
            "positions": step.positions,
            "state_cache": rows,
            "slot_mapping": group.state_slot_mapping,
            "block_size": states.block_size,
            "state_width": width,
            "compress_ratio": self.spec.ratio(self.kind),
            "pdl_kwargs": {},
        }
        stored: dict[str, Any] = {
            **shared,
            "num_actual": step.positions.shape[0],
            "token_to_req_indices": step.req_indices,
            "block_table": group.state_block_table,
            "cos_sin_cache": self.weights.cos_sin_cache,
            "kv_cache": layout.kernel_view(self.own[cache])[:, :, 0],
            "k_cache_metadata": SimpleNamespace(slot_mapping=group.slot_mapping),
            "head_dim": layout.head_dim,
            "rope_head_dim": ROPE_DIM,
            "overlap": self.kind == "c4",
            "use_fp4_cache": False,
            "rms_norm_weight": getattr(self.weights, f"{prefix}norm_weight"),
            "rms_norm_eps": self.spec.eps,
            "quant_block": layout.quant_block,
            "token_stride": layout.data_bytes,
            "scale_dim": layout.scale_bytes,
        }
        ape = getattr(self.weights, f"{prefix}ape")

        def call() -> None:
            save(kv=kv, score=score, ape=ape, **shared)
            store(**stored)

        return call

    def _our_query(self) -> tuple[Tensor, Tensor]:
        inputs = self.inputs
        assert inputs.indexer_q is not None
        assert inputs.indexer_weights is not None
        codes, weights = dsv4_ops.indexer_quantize_q(
            inputs.indexer_q, inputs.indexer_weights, self.step.positions,
            self.weights.cos_sin_cache,
        )  # fmt: skip
        return codes, weights

    def _indexer_query(self) -> Call:
        quantize = self._library("indexer_query").fused_indexer_q_rope_quant
        inputs, table = self.inputs, self.weights.cos_sin_cache
        assert inputs.indexer_q is not None
        scales = IndexerLayout.head_dim**-0.5, inputs.indexer_q.shape[1] ** -0.5

        def call() -> None:
            self.query = quantize(
                self.step.positions, inputs.indexer_q, table, inputs.indexer_weights, *scales
            )

        return call

    def _logits(self) -> Call:
        size, group = self.spec.block_size("c4"), self.group

        def arguments() -> Args:
            assert self.query is not None
            return deep_gemm.arguments(
                *self.query, self.own["indexer"], group.lens, group.block_table, block_size=size
            )

        compute = deep_gemm.logits_call([arguments()], size, self._library("deep_gemm"))

        def call() -> None:
            self.logits = compute(*arguments())

        return call

    def _topk(self) -> Call:
        def call() -> None:
            assert self.logits is not None
            count = min(self.spec.attention.index_topk, self.logits.shape[1])
            self.rows = self.logits.topk(count, sorted=False).indices.to(torch.int32)

        return call

    def _slots(self) -> Call:
        translate = self._library("vllm").compute_global_topk_indices_and_lens
        valid = torch.ones_like(self.step.req_indices, dtype=torch.bool)
        group, size = self.group, self.spec.block_size("c4")

        def call() -> None:
            found = translate(self.rows, self.step.req_indices, group.block_table, size, valid)
            self.extra = (self.own["compressed"], found[0], found[1])

        return call

    def _attention(self) -> Call:
        step, spec = self.step, self.spec
        if self.kind == "c128":
            group, size = self.group, spec.block_size("c128")
            dense = dsv4_ops.dense_compressed_indices(
                step.positions,
                step.req_indices,
                group.block_table,
                block_size=size,
                compress_ratio=spec.attention.c128_ratio,
                max_compressed=group.block_table.shape[1] * size,
            )
            self.extra = (self.own["compressed"], dense.indices, dense.lens)
        page = 1 if self.kind == "window" else spec.block_size(self.kind)
        sizes = (spec.attention.swa_block_size, page)

        def arguments() -> Args:
            window = (self.own["swa"], step.swa_indices, step.swa_lens)
            return flash_mla.decode_arguments(
                self.q, *window, *self.extra, self.weights.attn_sink, block_sizes=sizes
            )

        attend = flash_mla.decode_call(
            [arguments()], spec.softmax_scale, self._library("flash_mla")
        )

        def call() -> Any:
            self.out = attend(*arguments())[0]
            return self.out

        return call

    def _inverse_rope(self) -> Call:
        undo = self._library("inverse_rope").fused_inv_rope_fp8_quant
        groups, table = self.spec.num_groups, self.weights.cos_sin_cache

        def call() -> Any:
            assert self.out is not None
            heads = self.out.shape[1] // groups
            self.quantized = undo(self.out, self.step.positions, table, groups, heads)
            return self.quantized

        return call


def baseline_calls(sets: Sequence[BaselineStages]) -> tuple[dict[str, list[Call]], list[str]]:
    """Calls of every stage over all input sets, and what stands in the way of the others. Every
    call has run once."""
    found: dict[str, list[Call]] = {}
    failed: dict[str, str] = {}
    for held in sets:
        for name, make, behind in held.makings():
            if name in failed or any(before not in found for before in behind):
                continue
            try:
                call = make()
                call()
                found.setdefault(name, []).append(call)
            except Exception as error:  # a broken baseline is a note in the row
                found.pop(name, None)
                failed[name] = f"{name}: {one_line(error)}"
    whole = {name: calls for name, calls in found.items() if len(calls) == len(sets)}
    return whole, list(failed.values())

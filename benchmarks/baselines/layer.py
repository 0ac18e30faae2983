"""A decode step of a layer on the baselines' kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.baselines import deep_gemm, flash_mla, vllm_metadata, vllm_ops
from benchmarks.cases.layer_cases import parts_of
from benchmarks.cases.layer_check import Found, Rows, compare_codes
from benchmarks.cases.token_check import Tolerance, outside
from benchmarks.harness.work import Args
from benchmarks.sparse_mla import DECODE_OUT
from dsv4_ops.attention import LayerSpec, layer as stages, output
from dsv4_ops.attention.tensors import LayerCall
from dsv4_ops.core.layout import IndexerLayout, StateLayout
from dsv4_ops.ops.rope import ROPE_DIM

Call = Callable[[], Any]

_QUERY = Tolerance(1e-2, 1e-2)  # tolerance of vLLM's test of its query norm
NOTES = {
    "window": "",
    "c4": "vLLM's kernels of the compressor and of the indexer's queries are those in Triton, "
    "where on an NVIDIA GPU it takes others in the CuTe DSL; ",
    "c128": "vLLM's kernel of the compressor is that in Triton, where on an NVIDIA GPU it takes "
    "another in the CuTe DSL; the slots of all compressed rows are there before, as its metadata "
    "makes them once a step; ",
}
"""The stages of a kind of layer that the baseline lacks, or computes in another way."""


class Libraries(NamedTuple):
    """The baselines of a bundle."""

    vllm: Any
    deep_gemm: Any
    flash_mla: Any
    extension: Any
    states: Any
    compressor: Any
    indexer_query: Any
    inverse_rope: Any


def load(folder: Path) -> Libraries:
    """Load all baselines of a bundle; any failure raises."""
    states, compressor = "save_partial_states", "fused_compress_quant_cache"
    files = (states, compressor, "fused_indexer_q", "fused_inv_rope_fp8_quant")
    return Libraries(
        vllm_metadata.load(folder, needed=("cache",)).cache,
        deep_gemm.load(folder),
        flash_mla.load(folder),
        vllm_ops.extension(folder),
        *(vllm_ops.triton_file(folder, name) for name in files),
    )


class Results(NamedTuple):
    """Results of our stages: queries, ``slots`` of the selected rows, and the attention output
    before inverse RoPE."""

    q: Tensor
    slots: Tensor | None
    out: Tensor


def our_results(kind: str, spec: LayerSpec, args: Args) -> Results:
    """Run our stages of a layer."""
    layer, slots = LayerCall(spec, kind, *parts_of(args)), None
    if kind == "c4":
        q, query = stages.insert(layer, schedule="decode", state_rings=False)
        assert query is not None
        slots = stages.select(layer, query, slots=True)
    else:
        q = stages.insert_window(layer)
    if kind == "c128":
        stages.insert_compressed(layer, state_rings=False)
    selected = None if slots is None else (slots, layer.step.c4.lens)
    return Results(q, slots, output.attend_decode(layer, q, selected, inverse_rope=False).out)


class BaselineStages:
    """The baseline's step for one input set; each stage reads the results of earlier stages."""

    def __init__(
        self, libraries: Libraries, kind: str, spec: LayerSpec, args: Args, ours: Results
    ) -> None:
        self.libraries, self.kind, self.spec, self.ours = libraries, kind, spec, ours
        self.inputs, self.weights, self.caches, self.step = parts_of(args)
        self.group = self.step.c4 if kind == "c4" else self.step.c128
        self.layouts = spec.layouts(kind)
        self.own = {name: getattr(self.caches, name).clone() for name in self.layouts}
        self.q = ours.q
        self.query: tuple[Any, Any] = self._our_query() if kind == "c4" else (None, None)
        self.extra: tuple[Any, Any, Any] = (None, None, None)
        self.logits: Any = None
        self.rows: Any = None
        self.out: Any = None
        self.quantized: Any = None

    def calls(self, found: Found | None = None) -> list[Call]:
        """Make and run each stage once, in order; return the calls. If ``found`` is given, compare
        the results with ours."""
        made: dict[str, Callable[[], Call]] = {"window": self._window}
        if self.kind != "window":
            made["compressed"] = lambda: self._compress("", "compressed")
        if self.kind == "c4":
            made["indexer_keys"] = lambda: self._compress("indexer_", "indexer")
            made |= {"indexer_query": self._indexer_query, "logits": self._logits}
            made |= {"topk": self._topk, "slots": self._slots}
        made |= {"attention": self._attention, "inverse_rope_fp8": self._inverse_rope}
        calls = []
        for name, make in made.items():
            call, rows = make(), self.written(name)
            for each in rows:
                each.spoil()
            call()
            calls.append(call)
            if found is not None:
                for each in rows:
                    each.compare(found)
                self.compare(name, found)
        return calls

    def written(self, name: str) -> list[Rows]:
        """Return the rows that a stage writes to the baseline's copies of the caches."""
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
        """Compare the other results of a stage with ours."""
        text = None
        if name == "window":
            text = outside("query", self.q, self.ours.q, _QUERY)
        elif name == "indexer_query":
            compare_codes(name, self.query, self._our_query(), found)
        elif name == "slots" and self.ours.slots is not None:
            left, right = (slots.sort(1).values for slots in (self.extra[1], self.ours.slots))
            if wrong := int((left != right).any(1).sum()):
                text = f"selection: other rows of {wrong} of {left.shape[0]} tokens"
        elif name == "attention":
            text = outside(name, self.out, self.ours.out, DECODE_OUT)
        elif name == "inverse_rope_fp8":  # ours, from the same attention output
            ours = dsv4_ops.inverse_rope_group_quantize(
                self.out, self.step.positions, self.weights.cos_sin_cache,
                num_groups=self.spec.num_groups, scale_layout="row",
            )  # fmt: skip
            baseline = [part.transpose(0, 1).contiguous() for part in self.quantized]
            pairs = [
                (codes.unflatten(-1, (scales.shape[-1], -1)), scales)
                for codes, scales in (baseline, ours)
            ]
            compare_codes(name, pairs[0], pairs[1], found)
        if text:
            found.wrong.append(text)

    def _window(self) -> Call:
        """Make the call of vLLM's fused query norm, RoPE and insert."""
        step, swa, size = self.step, self.own["swa"], self.spec.attention.swa_block_size
        table = self.weights.cos_sin_cache
        fused = self.libraries.extension.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        q, kv, eps = self.inputs.q, self.inputs.kv, self.spec.eps

        def call() -> None:  # it pads other numbers of heads to 64 or 128
            heads = q.shape[1]
            self.q = fused(
                q, kv, swa, step.slot_mapping, step.positions, table, heads, eps, size
            )  # fmt: skip

        return call

    def _compress(self, prefix: str, cache: str) -> Call:
        """Save states, then compress and store complete windows."""
        save = self.libraries.states.save_partial_states
        store = self.libraries.compressor.compress_norm_rope_store_triton
        layout = cast(Any, self.layouts[cache])
        states = cast(StateLayout, self.layouts[f"{prefix}states"])
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
        inputs: Any = self.inputs
        codes, weights = dsv4_ops.indexer_quantize_q(
            inputs.indexer_q, inputs.indexer_weights, self.step.positions,
            self.weights.cos_sin_cache,
        )  # fmt: skip
        return codes, weights

    def _indexer_query(self) -> Call:
        quantize = self.libraries.indexer_query.fused_indexer_q_rope_quant
        table, inputs = self.weights.cos_sin_cache, cast(Any, self.inputs)
        scales = IndexerLayout.head_dim**-0.5, inputs.indexer_q.shape[1] ** -0.5

        def call() -> None:
            self.query = quantize(
                self.step.positions, inputs.indexer_q, table, inputs.indexer_weights, *scales
            )

        return call

    def _logits(self) -> Call:
        size, group = self.spec.block_size("c4"), self.group

        def arguments() -> Args:
            return deep_gemm.arguments(
                *self.query, self.own["indexer"], group.lens, group.block_table, block_size=size
            )

        compute = deep_gemm.logits_call([arguments()], size, self.libraries.deep_gemm)

        def call() -> None:
            self.logits = compute(*arguments())

        return call

    def _topk(self) -> Call:
        def call() -> None:
            count = min(self.spec.attention.index_topk, self.logits.shape[1])
            self.rows = self.logits.topk(count, sorted=False).indices.to(torch.int32)

        return call

    def _slots(self) -> Call:
        translate = self.libraries.vllm.compute_global_topk_indices_and_lens
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

        attend = flash_mla.decode_call([arguments()], spec.softmax_scale, self.libraries.flash_mla)

        def call() -> Any:
            self.out = attend(*arguments())[0]
            return self.out

        return call

    def _inverse_rope(self) -> Call:
        undo = self.libraries.inverse_rope.fused_inv_rope_fp8_quant
        groups, table = self.spec.num_groups, self.weights.cos_sin_cache

        def call() -> Any:
            heads = self.out.shape[1] // groups
            self.quantized = undo(self.out, self.step.positions, table, groups, heads)
            return self.quantized

        return call

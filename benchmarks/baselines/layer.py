"""A decode step of a layer with the baselines' kernels."""

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
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.ops.rope import ROPE_DIM

Call = Callable[[], Any]

_QUERY = Tolerance(1e-2, 1e-2)  # as in vLLM's test of the query norm
NOTES = {
    "window": "",
    "c4": "vLLM's kernels of the compressor and of the indexer's queries are those in Triton, "
    "where on an NVIDIA GPU it takes others in the CuTe DSL; ",
    "c128": "vLLM's kernel of the compressor is that in Triton, where on an NVIDIA GPU it takes "
    "another in the CuTe DSL; the slots of all compressed rows are there before, as its metadata "
    "makes them once a step; ",
}
"""Notes, by kind of layer, on stages that the baseline lacks or computes in another way."""


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
    """Load all libraries of a bundle; any failure raises."""
    states, compressor = "save_partial_states", "fused_compress_quant_cache"
    files = (states, compressor, "fused_indexer_q", "fused_inv_rope_fp8_quant")
    return Libraries(
        vllm_metadata.load(folder, needed=("cache",)).cache, deep_gemm.load(folder),
        flash_mla.load(folder), vllm_ops.extension(folder),
        *(vllm_ops.triton_file(folder, name) for name in files),
    )  # fmt: skip


class Results(NamedTuple):
    """Queries, ``slots`` of the selected rows, and the attention output before the inverse RoPE."""

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
    """The baseline's step on one input set; a stage reads the results of earlier stages."""

    def __init__(
        self, libraries: Libraries, kind: str, spec: LayerSpec, args: Args, ours: Results
    ) -> None:
        self.libraries, self.kind, self.spec, self.ours = libraries, kind, spec, ours
        inputs, self.weights, self.caches, self.step = parts_of(args)
        self.inputs: Any = inputs
        self.group = self.step.c4 if kind == "c4" else self.step.c128
        self.layouts = spec.layouts(kind)
        self.own = {name: getattr(self.caches, name).clone() for name in self.layouts}
        self.table, self.q = self.weights.cos_sin_cache, ours.q
        self.query: tuple[Any, Any] = self._our_query() if kind == "c4" else (None, None)
        self.extra: tuple[Any, Any, Any] = (None, None, None)
        self.logits = self.rows = self.out = self.quantized = cast(Any, None)

    def calls(self, found: Found | None = None) -> list[Call]:
        """Run each stage once, in order, and return the stages' calls. With ``found``, compare the
        stages' results with ours."""
        made: dict[str, Callable[[], Call]] = {"window": lambda: self._window}
        if self.kind != "window":
            made["compressed"] = lambda: self._compress("", "compressed")
        if self.kind == "c4":
            made["indexer_keys"] = lambda: self._compress("indexer_", "indexer")
            made |= {"indexer_query": lambda: self._indexer_query, "logits": self._logits}
            made |= {"topk": lambda: self._topk, "slots": self._slots}
        made |= {"attention": self._attention, "inverse_rope_fp8": lambda: self._inverse_rope}
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
        """Return the rows that a stage writes into the baseline's copies of the caches."""
        of = {"window": {"swa": self.step.slot_mapping}}
        for stage, prefix, cache in (
            ("compressed", "", "compressed"),
            ("indexer_keys", "indexer_", "indexer"),
        ):
            states = {f"{prefix}states": self.group.state_slot_mapping}
            of[stage] = {**states, cache: self.group.slot_mapping}
        return [
            Rows(cache, self.layouts[cache], self.own[cache], getattr(self.caches, cache), slots)
            for cache, slots in of.get(name, {}).items()
        ]

    def compare(self, name: str, found: Found) -> None:
        """Compare with ours the results of a stage that are not rows of a cache."""
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
        elif name == "inverse_rope_fp8":  # our op gets the baseline's attention output too
            ours = dsv4_ops.inverse_rope_group_quantize(
                self.out, self.step.positions, self.table, num_groups=self.spec.num_groups,
                scale_layout="row",
            )  # fmt: skip
            baseline = [part.transpose(0, 1).contiguous() for part in self.quantized]
            pairs = [
                (codes.unflatten(-1, (scales.shape[-1], -1)), scales)
                for codes, scales in (baseline, ours)
            ]
            compare_codes(name, pairs[0], pairs[1], found)
        if text:
            found.wrong.append(text)

    def _window(self) -> None:
        """Run vLLM's query norm, RoPE and insert, which pad the number of heads to 64 or 128."""
        fused = self.libraries.extension.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        q, step, size = self.inputs.q, self.step, self.spec.attention.swa_block_size
        self.q = fused(
            q, self.inputs.kv, self.own["swa"], step.slot_mapping, step.positions, self.table,
            q.shape[1], self.spec.eps, size,
        )  # fmt: skip

    def _compress(self, prefix: str, cache: str) -> Call:
        """Return a call that saves states, then compresses and stores complete windows."""
        layout, states = (cast(Any, self.layouts[name]) for name in (cache, f"{prefix}states"))
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
        saved = {"kv": kv, "score": score, "ape": getattr(self.weights, f"{prefix}ape"), **shared}
        stored: dict[str, Any] = {
            **shared,
            "num_actual": step.positions.shape[0],
            "token_to_req_indices": step.req_indices,
            "block_table": group.state_block_table,
            "cos_sin_cache": self.table,
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

        def call() -> None:
            self.libraries.states.save_partial_states(**saved)
            self.libraries.compressor.compress_norm_rope_store_triton(**stored)

        return call

    def _our_query(self) -> tuple[Any, Any]:
        query = (self.inputs.indexer_q, self.inputs.indexer_weights)
        codes, weights = dsv4_ops.indexer_quantize_q(*query, self.step.positions, self.table)
        return codes, weights

    def _indexer_query(self) -> None:
        quantize = self.libraries.indexer_query.fused_indexer_q_rope_quant
        q, weights = self.inputs.indexer_q, self.inputs.indexer_weights
        scales = IndexerLayout.head_dim**-0.5, q.shape[1] ** -0.5
        self.query = quantize(self.step.positions, q, self.table, weights, *scales)

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

    def _topk(self) -> None:
        count = min(self.spec.attention.index_topk, self.logits.shape[1])
        self.rows = self.logits.topk(count, sorted=False).indices.to(torch.int32)

    def _slots(self) -> Call:
        translate = self.libraries.vllm.compute_global_topk_indices_and_lens
        valid = torch.ones_like(self.step.req_indices, dtype=torch.bool)
        where = (self.step.req_indices, self.group.block_table, self.spec.block_size("c4"), valid)

        def call() -> None:
            self.extra = (self.own["compressed"], *translate(self.rows, *where)[:2])

        return call

    def _attention(self) -> Call:
        step, spec, table = self.step, self.spec, self.group.block_table
        size = 1 if self.kind == "window" else spec.block_size(self.kind)
        if self.kind == "c128":
            dense = dsv4_ops.dense_compressed_indices(
                step.positions, step.req_indices, table, block_size=size,
                compress_ratio=spec.attention.c128_ratio, max_compressed=table.shape[1] * size,
            )  # fmt: skip
            self.extra = (self.own["compressed"], dense.indices, dense.lens)
        sizes = (spec.attention.swa_block_size, size)

        def arguments() -> Args:
            window = (self.own["swa"], step.swa_indices, step.swa_lens)
            return flash_mla.decode_arguments(
                self.q, *window, *self.extra, self.weights.attn_sink, block_sizes=sizes
            )

        attend = flash_mla.decode_call([arguments()], spec.softmax_scale, self.libraries.flash_mla)

        def call() -> None:
            self.out = attend(*arguments())[0]

        return call

    def _inverse_rope(self) -> Any:
        undo = self.libraries.inverse_rope.fused_inv_rope_fp8_quant
        groups = self.spec.num_groups
        heads = self.out.shape[1] // groups
        self.quantized = undo(self.out, self.step.positions, self.table, groups, heads)
        return self.quantized

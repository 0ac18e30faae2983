"""Steps of a patched model over caches that an engine, such as vLLM, allocates and assigns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.attention import (
    AttentionStep,
    LayerCaches,
    MlaCache,
    StateTables,
    build_attention_step,
    build_mla_step,
)
from dsv4_ops.attention.metadata import BlockTables
from dsv4_ops.core.checks import checks_are_done
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import Layout, MlaFp8Layout
from dsv4_ops.core.torch_compat import one_graph_for_all_sizes
from dsv4_ops.core.types import MAX_REQUESTS
from dsv4_ops.dispatch.run_time_launches import run_time_launches
from dsv4_ops.integrations.transformers.architectures.base import (
    ModelSpec,
    Runner,
    StepRun,
    draft_of,
    run_part,
)
from dsv4_ops.integrations.transformers.architectures.deepseek_v3.spec import MlaModelSpec
from dsv4_ops.integrations.transformers.architectures.deepseek_v4.spec import DeepseekV4Spec
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.modules.replacement import with_methods
from dsv4_ops.integrations.transformers.steps.step import embedded, run_layers
from dsv4_ops.integrations.vllm.pool import CompiledParts, pooled


class GroupTensors(NamedTuple):
    """An engine's metadata of a step, for the caches that share a block table.

    Attributes:
        query_start_loc: First token of every request, then the end of the last request, [num_reqs +
            1], int32.
        seq_lens: Length of every request including this step's tokens, [num_reqs], int32.
        block_table: Blocks of every request, [num_reqs, max_blocks], int32.
        slot_mapping: Slot of every token, [num_tokens or more], int64; -1 for padding.
        max_query_len: Maximum tokens of a request in this step, or an upper bound, as an int.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int


class CacheSpec(NamedTuple):
    """How an engine allocates a cache of a layer.

    Attributes:
        layout: Layout of a block.
        block_tokens: Tokens per block.
        ratio: Tokens per row.
        window: Later steps read this many of the last positions; None for all positions.
    """

    layout: Layout
    block_tokens: int
    ratio: int = 1
    window: int | None = None


def cache_name(layer: int, field: str) -> str:
    """Return the name of a layer's cache in an engine."""
    return f"layers.{layer}.{field}"


@dataclass(frozen=True)
class EngineCache:
    """A cache with only the fields that ``run_layers`` and ``run_draft`` read.

    Attributes:
        layers: Caches of every layer.
        rope: RoPE tables.
        draft: Caches of the draft layer.
    """

    layers: tuple[Any, ...]
    rope: Any
    draft: tuple[Any, ...] = ()


class V4Family:
    """DeepSeek-V4: caches of windows, compressed rows and states, with a block table for each.

    Args:
        spec: Spec of the patched model.
    """

    def __init__(self, spec: DeepseekV4Spec) -> None:
        self.spec = spec

    def caches(self, kind: str) -> dict[str, CacheSpec]:
        """Return the specs of a layer's caches, by the field names of ``LayerCaches``."""
        layers = self.spec.layers
        attention = layers.attention
        windows = {"window": 0, "c4": 2 * attention.c4_ratio, "c128": attention.c128_ratio}
        specs = {}
        for field, layout in layers.layouts(kind).items():
            if field in ("compressed", "indexer"):
                specs[field] = CacheSpec(layout, attention.block_tokens, layers.ratio(kind))
            else:
                window = attention.window_size if field == "swa" else windows[kind]
                specs[field] = CacheSpec(layout, layout.block_size, window=window)
        return specs

    def draft_cache(self) -> tuple[str, CacheSpec]:
        """Return the field and the spec of the draft layer's cache."""
        return "swa", self.caches("window")["swa"]

    def stream_shape(self, config: Any) -> tuple[int, ...]:
        """Return the shape of one token's streams, which the draft layer reads."""
        return config.hc_mult, config.hidden_size

    def bind(self, tensors: Mapping[str, Tensor]) -> LayerCaches:
        """Return a layer's caches."""
        return LayerCaches(**tensors)

    def groups(self, of: Callable[[int, str], GroupTensors]) -> V4Groups:
        """Find which layers share a block table. An engine's first step calls this method."""
        windows: list[int] = []
        window_of = []
        for layer in range(len(self.spec.kinds)):
            same = (i for i, each in enumerate(windows) if _same(of(layer, "swa"), of(each, "swa")))
            found = next(same, len(windows))
            window_of.append(found)
            if found == len(windows):
                windows.append(layer)
        first: dict[str, int] = {}
        for layer, kind in enumerate(self.spec.kinds):
            if kind == "window":
                continue
            first.setdefault(kind, layer)
            for field in self.caches(kind):
                if field != "swa":
                    shared = "states" if field.endswith("states") else "compressed"
                    _check_shared(
                        of(layer, field), of(first[kind], shared), cache_name(layer, field)
                    )
        return V4Groups(tuple(windows), tuple(window_of), first)

    def build(
        self, groups: V4Groups, of: Callable[[int, str], GroupTensors], schedule: str, run: Runner
    ) -> tuple[AttentionStep, ...]:
        """Build the metadata of every layer. Layers whose window caches have the same block table
        share their metadata."""
        windows = [of(layer, "swa") for layer in groups.windows]
        # detach, because a graph is compiled again if two of its arguments are the same tensor
        compressed, states = (
            {kind: of(layer, field).block_table.detach() for kind, layer in groups.first.items()}
            for field in ("compressed", "states")
        )
        first = run("metadata", self._whole, windows[0], compressed, states, schedule)
        others = (run("window", self._with_window, first, each, schedule) for each in windows[1:])
        steps = (first, *others)
        return tuple(steps[window] for window in groups.window_of)

    def _whole(
        self,
        swa: GroupTensors,
        compressed: dict[str, Tensor],
        states: dict[str, Tensor],
        schedule: str,
        kinds: tuple[str, ...] | None = None,
    ) -> AttentionStep:
        spec, num_tokens = self.spec, swa.slot_mapping.shape[0]
        layers = spec.layers_for(schedule, num_tokens)
        layers = layers if kinds is None else replace(layers, kinds=kinds)
        none = dict.fromkeys(("c4", "c128"), swa.block_table.new_zeros((len(swa.seq_lens), 0)))
        plans = schedule == "decode" and num_tokens <= MAX_REQUESTS
        return build_attention_step(
            layers,
            swa.query_start_loc,
            swa.seq_lens,
            swa.slot_mapping,
            BlockTables(swa.block_table, **(none | compressed)),
            StateTables(**(none | states)),
            # compute this tensor in inference mode, as ``with_window`` does: the graphs of layers
            # would be compiled again for a tensor of the engine, which is no inference tensor
            is_valid_token=swa.slot_mapping >= 0,
            plan_heads=spec.plan_heads if plans else 0,
        )

    def build_draft(self, swa: GroupTensors, schedule: str, run: Runner) -> AttentionStep:
        """Build the metadata of the draft layer, which has windows only."""
        kinds = self.spec.draft_kinds("DeepseekDraft")
        step: AttentionStep = run("draft_metadata", self._whole, swa, {}, {}, schedule, kinds)
        return step

    def _with_window(self, step: AttentionStep, swa: GroupTensors, schedule: str) -> AttentionStep:
        layers = self.spec.layers_for(schedule, swa.slot_mapping.shape[0])
        return step.with_window(layers, swa.block_table, swa.slot_mapping)

    def saves_first(self, schedule: str, decode_tokens: int) -> bool:
        """Whether a token may read states that another request saves in the same step.

        This happens if the requests share a prefix. A shared prefix ends at the end of a block. The
        first token that reads states of the prefix completes the next C4 window. A decode step with
        fewer than ``c4_ratio`` tokens per request does not reach this token.
        """
        return schedule == "prefill" or decode_tokens >= self.spec.layers.attention.c4_ratio


class V4Groups(NamedTuple):
    """Layers of V4 that share block tables.

    Attributes:
        windows: One layer for each block table of window caches.
        window_of: For every layer, the index in ``windows`` of the layer with the same block table.
        first: First layer of every kind that has a compressor.
    """

    windows: tuple[int, ...]
    window_of: tuple[int, ...]
    first: dict[str, int]


class MlaFamily:
    """DeepSeek-V3 and V2: one cache of latent rows per layer, and one block table for all layers.

    Args:
        spec: Spec of the patched model.
    """

    def __init__(self, spec: MlaModelSpec) -> None:
        self.spec = spec

    def caches(self, kind: str) -> dict[str, CacheSpec]:
        """Return the specs of a layer's caches, by the field names of ``MlaCache``."""
        layout = self.spec.layers.cache_layout()
        return {"kv": CacheSpec(layout, layout.block_size)}

    def draft_cache(self) -> tuple[str, CacheSpec]:
        """Return the field and the spec of the draft layer's cache."""
        return "kv", self.caches("mla")["kv"]

    def stream_shape(self, config: Any) -> tuple[int, ...]:
        """Return the shape of one token's streams, which the draft layer reads."""
        return (config.hidden_size,)

    def bind(self, tensors: Mapping[str, Tensor]) -> MlaCache:
        """Return a layer's cache; FP8 codes have a scale of 1."""
        rows = tensors["kv"]
        scaled = self.spec.layers.layout == MlaFp8Layout.tag
        return MlaCache(rows, torch.ones(1, device=rows.device) if scaled else None)

    def groups(self, of: Callable[[int, str], GroupTensors]) -> None:
        """Check that all layers share a block table. An engine's first step calls this method."""
        for layer in range(len(self.spec.kinds)):
            _check_shared(of(layer, "kv"), of(0, "kv"), cache_name(layer, "kv"))

    def build(
        self, groups: None, of: Callable[[int, str], GroupTensors], schedule: str, run: Runner
    ) -> tuple[Any, ...]:
        """Build the metadata that all layers share. Prefills also use absorbed queries."""
        step = run("metadata", self._whole, of(0, "kv"))
        return (step,) * len(self.spec.kinds)

    def _whole(self, group: GroupTensors) -> Any:
        return build_mla_step(
            self.spec.layers,
            group.query_start_loc,
            group.seq_lens,
            group.block_table,
            group.slot_mapping >= 0,
            num_tokens=group.slot_mapping.shape[0],
        )

    def build_draft(self, group: GroupTensors, schedule: str, run: Runner) -> Any:
        """Build the metadata of the draft layer."""
        return run("metadata", self._whole, group)

    def saves_first(self, schedule: str, decode_tokens: int) -> bool:
        """False: there are no states."""
        return False


def family_of(spec: ModelSpec) -> V4Family | MlaFamily:
    """Return how an engine runs models with this spec."""
    if isinstance(spec, DeepseekV4Spec):
        return V4Family(spec)
    assert isinstance(spec, MlaModelSpec)  # every other family has this spec
    return MlaFamily(spec)


class EngineSteps:
    """Steps of a patched model over the caches of an engine.

    Args:
        model: The patched model.
        max_model_len: Maximum tokens of a request.
        decode_tokens: Maximum tokens of a request in a decode step, including drafts.
        backend: Backend of ``torch.compile`` for the metadata, each kind of layer and the norm, as
            in ``compile_step(mode="regional", dynamic=True)``; None runs all parts eagerly.
        most_drafted: Maximum tokens of a step if a draft layer reads their streams
            (``run_streams``), else 0.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        decode_tokens: int = 1,
        backend: Any = None,
        most_drafted: int = 0,
    ) -> None:
        self.model, self.max_model_len, self.decode_tokens = model, max_model_len, decode_tokens
        self.spec: ModelSpec = model.dsv4_ops_spec
        self.family: Any = family_of(self.spec)
        self.rope = self.spec.rope_tables(max_model_len, model.device)
        self.layers: tuple[Any, ...] = ()
        self.draft_layers: tuple[Any, ...] = ()
        self.streams: Tensor | None = None
        self.stream_shape: tuple[int, ...] = self.family.stream_shape(model.config)
        if most_drafted:
            # a fixed address, to which CUDA graphs can write
            shape = (most_drafted, math.prod(self.stream_shape))
            self.streams = torch.zeros(shape, dtype=self.spec.dtype, device=model.device)
        self.groups: Any = None
        self._found = False
        self._parts = None if backend is None else CompiledParts(backend)
        self._model = model if backend is None else with_methods(model)
        self._body = self._model.model

    def bind(self, tensors: Callable[[int, str], Tensor]) -> None:
        """Store the caches that the engine allocated, by layer and field.

        Raises:
            NotImplementedError: layers are compiled, and the caches are not in one pool.
        """
        specs = [self.family.caches(kind) for kind in self.spec.kinds]
        views = [
            {field: tensors(layer, field) for field in fields} for layer, fields in enumerate(specs)
        ]
        self.layers, self._found = self._bound(views, specs), False

    def bind_draft(self, tensor: Tensor) -> None:
        """Store the engine's cache of the draft layer; compile the layer unless parts are eager."""
        field, spec = self.family.draft_cache()
        self.draft_layers = self._bound([{field: tensor}], [{field: spec}])
        if self._parts is not None:
            for tokens, group in self._padding():
                streams = self.model.lm_head.weight.new_zeros(
                    (len(tokens), math.prod(self.stream_shape)), dtype=self.spec.dtype
                )
                self.draft_hidden(self.draft(tokens, streams, group))

    def _bound(
        self, views: list[dict[str, Tensor]], specs: list[dict[str, CacheSpec]]
    ) -> tuple[Any, ...]:
        if self._parts is None:
            return tuple(map(self.family.bind, views))
        layouts = [{field: one.layout for field, one in fields.items()} for fields in specs]
        return tuple(pooled(views, layouts, self.family.bind))

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, metadata: Mapping[str, GroupTensors]) -> Tensor:
        """Run all layers on the tokens of a step, [num_tokens].

        ``metadata`` has the tensors of each cache's group, by ``cache_name``. Return the final
        hidden states, [num_tokens, hidden_size].
        """
        most = next(iter(metadata.values())).max_query_len
        schedule = "decode" if most <= self.decode_tokens else "prefill"

        def of(layer: int, field: str) -> GroupTensors:
            group = metadata[cache_name(layer, field)]
            # drop max_query_len, because Dynamo would compile a graph for each value of this int
            return group._replace(slot_mapping=group.slot_mapping[: len(tokens)], max_query_len=0)

        if not self._found:
            self.groups, self._found = self.family.groups(of), True
        # the checks have passed in ``profiled``, which engines call first to measure memory
        done = nullcontext() if self._parts is None else checks_are_done()
        with self._runs(schedule) as run, done:
            return self._run(tokens, of, schedule, run)

    def _run(
        self, tokens: Tensor, of: Callable[[int, str], GroupTensors], schedule: str, run: Runner
    ) -> Tensor:
        steps = self.family.build(self.groups, of, schedule, run)
        cache: Any = EngineCache(self.layers, self.rope)
        save_first = self.family.saves_first(schedule, self.decode_tokens)
        step_run = StepRun(
            steps[0],
            cache,
            schedule,
            state_rings=False,
            run=run,
            save_first=save_first,
            layer_steps=steps,
        )
        tokens = tokens.to(torch.int64)
        if self.streams is None:
            return run_layers(self._body, self.spec, tokens, None, step_run).flatten(0, -2)
        ids, hidden = embedded(self._body, tokens, None, steps[0])
        streams = self.spec.run_streams(self._body, hidden, ids, step_run)
        self.streams[: len(tokens)].copy_(streams[0].flatten(1))
        return self.spec.normed(self._body, streams, "norm", run).flatten(0, -2)

    @torch.inference_mode()
    def draft(self, tokens: Tensor, streams: Tensor, group: GroupTensors) -> Tensor:
        """Run the draft layer on the streams of tokens, and on the token after each of them.

        ``streams`` and the result are [num_tokens, values per token].
        """
        schedule = "decode" if group.max_query_len <= self.decode_tokens else "prefill"
        group = group._replace(slot_mapping=group.slot_mapping[: len(tokens)], max_query_len=0)
        with self._runs(schedule) as run:
            step = self.family.build_draft(group, schedule, run)
            cache: Any = EngineCache((), self.rope, self.draft_layers)
            step_run = StepRun(step, cache, schedule, False, run)
            by_stream = streams.unflatten(-1, self.stream_shape)[None]
            tokens = tokens.to(torch.int64)
            out = self.spec.run_draft("draft", self._model, tokens, by_stream, step_run)
        return out[0].flatten(1)

    @torch.inference_mode()
    def draft_hidden(self, streams: Tensor) -> Tensor:
        """Return the hidden states for the head, from the streams that ``draft`` returned."""
        by_stream = streams.unflatten(-1, self.stream_shape)[None]
        with self._runs("draft") as run:
            hidden: Tensor = self.spec.normed(draft_of(self._model), by_stream, "norm", run)
        return hidden[0]

    @contextmanager
    def _runs(self, schedule: str) -> Iterator[Runner]:
        """Yield the ``Runner`` of a step. The runner runs the parts eagerly, or compiles each part
        for all sizes."""
        if self._parts is None:
            yield run_part
            return
        with one_graph_for_all_sizes(), run_time_launches():
            yield partial(self._parts.run, schedule)

    def compile(self) -> None:
        """Compile all parts by running steps of padding, which write to no cache. If layers run
        eagerly, do nothing."""
        if self._parts is None:
            return
        names = [
            cache_name(layer, field)
            for layer, kind in enumerate(self.spec.kinds)
            for field in self.family.caches(kind)
        ]
        for tokens, group in self._padding():
            metadata = dict.fromkeys(names, group)
            # two tables, so that the layers form two groups
            other = group._replace(block_table=group.block_table.clone())
            for layer in range(1, len(self.spec.kinds)):
                metadata[cache_name(layer, "swa")] = other
            self._found = False
            self(tokens, metadata)
        self._found = False

    def _padding(self) -> Iterator[tuple[Tensor, GroupTensors]]:
        """Yield steps whose tokens have no slot. One step has a single token, because a step of one
        token needs its own graph."""
        device = self.model.device
        numbers = partial(torch.tensor, dtype=torch.int32, device=device)
        table = numbers([[0, 0]])
        for count, most in ((2, self.max_model_len), (2, 1), (1, 1)):
            slots = torch.full((count,), -1, device=device)
            group = GroupTensors(numbers([0, count]), numbers([0]), table, slots, most)
            yield slots.clamp(min=0).int(), group

    @torch.no_grad()
    def profiled(self, tokens: Tensor) -> Tensor:
        """Run a batch of ``len(tokens)`` tokens on a temporary cache, so that an engine can
        measure memory."""
        length = min(len(tokens), self.max_model_len)
        rows = -(-len(tokens) // length)
        cache = PagedCache.for_model(
            self.model, max_batch_size=rows, max_cache_len=length, max_chunk=length
        )
        ids = tokens.new_zeros((rows, length), dtype=torch.int64)
        hidden: Tensor = self.model.model(ids, cache=cache).last_hidden_state
        return hidden.flatten(0, 1)[: len(tokens)]


def _same(a: GroupTensors, b: GroupTensors) -> bool:
    return a.block_table.data_ptr() == b.block_table.data_ptr()


def _check_shared(group: GroupTensors, wanted: GroupTensors, name: str) -> None:
    if not _same(group, wanted):
        raise argument_error(
            "DeepseekForCausalLM",
            name,
            must="share a block table with the other layers of its kind",
            got="a block table of its own",
            do="Report the layers of the model, and the release of vLLM",
            kind=NotImplementedError,
        )

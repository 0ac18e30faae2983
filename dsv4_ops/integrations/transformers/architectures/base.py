"""The interface of a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.modules.bf16_experts import Bf16Experts
from dsv4_ops.integrations.transformers.modules.quantized import QuantizedWeights
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite, refresh
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.tensors import CacheTensors

_OLDEST = (5, 17)


def require_transformers(op: str) -> Any:
    """Import ``transformers``, or raise if it is missing or too old for DeepSeek-V4."""
    advice = 'Install "dsv4_ops[transformers]"'
    try:
        import transformers
    except ImportError as error:
        raise argument_error(
            op,
            "transformers",
            must="be installed",
            got="no such module",
            do=advice,
            kind=ImportError,
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _OLDEST:
        raise argument_error(
            op,
            "transformers",
            must="be " + ".".join(map(str, _OLDEST)) + " or newer",
            got=transformers.__version__,
            do=advice,
            kind=ImportError,
        )
    return transformers


DRAFT = "mtp"
"""Name of the draft layer among the modules of a model."""


def draft_of(model: Any) -> Any:
    """The draft layer of a patched model, or None."""
    return model._modules.get(DRAFT)


Runner = Callable[..., Any]
"""Runs a part of a step: called with the part's name, its function, and the function's arguments.
Parts of one name have the same code, such as layers of one kind."""


def run_part(_: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
    """The ``Runner`` that calls the function."""
    return function(*args, **rest)


@dataclass(frozen=True)
class Requests:
    """The requests of a step, in the order of their tokens.

    Attributes:
        query_start_loc: First token of every request and one past the last, [num_reqs + 1], int32.
        seq_lens: Length of every request including this step's tokens, [num_reqs], int32; 0 for
            padding.
        rows: Cache row of every request, [num_reqs], int32; -1 for padding.
        indices: Request of every token, [num_tokens], int32; of no meaning for padding.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor
    indices: Tensor


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step in the cache.

    Attributes:
        tokens: Cache row and position of every token; -1 for tokens that are not stored.
        ends: Length of every token's request after the step, [num_tokens], int32.
        num_reqs: Requests of the step, padding included.
        requests: Returns the requests of the step, for families whose layers need them.
    """

    tokens: TokenMap
    ends: Tensor
    num_reqs: int
    requests: Callable[[], Requests]


@dataclass(frozen=True)
class LayerContext:
    """Passed to an attention layer in place of Hugging Face's masks and cache."""

    step: Any
    caches: Any
    rope: Tensor
    schedule: str
    state_rings: bool


WITHOUT_MASKS = dict.fromkeys(("position_embeddings", "position_ids", "attention_mask"))
"""Arguments of layers that only Hugging Face's attention reads; steps do not run it."""


@dataclass(frozen=True)
class StepRun:
    """Arguments of all layers of a step.

    Attributes:
        step: From ``ModelSpec.build_step``.
        cache: The caches.
        schedule: "decode" or "prefill".
        state_rings: As for ``attention_layer``.
        run: Runs the parts.
        output_tokens: Tokens whose final states are returned, int [n]; None for all.
    """

    step: Any
    cache: CacheTensors
    schedule: str
    state_rings: bool
    run: Runner = run_part
    output_tokens: Tensor | None = None

    def context(self, caches: Any, rope: Tensor) -> LayerContext:
        """Return the context of the layer with these caches."""
        return LayerContext(self.step, caches, rope, self.schedule, self.state_rings)


class Execution(NamedTuple):
    """How the steps of a model run, as passed to ``patch``."""

    batch_invariant: bool = False
    impl: str = AUTO
    plan: bool = True
    parallel: ContextParallel | None = None
    query: str | None = None


def unpatched(op: str, model: Any, advice: str = "Call patch first") -> Exception:
    """The error for an object that ``patch`` did not change."""
    is_model = isinstance(model, torch.nn.Module)
    actual = f"an unpatched {type(model).__name__}" if is_model else kind_of(model)
    return argument_error(op, "model", must="be patched", got=actual, do=advice)


def dtype_of(config: Any, default: torch.dtype) -> torch.dtype:
    """Dtype of a model; ``default`` if none was made from this configuration."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else default


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """The configuration of a patched model, and how its family runs a step.

    Attributes:
        kinds: Kind of every layer.
        recipe, kv: As passed to ``patch``.
        dtype: Dtype of the model.
        fingerprint: Everything that a cache depends on, as "name=value" joined by "; ".
    """

    kinds: tuple[str, ...]
    recipe: Recipe
    kv: str
    dtype: torch.dtype
    fingerprint: str

    causal_lm: ClassVar[tuple[str, ...]]
    """Classes of transformers that ``patch`` takes."""
    memory_groups: ClassVar[dict[str, str]]
    """Group of ``PagedCache.memory`` of every cache of a layer, by its name."""
    shared_groups: ClassVar[tuple[str, ...]]
    """Groups of which each rank of ``parallel`` has a part."""

    @classmethod
    @abstractmethod
    def of(cls, op: str, config: Any, kv: str, recipe: Recipe, execution: Execution) -> ModelSpec:
        """Build the spec of ``config``; raise an error of ``op`` if it is not supported."""

    def scheduled(self, device: torch.device) -> ModelSpec:
        """Add what a library's schedules depend on, for a model on ``device``."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSpec:
        return self

    @property
    @abstractmethod
    def impl(self) -> str:
        """As passed to ``patch``."""

    @property
    def parallel(self) -> ContextParallel | None:
        """Ranks that share the cache; None where there is one."""
        return None

    @property
    def shards_heads(self) -> bool:
        """Whether each of these ranks has a part of the query heads."""
        return self.parallel is not None and self.parallel.shards_heads

    @property
    @abstractmethod
    def block_tokens(self) -> int:
        """Positions per block of the pool."""

    # The cache

    @abstractmethod
    def rings(self, max_cache_len: int, max_chunk: int, next_n: int) -> dict[str, int]:
        """Blocks per row of every table whose blocks are a ring, by the name of the table."""

    @abstractmethod
    def tables(self, pool: Tensor, rings: dict[str, int], max_cache_len: int) -> Any:
        """Make the block tables; ``pool`` is that of the shared blocks, on the cache's device."""

    @abstractmethod
    def rope_tables(self, num_positions: int, device: torch.device) -> Any:
        """Make the cosines and sines of all layers."""

    @abstractmethod
    def layer_caches(
        self, kind: str, num_rows: int, num_blocks: int, rings: dict[str, int], device: torch.device
    ) -> Any:
        """Allocate the caches of a layer."""

    @abstractmethod
    def kind_of(self, caches: Any) -> str:
        """Kind of the layer that caches are for."""

    # A step

    @abstractmethod
    def build_step(self, step: StepTokens, cache: CacheTensors, schedule: str) -> Any:
        """Build what the layers of a step share; it has ``positions``, -1 for padding.
        ``schedule`` is "decode" or "prefill"."""

    @abstractmethod
    def most_tokens(self, cache: CacheTensors) -> int:
        """Maximum tokens of a request in one step."""

    @abstractmethod
    def can_go_back(self, first: Tensor, cache: Any) -> Tensor:
        """Whether rows of a ``PagedCache`` can go back to positions ``first`` [batch, 1]: nothing
        that tokens from there on read was overwritten."""

    # The model

    @abstractmethod
    def run_layers(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        """Run all layers on ``hidden`` [1, num_tokens, hidden_size]; return the normed states of
        the tokens in ``step_run.output_tokens``."""

    def states_of(self, hidden: Any) -> Tensor:
        """Return a layer's input in Hugging Face's form, [1, num_tokens, ...]."""
        states: Tensor = hidden
        return states

    def run_streams(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        """Run all layers; return the residual streams, which a draft layer reads."""
        raise NotImplementedError

    def normed(self, body: Any, streams: Tensor) -> Tensor:
        """Return the normed states of the streams that ``run_streams`` returns."""
        raise NotImplementedError

    @abstractmethod
    def attention(self, module: Any, hidden: Tensor, context: LayerContext) -> Tensor:
        """Attention output of a Hugging Face layer, for [1, num_tokens, hidden_size]."""

    @property
    @abstractmethod
    def family_rewrites(self) -> tuple[Rewrite, ...]:
        """Changes of the family's modules besides the forwards of model and attention."""

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """``family_rewrites``, and changes of modules that all families have."""
        settings = (self.recipe, self.impl)
        return (*self.family_rewrites, Bf16Experts(*settings), QuantizedWeights(*settings))

    def refresh(self, op: str, body: Any, *, copies_only: bool = False) -> None:
        """Bring the modules of ``body`` up to date with their weights, before an eager step.

        With ``copies_only``, do so for copies of weights: other layouts share the weights' memory.
        """
        if torch.compiler.is_compiling():
            return
        rewrites = self.rewrites
        refresh(op, body, [one for one in rewrites if one.copies_weights or not copies_only])

    @abstractmethod
    def skipped_modules(self, attention: Any) -> Iterator[tuple[str, Any]]:
        """Modules of an attention layer that steps do not call."""

    def draft_kinds(self, op: str) -> tuple[str, ...]:
        """Kinds of the layers that draft; raise an error of ``op`` if the family has none here."""
        raise argument_error(
            op,
            "model",
            must="be DeepseekV4ForCausalLM for a draft layer",
            got=" or ".join(self.causal_lm),
            do="Draft by other means",
            kind=NotImplementedError,
        )

    def draft_layer(self, op: str, model: Any) -> Any:
        """Make the draft layer of a model, whose weights are not set."""
        self.draft_kinds(op)

    def build_draft_step(self, step: StepTokens, cache: CacheTensors) -> Any:
        """``build_step`` of a decode step that only the draft layer runs."""
        raise NotImplementedError

    def run_draft(self, model: Any, tokens: Tensor, streams: Tensor, step_run: StepRun) -> Tensor:
        """Run the draft layer of a model.

        Args:
            model: The model.
            tokens: Token after each of the step's tokens, [num_tokens], int64; -1 if unknown.
            streams: Residual streams of the step's tokens, after the last layer or a draft.
            step_run: The step; its ``run`` and ``state_rings`` are not read.

        Returns:
            Streams of the drafts, as ``streams``.
        """
        raise NotImplementedError

    def draft_hidden(self, model: Any, streams: Tensor) -> Tensor:
        """Normed states of draft streams, for the head, [1, num_tokens, hidden_size]."""
        raise NotImplementedError

    def holds_states(self, cache: CacheTensors, next_n: int) -> bool:
        """Whether the caches keep the states that steps of ``next_n`` tokens may go back to."""
        return True

    def of_model(self, model: Any) -> ModelSpec:
        """Return the spec of a model of this configuration, parts of which may be on other
        ranks."""
        return self

    def check_model(self, op: str, model: Any) -> None:
        """Raise if a model of the right class differs from its configuration."""
        return None

    def check_other_cache(self, op: str) -> None:
        """Raise if Hugging Face's attention cannot run the model with a cache of its own."""
        return None

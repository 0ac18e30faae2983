"""The interface of a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.errors import argument_error, install_extra, kind_of
from dsv4_ops.core.registry import AUTO
from dsv4_ops.core.torch_compat import has_fake_mode
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.modules.bf16_experts import Bf16Experts
from dsv4_ops.integrations.transformers.modules.quantized import QuantizedWeights
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite, refresh
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.tensors import CacheTensors

_OLDEST = (5, 17)


def require_transformers(op: str) -> Any:
    """Import ``transformers``, or raise if it is missing or too old for DeepSeek-V4."""
    advice = install_extra("transformers")
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
"""Name of the draft layer's module in a model."""


def draft_of(model: Any) -> Any:
    """Return the draft layer of a patched model, or None."""
    return model._modules.get(DRAFT)


def check_drafts(op: str, ranks: ContextParallel | None) -> None:
    """Raise an error that names ``op`` if ranks share the cache, which drafts do not support."""
    if ranks is not None:
        raise argument_error(
            op,
            "parallel",
            must="be None with a draft layer",
            got="ranks",
            do="Patch the model without ranks",
            kind=NotImplementedError,
        )


Runner = Callable[..., Any]
"""A function that runs a part of a step. Its arguments are the name of the part, the function of
the part, and the arguments of this function. Parts with the same name, such as layers of one kind,
run the same code."""


def run_part(_: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
    """Call the function. Eager steps use this ``Runner``."""
    return function(*args, **rest)


@dataclass(frozen=True)
class Requests:
    """The requests of a step, in the order of ``tokens``.

    Attributes:
        query_start_loc: Start of every request among the tokens, then the end of the last request,
            [num_reqs + 1], int32.
        seq_lens: Length of every request including this step's tokens, [num_reqs], int32; 0 for
            padding.
        rows: Cache row of every request, [num_reqs], int32; -1 for padding.
        indices: Request of every token, [num_tokens], int32; undefined for padding.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor
    indices: Tensor


@dataclass(frozen=True)
class StepTokens:
    """Where the cache stores the tokens of a step.

    Attributes:
        tokens: Cache row and position of every token; -1 for tokens that the cache does not store.
        ends: Length of every token's request after the step, [num_tokens], int32.
        num_reqs: Number of requests of the step, including padding requests.
        requests: A function that returns the requests of the step, for families that need the
            requests.
        has_context: See ``prefill_step``.
    """

    tokens: TokenMap
    ends: Tensor
    num_reqs: int
    requests: Callable[[], Requests]
    has_context: bool = True


@dataclass(frozen=True)
class LayerContext:
    """The data that an attention layer gets in place of Hugging Face's masks and cache."""

    step: Any
    caches: Any
    rope: Tensor
    schedule: str
    state_rings: bool
    save_first: bool = False


WITHOUT_MASKS = dict.fromkeys(("position_embeddings", "position_ids", "attention_mask"))
"""Layer arguments that only Hugging Face's attention reads; all are None in our steps."""


@dataclass(frozen=True)
class StepRun:
    """The arguments that all layers of a step get.

    Attributes:
        step: Result of ``ModelSpec.build_step``.
        cache: The caches.
        schedule: "decode" or "prefill".
        state_rings, save_first: See ``attention_layer``.
        run: The ``Runner`` of the parts.
        output_tokens: Tokens whose final states are returned, int [n]; None for all tokens.
        layer_steps: The step of each layer, if window caches have several block tables
            (``AttentionStep.with_window``). Empty if all layers use ``step``.
    """

    step: Any
    cache: CacheTensors
    schedule: str
    state_rings: bool
    run: Runner = run_part
    output_tokens: Tensor | None = None
    save_first: bool = False
    layer_steps: tuple[Any, ...] = ()

    def context(self, layer: int, caches: Any, rope: Tensor) -> LayerContext:
        """Return the context of one layer, with its caches."""
        step = self.layer_steps[layer] if self.layer_steps else self.step
        order = (self.state_rings, self.save_first)
        return LayerContext(step, caches, rope, self.schedule, *order)


class Execution(NamedTuple):
    """Settings of ``patch`` for the steps of a model."""

    batch_invariant: bool = False
    impl: str = AUTO
    plan: bool = True
    parallel: ContextParallel | None = None
    query: str | None = None


def unpatched(op: str, model: Any, advice: str = "Call patch first") -> Exception:
    """Return the error for an object that ``patch`` did not change."""
    is_model = isinstance(model, torch.nn.Module)
    actual = f"an unpatched {type(model).__name__}" if is_model else kind_of(model)
    return argument_error(op, "model", must="be patched", got=actual, do=advice)


def dtype_of(config: Any, default: torch.dtype) -> torch.dtype:
    """Return a model's dtype, or ``default`` if its configuration names no dtype."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else default


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """The configuration of a patched model, and how its family runs a step.

    Attributes:
        kinds: Kind of every layer.
        recipe, kv: The arguments ``precision`` (as a ``Recipe``) and ``kv`` of ``patch``.
        dtype: The model's dtype.
        fingerprint: All settings on which a cache depends, as "name=value" separated by "; ".
    """

    kinds: tuple[str, ...]
    recipe: Recipe
    kv: str
    dtype: torch.dtype
    fingerprint: str

    causal_lm: ClassVar[tuple[str, ...]]
    """Hugging Face classes that ``patch`` supports."""
    memory_groups: ClassVar[dict[str, str]]
    """Map from the name of a layer's cache to the cache's group in ``PagedCache.memory``."""
    shared_groups: ClassVar[tuple[str, ...]]
    """Groups that the ranks of ``parallel`` share; each rank stores a part."""

    @classmethod
    @abstractmethod
    def of(cls, op: str, config: Any, kv: str, recipe: Recipe, execution: Execution) -> ModelSpec:
        """Build the spec of ``config``. If the family does not support ``config``, raise an error
        that names ``op``."""

    def scheduled(self, device: torch.device) -> ModelSpec:
        """Return the spec with the SM counts that a library's schedules need on ``device``."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSpec:
        return self

    @property
    @abstractmethod
    def impl(self) -> str:
        """The argument ``impl`` of ``patch``."""

    @property
    def parallel(self) -> ContextParallel | None:
        """Ranks that share the cache; None for one rank."""
        return None

    @property
    def shards_heads(self) -> bool:
        """Whether the query heads are split over the ranks."""
        return self.parallel is not None and self.parallel.shards_heads

    @property
    @abstractmethod
    def block_tokens(self) -> int:
        """Positions per block of the pool."""

    # The cache

    @abstractmethod
    def rings(self, max_cache_len: int, max_chunk: int, next_n: int) -> dict[str, int]:
        """Return the number of blocks per row for each block table whose rows are rings."""

    @abstractmethod
    def tables(self, pool: Tensor, rings: dict[str, int], max_cache_len: int) -> Any:
        """Make the block tables; ``pool`` is the table of the shared blocks, on the cache's
        device."""

    @abstractmethod
    def rope_tables(self, num_positions: int, device: torch.device) -> Any:
        """Make the cosines and sines of all layers."""

    @abstractmethod
    def layer_caches(
        self,
        kind: str,
        num_rows: int,
        num_blocks: int,
        max_cache_len: int,
        rings: dict[str, int],
        device: torch.device,
    ) -> Any:
        """Allocate the caches of a layer."""

    @abstractmethod
    def kind_of(self, caches: Any) -> str:
        """Return the kind of the layer that has these caches."""

    # A step

    @abstractmethod
    def build_step(self, step: StepTokens, cache: CacheTensors, schedule: str) -> Any:
        """Build the data that the layers of a step share.

        The result has an attribute ``positions``, which is -1 for padding. ``schedule`` is "decode"
        or "prefill".
        """

    @abstractmethod
    def most_tokens(self, cache: CacheTensors) -> int:
        """Return the maximum tokens of a request in one step."""

    @property
    def most_first_tokens(self) -> int | None:
        """Maximum tokens of a request in ``prefill_step(has_context=False)``; None if there is no
        maximum besides that of all steps."""
        return None

    def skips_contexts(self, num_tokens: int, num_reqs: int, longest: int) -> bool:
        """Whether ``prefill_step(has_context=False)`` runs fewer ops for a step of these sizes, and
        allows requests of up to ``longest`` tokens."""
        return False

    @abstractmethod
    def can_go_back(self, first: Tensor, cache: Any) -> Tensor:
        """Whether rows of a ``PagedCache`` can continue at positions ``first`` [batch, 1].

        False if a ring has overwritten what a token at position ``first`` or later would read.
        """

    # The model

    @abstractmethod
    def run_layers(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        """Run all layers on ``hidden`` [1, num_tokens, hidden_size].

        Return the final, normed states of the tokens in ``step_run.output_tokens``.
        """

    def states_of(self, hidden: Any) -> Tensor:
        """Return a layer's input as Hugging Face's hooks see it, [1, num_tokens, ...]."""
        states: Tensor = hidden
        return states

    @abstractmethod
    def run_streams(
        self, body: Any, hidden: Tensor, ids: Tensor | None, step_run: StepRun
    ) -> Tensor:
        """Run all layers; return the "streams", which the draft layer reads: the residual streams
        of V4, or else the final, normed states."""

    @abstractmethod
    def normed(
        self, body: Any, streams: Tensor, part: str = "norm", run: Runner = run_part
    ) -> Tensor:
        """Return the final, normed states of streams. The runner ``run`` runs this part.

        ``body`` is the model or the draft layer that returned the streams.
        """

    @abstractmethod
    def attention(self, module: Any, hidden: Tensor, context: LayerContext) -> Tensor:
        """Return a layer's attention output for input [1, num_tokens, hidden_size]."""

    def attention_outputs(
        self, module: Any, hidden: Tensor, context: LayerContext, given: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return what Hugging Face's attention would return. ``given`` has the other arguments of
        the attention's forward."""
        return self.attention(module, hidden, context), None

    @property
    @abstractmethod
    def family_rewrites(self) -> tuple[Rewrite, ...]:
        """Changes of the family's modules, except for the forwards of model and attention."""

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """All rewrites: ``family_rewrites`` and the changes that all families have."""
        settings = (self.recipe, self.impl)
        return (*self.family_rewrites, Bf16Experts(*settings), QuantizedWeights(*settings))

    def refresh(self, op: str, body: Any, *, copies_only: bool = False) -> None:
        """Update the modules of ``body`` from their weights, before an eager step.

        Pass ``copies_only`` if all other buffers still share the weights' memory: then only the
        buffers that copy weights need an update.
        """
        if torch.compiler.is_compiling() or has_fake_mode():
            return
        rewrites = self.rewrites
        refresh(op, body, [one for one in rewrites if one.copies_weights or not copies_only])

    def check_attention(self, op: str, name: str, kind: str, attention: Any) -> None:
        """Raise if an attribute of a layer's attention has a value that steps do not support."""
        return None

    @abstractmethod
    def skipped_modules(self, attention: Any) -> Iterator[tuple[str, Any]]:
        """Yield the modules of an attention layer that steps do not call."""

    @abstractmethod
    def draft_kinds(self, op: str) -> tuple[str, ...]:
        """Return the kinds of the draft layers. If the settings do not support draft layers, raise
        an error that names ``op``."""

    @abstractmethod
    def draft_layer(self, op: str, model: Any) -> Any:
        """Make the draft layer of a model, without loading the weights."""

    @abstractmethod
    def build_draft_step(self, step: StepTokens, cache: CacheTensors) -> Any:
        """Build the data of a decode step that only the draft layer runs."""

    @abstractmethod
    def run_draft(
        self, part: str, model: Any, tokens: Tensor, streams: Tensor, step_run: StepRun
    ) -> Tensor:
        """Run the draft layer of a model.

        Args:
            part: Name of the part for the ``Runner``.
            model: The model.
            tokens: Next token after each token of the step, [num_tokens], int64; -1 if unknown.
            streams: Streams of the step's tokens, which ``run_streams`` or the last ``run_draft``
                returned.
            step_run: The step; the layer does not read ``state_rings``.

        Returns:
            Streams of the drafts, in the shape of ``streams``.
        """

    def holds_states(self, cache: CacheTensors, next_n: int) -> bool:
        """Whether the caches keep enough states to roll back steps of ``next_n`` tokens."""
        return True

    def of_model(self, model: Any) -> ModelSpec:
        """Return the spec for this rank's part of a model."""
        return self

    def check_model(self, op: str, model: Any) -> None:
        """Raise if a model of a supported class differs from its configuration."""
        return None

    def check_other_cache(self, op: str) -> None:
        """Raise if Hugging Face's attention cannot run the model with its own cache."""
        return None

"""Replacement forwards of Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.gradient import differentiated, without_derivative
from dsv4_ops.integrations.transformers.architectures.base import (
    ModelSpec,
    Runner,
    StepRun,
    run_part,
)
from dsv4_ops.integrations.transformers.cache.paged_cache import (
    PagedCache,
    cache_argument,
    check_kind,
)
from dsv4_ops.integrations.transformers.modules.checks import check_modules
from dsv4_ops.integrations.transformers.modules.replacement import (
    Forward,
    Maker,
    has_plain_weight,
    in_place_of,
    is_part,
    linear_float32,
    own_forward,
    unwrapped,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.integrations.transformers.modules.split import (
    SplitModules,
    gathered_columns,
    own_weight,
    split_of,
)
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.integrations.transformers.steps.padded import OP, check_inputs, padded_step
from dsv4_ops.integrations.transformers.steps.step import run_layers


def model_forward(spec: ModelSpec, score: bool, before: Forward) -> Forward:
    """Return a forward for Hugging Face's model that runs our layers from a ``PagedCache``.

    With another cache, the forward calls ``before``. With ``score``, a call without a cache makes a
    ``PagedCache``.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    name = cache_argument()

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        *,
        past_key_values: Any = None,
        **rest: Any,
    ) -> Any:
        cache = past_key_values if cache is None else cache
        if score and cache is None:
            cache = _own_cache(spec, self, input_ids, inputs_embeds)
        if not isinstance(cache, PagedCache):
            check_kind(OP, "cache", cache)
            spec.check_other_cache(OP)
            return before(
                self,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                **{name: cache},
                **rest,
            )
        check_inputs(self, input_ids, inputs_embeds, rest, cache.device)
        check_modules(OP, spec, spec.kinds, self, cache.device)
        spec.refresh(OP, self)
        inputs = input_ids if input_ids is not None else inputs_embeds
        assert inputs is not None
        shape = (inputs.shape[0], inputs.shape[1])
        with torch.no_grad():
            vocab_size = self.config.vocab_size
            padded = padded_step(
                spec, shape, input_ids, attention_mask, position_ids, cache, vocab_size
            )
            ids, embeddings = padded.take(input_ids), padded.take(inputs_embeds)
            several = bool(shape[1] > 1)  # adds a guard for a symbolic length
            schedule = "prefill" if several else "decode"
            states: list[Tensor] = []
            returns_states = rest.get("output_hidden_states")
            if returns_states is None:
                returns_states = getattr(self.config, "output_hidden_states", False)
            run = _keeping(spec, states) if returns_states else run_part
            step = StepRun(padded.step, cache.tensors, schedule, state_rings=several, run=run)
            states.append(run_layers(self, spec, ids, embeddings, step))
            states = [padded.give_back(each, shape) for each in states]
        trained = differentiated(chain((inputs_embeds,), self.parameters()))
        if trained:
            states = [without_derivative("PagedCache", each, trained) for each in states]
        outputs = {name: cache, "hidden_states": tuple(states)} if returns_states else {name: cache}
        return MoeModelOutputWithPast(last_hidden_state=states[-1], **outputs)

    return forward


def _own_cache(
    spec: ModelSpec, body: Any, ids: Tensor | None, embeddings: Tensor | None
) -> PagedCache:
    """Make a ``PagedCache`` for a call without a cache (``patch(score=True)``)."""
    inputs = embeddings if ids is None else ids
    if torch.compiler.is_compiling():
        raise argument_error(
            OP,
            "cache",
            must="be given to a compiled call of a model that was patched with score=True",
            got="None",
            do="Pass PagedCache.for_model(model, ...), or score without torch.compile",
            kind=NotImplementedError,
        )
    batch, length, device = 1, 1, body.device
    if isinstance(inputs, Tensor) and inputs.dim() > 1:  # the step raises for other inputs
        batch, length, device = *(max(size, 1) for size in inputs.shape[:2]), inputs.device
    return PagedCache(
        body.config,
        max_batch_size=batch,
        max_cache_len=length,
        max_chunk=length,
        kv=spec.kv,
        precision=spec.recipe,
        parallel=spec.parallel,
        device=device,
    )


def _keeping(spec: ModelSpec, states: list[Tensor]) -> Runner:
    """Make a runner that appends the input of every layer to ``states``, as Hugging Face does."""

    def run(_: str, function: Callable[..., Any], hidden: Any, *args: Any, **rest: Any) -> Any:
        if isinstance(function, nn.Module):
            states.append(spec.states_of(hidden)[0])
        return function(hidden, *args, **rest)

    return run


def attention_forward(spec: ModelSpec, before: Forward) -> Forward:
    """Return a forward for Hugging Face's attention. The forward runs our attention in calls by
    ``run_layers``, and ``before`` in other calls."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **rest: Any) -> Any:
        context = rest.pop("dsv4_ops", None)
        if context is None:
            return before(self, hidden_states, *args, **rest)
        if hidden_states.shape[0] != 1:
            # this check tells a graph of symbolic sizes that the first dimension is always 1
            raise argument_error(
                "decode_step",
                "hidden_states",
                must="be [1, num_tokens, hidden_size] at each attention",
                got=list(hidden_states.shape),
                do="Let hooks and wrappers keep the shape",
            )
        return spec.attention_outputs(self, hidden_states, context, rest)

    return forward


class ModelForward(Rewrite):
    """Let the model run our layers when the cache is a ``PagedCache``.

    Args:
        spec: Spec of the model.
        score: Whether a call without a cache makes a ``PagedCache``.
    """

    def __init__(self, spec: ModelSpec, score: bool) -> None:
        self.spec, self.score = spec, score

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's model."""
        return is_part(module, "Model")

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Yield the forward."""
        yield "forward", partial(model_forward, self.spec, self.score)


class AttentionForward(Rewrite):
    """Let Hugging Face's attention run our attention in calls by ``run_layers``."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's attention."""
        return is_part(module, "Attention")

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Yield the forward."""
        yield "forward", partial(attention_forward, self.spec)


class Float32Norms(Rewrite):
    """Let norms multiply by their weight in float32, if the recipe says so."""

    def __init__(self, recipe: Recipe) -> None:
        self.runs = recipe.norms_float32

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's norm and the recipe asks for float32."""
        return self.runs and is_part(module, "RMSNorm")

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Yield the forward."""
        if own_forward(module) is None:
            yield "forward", in_place_of(_norm)


class Float32Logits(Rewrite):
    """Let the head return float32, if the recipe says so.

    Args:
        recipe: The recipe that ``patch`` got.
        head: The head of the model.
    """

    def __init__(self, recipe: Recipe, head: Any) -> None:
        self.runs, self.head = recipe.logits_float32, unwrapped(head)

    def applies(self, module: Any) -> bool:
        """Whether a module is the head, possibly inside an adapter, and the recipe asks for
        float32."""
        return self.runs and module is self.head and type(module) is nn.Linear

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Yield the forward."""
        if own_forward(module) is None:
            yield "forward", _logits_forward


def rewrites(model: Any, spec: ModelSpec, score: bool = False) -> tuple[Rewrite, ...]:
    """Return all changes that ``patch`` makes to the modules of a model.

    With ``score``, the model makes a ``PagedCache`` for calls without a cache. All modules except
    the model and its attention layers keep a forward that other code set on the instance.
    """
    return (
        SplitModules(model, spec.parallel, spec.recipe.logits_float32),
        ModelForward(spec, score),
        AttentionForward(spec),
        Float32Norms(spec.recipe),
        Float32Logits(spec.recipe, model.lm_head),
        *spec.rewrites,
    )


def _logits_forward(before: Forward) -> Forward:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        if split_of(self) is not None:
            return gathered_columns(self, linear_float32(hidden, own_weight(self)))
        if not has_plain_weight(self):
            return before(self, hidden)
        return linear_float32(hidden, self.weight)

    return forward


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    values = hidden_states.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return (values * scale * self.weight.float()).to(hidden_states.dtype)

"""Check which modules of a patched model were changed.

Steps call the modules that a user changed, but modules that our ops replace must be unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.torch_compat import group_members
from dsv4_ops.integrations.transformers.modules.replacement import (
    QUANTIZED_LINEAR,
    class_of,
    defining_class,
    has_plain_weight,
    is_harmless,
    is_part,
    local,
    own_forward,
    quantized_weights,
    unwrapped,
)

_ONE_DEVICE = "Load the model on one device, without offloading, and make its cache there"
_AGAIN = "Call unpatch, change the configuration with the layers, and patch again"
_CHANGED = "be Hugging Face's own as patch saw it, without hooks, as ops do its work"


class StepModules(Protocol):
    """The methods of ``ModelSpec`` that say which modules steps do not call."""

    @property
    def shards_heads(self) -> bool:
        """Whether the query heads are split over the ranks."""

    def skipped_modules(self, attention: Any) -> Iterator[tuple[str, Any]]:
        """Yield the modules of an attention layer that steps do not call, by name."""

    def check_attention(self, op: str, name: str, kind: str, attention: Any) -> None:
        """Raise if an attribute of an attention layer has a value that steps do not support."""


def check_layers(op: str, kinds: tuple[str, ...], body: Any) -> None:
    """Raise if ``body`` has another number of layers than the configuration."""
    if len(body.layers) != len(kinds):
        raise argument_error(
            op,
            "model.layers",
            must=f"be the {len(kinds)} of the configuration",
            got=len(body.layers),
            do=_AGAIN,
        )


def check_modules(
    op: str, spec: StepModules, kinds: tuple[str, ...], body: Any, device: torch.device
) -> None:
    """Raise if a module that our ops replace was changed, or is not on the cache's device.

    Outside of a trace, also raise if a class no longer has the forward that ``patch`` saw.
    """
    if own_forward(body) is not None:
        raise _changed(op, "model.model", "a forward of its own")
    check_layers(op, kinds, body)
    rotary = body._modules.get("rotary_emb")  # a draft layer has no rotary_emb
    if rotary is not None:
        check_skipped(op, "model", [("rotary_emb", rotary)], False)
    for index, (kind, layer) in enumerate(zip(kinds, body.layers, strict=True)):
        attention = unwrapped(layer.self_attn)
        name = f"model.layers.{index}.self_attn"
        _check_hook(op, name, attention)
        if own_forward(attention) is not None:
            raise _changed(op, name, "a forward of its own")
        if class_of(attention) is None:
            raise argument_error(
                op,
                name,
                must="be one that patch saw",
                got=f"a new {type(attention).__name__}",
                do=_AGAIN,
            )
        check_skipped(op, name, spec.skipped_modules(attention), spec.shards_heads)
        spec.check_attention(op, name, kind, attention)
        weight: Tensor | None = next(attention.parameters(), None)
        if weight is None:
            raise argument_error(
                op,
                name,
                must="have parameters of its own",
                got="none",
                do="FSDP1 keeps them in one flat tensor: load with Hugging Face's tp_plan instead",
                kind=NotImplementedError,
            )
        if weight.device != device:
            raise argument_error(
                op,
                name,
                must=f"be on the cache's device, {device}",
                got=weight.device,
                do=_ONE_DEVICE,
            )


HeadPart = tuple[str, Any, int, int]
"""Name of a parameter, the parameter, its dimension of heads, and the size of this dimension over
all ranks."""


def heads_are_split(
    op: str, body: Any, ranks: ContextParallel | None, parts: Callable[[Any], Iterator[HeadPart]]
) -> bool:
    """Whether Hugging Face's tensor parallelism split the heads of all layers over ``ranks``.

    ``parts`` yields the parameters of an attention layer that have a dimension of heads, and None
    in place of the parameter of a module without a weight.

    Raises:
        NotImplementedError: only some parameters are split, or parameters are split over other
            ranks.
    """
    heads = [
        (f"model.layers.{index}.self_attn.{name}", weight, local(weight).shape[dim], size)
        for index, layer in enumerate(body.layers)
        for name, weight, dim, size in parts(unwrapped(layer.self_attn))
        if weight is not None
    ]
    if all(local_size == size for _, _, local_size, size in heads):
        return False
    world = 1 if ranks is None else ranks.world_size
    members = [] if ranks is None else group_members(ranks.group)
    for name, weight, local_size, size in heads:
        mesh = getattr(weight, "device_mesh", None)
        others = mesh is not None and mesh.mesh.flatten().tolist() != members
        if local_size * world != size or others:
            raise argument_error(
                op,
                name,
                must=f"be split over the ranks of parallel as all heads are, {size} over {world}",
                got=f"{local_size} of {size} on {'other ranks' if others else 'this rank'}",
                do="Pass parallel=ContextParallel.of(), and a tp_plan that splits all heads",
                kind=NotImplementedError,
            )
    return True


def check_skipped(
    op: str, name: str, modules: Iterable[tuple[str, Any]], shards_heads: bool
) -> None:
    """Raise if one of ``modules``, which steps do not call, was changed."""
    for part, module in modules:
        # Hugging Face replaces the forward of a split module
        split = shards_heads and hasattr(module, "weight")
        change = None if split else _change(module)
        if change:
            raise _changed(op, f"{name}.{part}", change)


def check_placement(op: str, model: Any) -> None:
    """Raise if ``accelerate`` split or offloaded a model (our attention skips accelerate's hooks),
    or if a layer's attention is not Hugging Face's."""
    for name, module in model.named_modules():
        _check_hook(op, name or "model", module)
        if is_part(module, "Model"):
            layers = [unwrapped(layer.self_attn) for layer in module.layers]
            others = [type(one).__name__ for one in layers if not is_part(one, "Attention")]
            if others:
                raise argument_error(
                    op,
                    name,
                    must="have Hugging Face's attention in every layer",
                    got=others[0],
                    do="Other layers are unknown to this version",
                    kind=NotImplementedError,
                )
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise argument_error(
            op,
            "model",
            must="be on one device",
            got=", ".join(devices),
            do=_ONE_DEVICE,
            kind=NotImplementedError,
        )


def _check_hook(op: str, name: str, module: Any) -> None:
    hook = vars(module).get("_hf_hook")
    if hook is not None and not is_harmless(hook):
        raise argument_error(
            op,
            name,
            must="have no hook of accelerate that loads weights or sends inputs",
            got=type(hook).__name__,
            do=_ONE_DEVICE,
            kind=NotImplementedError,
        )


def check_body(op: str, model: Any) -> None:
    """Raise if the model has hooks or a forward around its layers: steps do not call such hooks and
    forwards."""
    if not hasattr(model.model, "layers"):  # a PEFT wrapper around the patched model
        raise argument_error(
            op,
            "model",
            must="be the model that was patched",
            got=type(model).__name__,
            do="Pass model.get_base_model()",
            kind=TypeError,
        )
    name = uncalled(model)
    if name is not None:
        raise argument_error(
            op,
            name,
            must="have no hooks, nor a forward of its own, as they are not called",
            got="one",
            do="Call the model itself with cache=cache, or remove them",
            kind=NotImplementedError,
        )


def uncalled(model: Any) -> str | None:
    """Return the name of a module around the layers whose hooks or own forward a step would not
    call, or None."""
    for name, module in (("model", model), ("model.model", model.model)):
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks or own_forward(module) is not None:
            return name
    return None


def is_unchanged(module: Any) -> bool:
    """Whether a module is Hugging Face's own, without hooks."""
    return _change(module) is None


def _change(module: Any) -> str | None:
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook"
    if own_forward(module) is not None:
        return "a forward of its own"
    marked, plain = class_of(module), type(module) is nn.Linear and has_plain_weight(module)
    if not (marked or plain or quantized_weights(module) == QUANTIZED_LINEAR):
        split = type(module) is nn.Linear
        return "a bias, or a split weight" if split else type(module).__name__
    if not torch.compiler.is_compiling() and defining_class(module) != marked:
        return "another forward of its class"
    return None


def _changed(op: str, name: str, change: str) -> Exception:
    return argument_error(
        op,
        name,
        must=_CHANGED,
        got=change,
        do="Undo that, or pass Hugging Face's cache",
        kind=NotImplementedError,
    )

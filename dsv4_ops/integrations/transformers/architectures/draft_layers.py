"""Functions that the draft layers of all families share."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.integrations.transformers.modules import quantized
from dsv4_ops.integrations.transformers.modules.replacement import Replacement, unwrapped
from dsv4_ops.integrations.transformers.tensors import in_vocabulary


def take_classes(draft: Any, body: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Copy the quantised modules of the model's layers, without weights, into a draft's decoder
    layer, and give this layer the dtypes of the model's layers.

    Each module comes from the last layer that has a module of this name, because not all layers
    have an indexer or experts. ``dtypes`` are for tensors outside of the decoder layer.
    """
    of_layer: dict[str, torch.dtype] = {}
    for source in body.layers:
        of_layer |= {f"layers.0.{name}": tensor.dtype for name, tensor in state_tensors(source)}
    for name, _ in list(draft.layers[0].named_modules()):
        found = (_module(source, name) for source in reversed(body.layers)) if name else ()
        module = next((each for each in found if each is not None), None)
        if module is not None and quantized.is_quantized(module):
            draft.layers[0].set_submodule(name, empty_copy(module))
    for name, tensor in state_tensors(draft):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to({**of_layer, **dtypes}.get(name, tensor.dtype))


def known_next(body: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Embed the token after each position, [1, num_tokens, hidden_size]; -1 is an unknown token.

    As in vLLM, the embedding for position 0 is zero.
    """
    is_read = (positions >= 0) & in_vocabulary(tokens, body.config.vocab_size)
    embedded = body.embed_tokens(torch.where(is_read, tokens, 0))
    return torch.where(positions[:, None] > 0, embedded, 0.0)[None]


def state_tensors(module: Any) -> list[tuple[str, Tensor]]:
    """Return parameters, and the buffers that a checkpoint has."""
    state = module.state_dict(keep_vars=True)
    return [(name.replace("base_layer.", ""), tensor) for name, tensor in state.items()]


def _module(layer: Any, name: str) -> Any:
    """Return a layer's module of that name, without adapters, or None."""
    for part in name.split("."):
        layer = unwrapped(layer)._modules.get(part)
        if layer is None:
            return None
    return unwrapped(layer)


def empty_copy(module: Any) -> Any:
    """Return a module of the same class and settings, with parameters on the meta device."""
    copied = copy.copy(module)
    for name, value in list(vars(copied).items()):
        if isinstance(value, Replacement):  # a replacement calls the original module
            del copied.__dict__[name]
    copied._parameters = {
        name: None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    copied._buffers, copied._modules = {}, dict(module._modules)  # experts keep their activation
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        setattr(copied, hooks, OrderedDict())
    return copied

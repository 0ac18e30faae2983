"""The draft layer of DeepSeek-V4 (multi-token prediction): a sliding layer after the last one.

It reads the residual streams of a token and the embedding of the next token, and predicts the one
after that. Embedding and head are the model's.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.integrations.transformers.architectures.base import (
    WITHOUT_MASKS,
    LayerContext,
    StepRun,
    draft_of,
)
from dsv4_ops.integrations.transformers.modules import quantized
from dsv4_ops.integrations.transformers.modules.replacement import Replacement, unwrapped
from dsv4_ops.integrations.transformers.tensors import in_vocabulary

KINDS = ("window",)
"""Kinds of the draft layers; a model with draft layers has one."""


class DraftLayer(nn.Module):
    """The modules of the draft layer, under the names that Hugging Face uses for other layers.

    Args:
        model: The model that the layer drafts for. Linear layers and experts have the model's
            classes and dtypes; weights are on the meta device until they are loaded.
    """

    def __init__(self, model: Any) -> None:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

        super().__init__()
        self.config = model.config
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 1
        config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
        width, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.layers = nn.ModuleList([modeling.DeepseekV4DecoderLayer(config, 0)])
            self.e_proj = nn.Linear(width, width, bias=False)
            self.h_proj = nn.Linear(width, width, bias=False)
            for name in ("enorm", "hnorm", "norm"):
                self.add_module(name, modeling.DeepseekV4RMSNorm(width, eps=eps))
            self.hc_head = modeling.DeepseekV4HyperHead(config)
        _take_classes(self, model.model)
        self.eval().requires_grad_(False)


def _take_classes(draft: DraftLayer, body: Any) -> None:
    """Copy the quantised modules of the model's last layer, and the dtypes of the others."""
    source = body.layers[-1]
    for name, _ in list(draft.layers[0].named_modules()):
        if not name:
            continue
        module = _module(source, name)
        if module is not None and quantized.is_quantized(module):
            draft.layers[0].set_submodule(name, _empty_copy(module))
    linear = unwrapped(source.self_attn).q_a_proj
    if quantized.is_quantized(unwrapped(linear)):
        width = draft.config.hidden_size
        for name in ("e_proj", "h_proj"):
            setattr(draft, name, _square(unwrapped(linear), width))
    dtypes = {f"layers.0.{name}": tensor.dtype for name, tensor in _state_tensors(source)}
    dtypes |= {f"hc_head.{name}": tensor.dtype for name, tensor in _state_tensors(body.hc_head)}
    for name, tensor in _state_tensors(draft):
        if not tensor.is_floating_point():
            continue
        if name in ("enorm.weight", "hnorm.weight", "norm.weight"):
            dtype = body.norm.weight.dtype
        elif (
            name in ("e_proj.weight", "h_proj.weight") and tensor.dtype == torch.get_default_dtype()
        ):
            dtype = unwrapped(linear).weight.dtype
        else:
            dtype = dtypes.get(name, tensor.dtype)
        tensor.data = tensor.data.to(dtype)


def _state_tensors(module: Any) -> list[tuple[str, Tensor]]:
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


def _empty_copy(module: Any) -> Any:
    """Return a module of the same class and settings, with parameters on the meta device."""
    copied = copy.copy(module)
    for name, value in list(vars(copied).items()):
        if isinstance(value, Replacement):  # it belongs to the original
            del copied.__dict__[name]
    copied._parameters = {
        name: None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    copied._buffers, copied._modules = {}, dict(module._modules)  # experts' activation
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        setattr(copied, hooks, OrderedDict())
    return copied


def _square(linear: Any, width: int) -> Any:
    """Return an FP8 layer of ``width`` inputs and outputs, of the class of another layer."""
    copied = _empty_copy(linear)
    copied.in_features = copied.out_features = width
    for name, parameter in copied._parameters.items():
        if parameter is not None:
            rows = [
                size * width // full
                for size, full in zip(parameter.shape, linear.weight.shape, strict=True)
            ]
            copied._parameters[name] = nn.Parameter(parameter.new_empty(rows), requires_grad=False)
    return copied


def run(model: Any, tokens: Tensor, streams: Tensor, step_run: StepRun) -> Tensor:
    """Run the draft layer; see ``ModelSpec.run_draft``."""
    draft, body, step = draft_of(model), model.model, step_run.step
    is_read = (step.positions >= 0) & in_vocabulary(tokens, body.config.vocab_size)
    embedded = body.embed_tokens(torch.where(is_read, tokens, 0))
    # as in vLLM, the draft after position 0 reads the streams only
    embedded = torch.where(step.positions[:, None] > 0, embedded, 0.0)[None]
    first = draft.e_proj(draft.enorm(embedded)).unsqueeze(2)
    mixed = first + draft.h_proj(draft.hnorm(streams))
    cache, rope = step_run.cache.draft[0], step_run.cache.rope.of(KINDS[0])
    context = LayerContext(step, cache, rope, step_run.schedule, state_rings=False)
    return draft.layers[0](
        mixed.to(streams.dtype),
        input_ids=None,
        dsv4_ops=context,
        **WITHOUT_MASKS,
    )

"""The draft layer (multi-token prediction) of DeepSeek-V4.

The layer reads the residual streams of a token and the embedding of the next token, and predicts
the token after the next. The layer has sliding-window attention, and uses the model's embedding and
head.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.integrations.transformers.architectures.base import WITHOUT_MASKS, LayerContext
from dsv4_ops.integrations.transformers.architectures.draft_layers import (
    empty_copy,
    known_next,
    state_tensors,
    take_classes,
)
from dsv4_ops.integrations.transformers.modules import quantized
from dsv4_ops.integrations.transformers.modules.replacement import unwrapped

KINDS = ("window",)
"""Kinds of a model's draft layers. A model has at most one draft layer."""


class DraftLayer(nn.Module):
    """The modules of the draft layer, under the names that Hugging Face uses for other layers.

    Args:
        model: The model for which the layer drafts. Linear layers and experts have the model's
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
    """Give a draft layer empty copies of the model's quantised modules, and the model's dtypes."""
    linear = unwrapped(unwrapped(body.layers[-1].self_attn).q_a_proj)
    if quantized.is_quantized(linear):
        for name in ("e_proj", "h_proj"):
            setattr(draft, name, _square(linear, draft.config.hidden_size))
    dtypes = {f"hc_head.{name}": tensor.dtype for name, tensor in state_tensors(body.hc_head)}
    dtypes |= dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), body.norm.weight.dtype)
    if not quantized.is_quantized(linear):
        dtypes |= dict.fromkeys(("e_proj.weight", "h_proj.weight"), linear.weight.dtype)
    take_classes(draft, body, dtypes)


def _square(linear: Any, width: int) -> Any:
    """Return an FP8 layer of the same class as ``linear``, with ``width`` inputs and outputs."""
    copied = empty_copy(linear)
    copied.in_features = copied.out_features = width
    for name, parameter in copied._parameters.items():
        if parameter is not None:
            rows = [
                size * width // full
                for size, full in zip(parameter.shape, linear.weight.shape, strict=True)
            ]
            copied._parameters[name] = nn.Parameter(parameter.new_empty(rows), requires_grad=False)
    return copied


def run(draft: Any, body: Any, tokens: Tensor, streams: Tensor, context: LayerContext) -> Tensor:
    """Run the draft layer; see ``ModelSpec.run_draft``."""
    embedded = known_next(body, tokens, context.step.positions)
    first = draft.e_proj(draft.enorm(embedded)).unsqueeze(2)
    mixed = first + draft.h_proj(draft.hnorm(streams))
    return draft.layers[0](
        mixed.to(streams.dtype),
        input_ids=None,
        dsv4_ops=context,
        **WITHOUT_MASKS,
    )

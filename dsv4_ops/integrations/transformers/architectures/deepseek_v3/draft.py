"""The draft layer (multi-token prediction) of DeepSeek-V3, V3.2 and GLM-5.

The layer reads the final, normed state of a token and the embedding of the next token, and predicts
the token after the next. The layer uses the model's embedding and head. In V3.2 and GLM-5, the
layer has an indexer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.integrations.transformers.architectures.base import WITHOUT_MASKS, LayerContext
from dsv4_ops.integrations.transformers.architectures.draft_layers import known_next, take_classes
from dsv4_ops.integrations.transformers.modules.replacement import modelling

_ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
    "indexer_types": ["full"],
}
"""Fields of a configuration with one layer. The layer has experts and, in families with indexers,
an indexer."""


class DraftLayer(nn.Module):
    """The modules of the draft layer, under the names that Hugging Face uses for other layers.

    Args:
        model: The model for which the layer drafts. Linear layers and experts have the model's
            classes and dtypes; weights are on the meta device until they are loaded.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        config = copy.deepcopy(model.config)
        for name, value in _ONE_LAYER.items():
            if hasattr(config, name):
                setattr(config, name, value)
        classes, prefix = modelling(config.model_type)
        width, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.layers = nn.ModuleList([getattr(classes, f"{prefix}DecoderLayer")(config, 0)])
            self.eh_proj = nn.Linear(2 * width, width, bias=False)
            for name in ("enorm", "hnorm", "norm"):
                self.add_module(name, getattr(classes, f"{prefix}RMSNorm")(width, eps=eps))
        outside = ("enorm.weight", "hnorm.weight", "norm.weight", "eh_proj.weight")
        take_classes(self, model.model, dict.fromkeys(outside, model.model.norm.weight.dtype))
        self.eval().requires_grad_(False)


def run(draft: Any, body: Any, tokens: Tensor, states: Tensor, context: LayerContext) -> Tensor:
    """Run the draft layer (``ModelSpec.run_draft``); return its states after the final norm."""
    embedded = known_next(body, tokens, context.step.positions)
    both = torch.cat((draft.enorm(embedded), draft.hnorm(states)), -1)
    hidden = draft.layers[0](
        draft.eh_proj(both.to(draft.eh_proj.weight.dtype)).to(states.dtype),
        dsv4_ops=context,
        **WITHOUT_MASKS,
    )
    normed: Tensor = draft.norm(hidden[0] if isinstance(hidden, tuple) else hidden)
    return normed

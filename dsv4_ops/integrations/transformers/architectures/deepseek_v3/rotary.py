"""Hugging Face's rotary embedding of a dense MLA model, as a table."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.modules.replacement import is_part, modelling

_KNOWN = ("default", "linear", "yarn", "llama3")
"""RoPE types with frequencies that do not depend on the length of a request."""


@dataclass(frozen=True)
class Rotary:
    """Frequencies of the pairs, and the scale of cosines and sines."""

    frequencies: tuple[float, ...]
    scaling: float

    def table(self, num_positions: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Cosines and sines, [num_positions, 2 * pairs], float32.

        Args:
            num_positions: Rows.
            dtype: Round as Hugging Face does: to this dtype, from float32 angles. None for exact
                angles.
            device: Device of the table.
        """
        exact = torch.float64 if dtype is None else torch.float32
        frequencies = torch.tensor(self.frequencies, dtype=exact)
        angles = torch.arange(num_positions, dtype=exact)[:, None] * frequencies
        table = torch.cat([angles.cos(), angles.sin()], -1) * self.scaling
        return table.to(dtype or torch.float32).to(torch.float32).to(device)


def rotary_of(op: str, config: Any) -> Rotary:
    """Make the rotary embedding that Hugging Face makes from a configuration."""
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type")
    if rope_type not in _KNOWN:
        raise argument_error(
            op,
            "config.rope_parameters['rope_type']",
            must="be " + " or ".join(map(repr, _KNOWN)),
            got=repr(rope_type),
            do="Other types depend on the length",
            kind=NotImplementedError,
        )
    classes, prefix = modelling(config.model_type)
    kind = getattr(classes, f"{prefix}RotaryEmbedding")
    with torch.device("cpu"):
        embedding = kind(copy.deepcopy(config))  # Hugging Face writes defaults into it
    frequencies = embedding.inv_freq.float().tolist()
    if 2 * len(frequencies) != config.qk_rope_head_dim:
        raise argument_error(
            op,
            "config.rope_parameters",
            must=f"rotate the {config.qk_rope_head_dim} values of qk_rope_head_dim",
            got=2 * len(frequencies),
            do="Set config.head_dim to qk_rope_head_dim",
            kind=NotImplementedError,
        )
    return Rotary(tuple(frequencies), float(embedding.attention_scaling))


def softmax_scale(config: Any) -> float:
    """Scale of the attention logits, with YaRN's mscale squared if the configuration has it."""
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters
    all_dim = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not all_dim or rope["factor"] <= 1:
        return scale
    return scale * float(0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2


def check_rotary(op: str, model: Any, rotary: Rotary) -> None:
    """Raise if a rotary embedding of the model differs: buffers may change after construction."""
    want = torch.tensor(rotary.frequencies, dtype=torch.float64)
    for name, module in model.named_modules():
        if not is_part(module, "RotaryEmbedding") or module.inv_freq.is_meta:
            continue
        inv_freq = module.inv_freq.detach().cpu()
        bound = 4 * torch.finfo(inv_freq.dtype).eps * want  # the whole model may have been cast
        same = inv_freq.shape == want.shape and float(module.attention_scaling) == rotary.scaling
        if not same or bool(((inv_freq.double() - want).abs() > bound).any()):
            raise argument_error(
                op,
                name,
                must="be that of config.rope_parameters",
                got="one of other frequencies or another scaling",
                do="Make the model from it",
            )

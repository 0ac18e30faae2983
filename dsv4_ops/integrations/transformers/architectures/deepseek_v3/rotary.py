"""Hugging Face's rotary embedding of a dense MLA model, as a table."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.torch_compat import FakeTensor
from dsv4_ops.core.yarn import rounding_of_frequencies
from dsv4_ops.integrations.transformers.modules.replacement import (
    SOURCE,
    Maker,
    is_part,
    modelling,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite

_KNOWN = ("default", "linear", "yarn", "llama3")
"""RoPE types with frequencies that do not depend on the length of a request."""


@dataclass(frozen=True)
class Rotary:
    """Frequencies of the rotated pairs, and the scale of cosines and sines.

    Attributes:
        frequencies: One per pair.
        scaling: Factor of cosines and sines.
        rounding: Upper limit of the relative error of the frequencies.
    """

    frequencies: tuple[float, ...]
    scaling: float
    rounding: float

    def table(self, num_positions: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Return cosines and sines, [num_positions, 2 * pairs], float32.

        Args:
            num_positions: Rows.
            dtype: Angles are computed in float32, and cosines and sines are rounded to this dtype,
                as in Hugging Face. With None, all are computed in float64 and rounded to float32.
            device: Device of the table.
        """
        exact: dict[str, Any] = {"dtype": torch.float64 if dtype is None else torch.float32}
        exact["device"] = "cpu"
        frequencies = torch.tensor(self.frequencies, **exact)
        angles = torch.arange(num_positions, **exact)[:, None] * frequencies
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
            do="Other RoPE types depend on the length of a request",
            kind=NotImplementedError,
        )
    theta = parameters["rope_theta"]
    if not theta > 0:
        raise argument_error(
            op,
            "config.rope_parameters",
            must="have a rope_theta above 0",
            got=theta,
            do="Take the released configuration",
        )
    classes, prefix = modelling(config.model_type)
    kind = getattr(classes, f"{prefix}RotaryEmbedding")
    with torch.device("cpu"):
        embedding = kind(copy.deepcopy(config))  # Hugging Face writes defaults into a config
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
    factor = parameters["factor"] if rope_type == "yarn" else 0.0
    rounding = rounding_of_frequencies(theta, factor)
    return Rotary(tuple(frequencies), float(embedding.attention_scaling), rounding)


def softmax_scale(config: Any) -> float:
    """Return the scale of the attention logits. If the configuration sets ``mscale_all_dim`` for
    YaRN, the scale includes the square of YaRN's mscale."""
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters
    all_dim = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not all_dim or rope["factor"] <= 1:
        return scale
    return scale * float(0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2


def check_rotary(op: str, model: Any, rotary: Rotary) -> None:
    """Raise if a rotary embedding of the model does not match the configuration: the buffer of the
    embedding may have changed after construction."""
    for name, module in model.named_modules():
        if is_part(module, "RotaryEmbedding"):
            _check(op, name, module, rotary)


def _check(op: str, name: str, module: Any, rotary: Rotary) -> None:
    """Raise if a rotary embedding differs from ours. The check reads the embedding's buffer on the
    host."""
    if module.inv_freq.is_meta:
        return
    want = torch.tensor(rotary.frequencies, dtype=torch.float64, device="cpu")
    inv_freq = module.inv_freq.detach().cpu()
    if isinstance(inv_freq, FakeTensor):  # a dry run has no values
        return
    # the model may have been made on another device than ``want``, and cast to float16, in which
    # low frequencies are subnormal
    info = torch.finfo(inv_freq.dtype)
    bound = (2 * rotary.rounding + 4 * info.eps) * want + info.eps * info.smallest_normal
    same = inv_freq.shape == want.shape and float(module.attention_scaling) == rotary.scaling
    if not same or bool(((inv_freq.double() - want).abs() > bound).any()):
        raise argument_error(
            op,
            name,
            must="be that of config.rope_parameters",
            got="one of other frequencies or another scaling",
            do="Make the model from this configuration",
        )


class RotaryFrequencies(Rewrite):
    """Detect changes of the frequencies after ``patch``, because steps read the cache's table, not
    the model's frequencies.

    Args:
        rotary: Frequencies of the model.
    """

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's rotary embedding."""
        return is_part(module, "RotaryEmbedding")

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Store the buffer's address and version; replace no method."""
        setattr(module, SOURCE, _source(module))
        return iter(())

    def check_unchanged(self, op: str, name: str, module: Any) -> None:
        """Raise if the frequencies changed. Read the frequencies only if they may have changed."""
        source = _source(module)
        # torch does not count writes through inv_freq.data or NumPy
        if module.inv_freq.device.type == "cpu" or getattr(module, SOURCE, None) != source:
            _check(op, name, module, self.rotary)
            if getattr(module, SOURCE, None) != source:
                setattr(module, SOURCE, source)

    def restore(self, module: Any) -> None:
        """Remove the stored address and version."""
        vars(module).pop(SOURCE, None)


def _source(module: Any) -> tuple[Any, ...]:
    buffer = module.inv_freq
    version = 0 if buffer.is_inference() else buffer._version
    return buffer.data_ptr(), version, float(module.attention_scaling)

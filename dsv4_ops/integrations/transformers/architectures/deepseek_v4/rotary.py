"""Check that Hugging Face's rotary embeddings match ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import LayerSpec
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.yarn import YarnScaling, rounding_of_frequencies

_KNOWN = {"main": ("default",), "compress": ("default", "yarn")}
"""Supported RoPE types: "main" for window layers, "compress" for layers with a compressor."""

_UNKNOWN = "Other rotary embeddings are unknown to this version"


def check_rope(op: str, config: Any) -> None:
    """Raise if the configuration has an unsupported RoPE type."""
    for label in _KNOWN:
        rope = config.rope_parameters.get(label)
        rope_type = rope.get("rope_type") if isinstance(rope, dict) else None
        if rope_type not in _KNOWN[label]:
            raise _refused(op, label, {"rope_type": rope_type})


def yarn_of(op: str, config: Any) -> YarnScaling | None:
    """Return the YaRN scaling of layers with a compressor, or None."""
    rope = config.rope_parameters["compress"]
    if rope["rope_type"] == "default":
        return None
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = rope.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / original
    try:
        return YarnScaling(
            factor=float(factor),
            original_positions=int(original),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
        )
    except ValueError as error:
        raise _refused(op, "compress", rope) from error


def check_frequencies(op: str, config: Any, layers: LayerSpec) -> None:
    """Raise if Hugging Face computes other frequencies or another scale than we do.

    Hugging Face reads more fields of a configuration than we do, and versions of Hugging Face
    differ.
    """
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    with torch.device("cpu"):
        # a copy: Hugging Face writes defaults into the configuration
        rotary = DeepseekV4RotaryEmbedding(copy.deepcopy(config))
    for label, mistaken in _mistakes(rotary, layers):
        rope = config.rope_parameters[label]
        found = {"rope_type": rope["rope_type"], **mistaken}
        raise _refused(op, label, found)


def check_rotary(op: str, model: Any, layers: LayerSpec) -> None:
    """Raise if a rotary embedding of the model does not match the configuration: the buffers of the
    embedding may have changed after construction."""
    for name, module in model.named_modules():
        if type(module).__name__ == "DeepseekV4RotaryEmbedding":
            for label, mistaken in _mistakes(module, layers):
                raise argument_error(
                    op,
                    name,
                    must=f"be that of config.rope_parameters[{label!r}]",
                    got=mistaken,
                    do="Make the model from the configuration that it has now",
                )


def _mistakes(rotary: Any, layers: LayerSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each label whose rotary embedding differs from ours, and the difference."""
    for label in _KNOWN:
        scaling = float(getattr(rotary, f"{label}_attention_scaling"))
        inv_freq = getattr(rotary, f"{label}_inv_freq").detach()
        if scaling != 1.0:
            yield label, {"attention_factor": scaling}
        elif 2 * len(inv_freq) != layers.rope_dim:
            yield label, {"rotated values": f"{2 * len(inv_freq)}, not {layers.rope_dim}"}
        elif not inv_freq.is_meta:
            pair = _first_difference(inv_freq.cpu(), layers, label)
            if pair is not None:
                yield label, {f"frequency of pair {pair}": float(inv_freq[pair])}


def _first_difference(inv_freq: Tensor, layers: LayerSpec, label: str) -> int | None:
    """Return the first pair whose frequency differs from ours by more than rounding. The model may
    have been cast to another dtype."""
    yarn = layers.yarn if label == "compress" else None
    theta = layers.rope_theta if label == "main" else layers.compress_rope_theta
    slowdowns = yarn.slowdowns(layers.rope_dim, theta) if yarn else [1.0] * len(inv_freq)
    powers = [theta ** (-2 * pair / layers.rope_dim) for pair in range(len(inv_freq))]
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    ours = torch.tensor(powers, **exact) * torch.tensor(slowdowns, **exact)
    info = torch.finfo(inv_freq.dtype)
    relative = rounding_of_frequencies(theta, yarn.factor if yarn else 0.0) + info.eps
    bound = relative * ours + info.eps * info.smallest_normal
    different = ((inv_freq.double() - ours).abs() > bound).nonzero()
    return int(different[0]) if len(different) else None


def rounded_table(layers: LayerSpec, kind: str, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines of float32 angles, rounded to ``dtype`` as in Hugging Face."""
    theta = layers.rope_theta if kind == "window" else layers.compress_rope_theta
    single: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    pairs = torch.arange(0, layers.rope_dim, 2, **single) / layers.rope_dim
    frequencies = 1.0 / theta**pairs
    if kind != "window" and layers.yarn is not None:
        slowdowns = layers.yarn.slowdowns(layers.rope_dim, theta)
        frequencies = frequencies * torch.tensor(slowdowns, **single)
    angles = torch.arange(num_positions, **single)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype).to(torch.float32)


def _refused(op: str, label: str, value: object) -> Exception:
    rule = "be 'default'"
    if label == "compress":
        rule += ", or 'yarn' with attention_factor 1.0"
    return argument_error(
        op,
        f"config.rope_parameters[{label!r}]",
        must=rule,
        got=value,
        do=_UNKNOWN,
        kind=NotImplementedError,
    )

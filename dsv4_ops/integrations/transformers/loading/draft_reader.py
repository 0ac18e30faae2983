"""Read the tensors of a draft layer from a checkpoint's files into the layer's modules."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.checkpoint.headers import StoredTensor
from dsv4_ops.checkpoint.values import check_values
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import WEIGHT_BLOCK
from dsv4_ops.integrations.transformers.modules import quantized
from dsv4_ops.reference.experts import expert_values
from dsv4_ops.reference.linear import weight_values


@dataclass(frozen=True)
class DraftNames:
    """The names of a draft layer's tensors in the checkpoints of a model family.

    Attributes:
        linears: For each linear layer that may be quantised, its name in the files and the path of
            its module.
        others: For each other parameter or buffer, its name in the files and its path.
        experts: Name of the experts in the files, without the number of the expert.
        parts: For each projection of the stacked experts, the names of its parts in the files.
        scale: Last part of the name of a scale. The last part of a weight's name is "weight".
    """

    linears: Mapping[str, str]
    others: Mapping[str, str]
    experts: str
    parts: Mapping[str, tuple[str, ...]]
    scale: str

    def num_experts(self, names: Any) -> int:
        """Count the experts by the names of tensors."""
        (last,) = self.parts["down_proj"]
        prefix, suffix = f"{self.experts}.", f".{last}.weight"
        return sum(name.startswith(prefix) and name.endswith(suffix) for name in names)


@dataclass
class DraftReader:
    """Reads tensors of a draft layer, by their names without the prefix of the layer.

    Attributes:
        op: Public function that an error names.
        prefix: Prefix of the names in the files.
        headers: Headers of the tensors, by names without the prefix.
        power_of_two: Whether float32 scales must be powers of two, so that they fit into bytes.
        device: Device of the layer.
    """

    op: str
    prefix: str
    headers: Mapping[str, StoredTensor]
    power_of_two: bool
    device: torch.device
    _opened: dict[Path, Any] = field(default_factory=dict)

    @torch.no_grad()
    def fill(self, draft: Any, names: DraftNames) -> None:
        """Set all parameters of a draft layer."""
        with ExitStack() as self._files:
            for source, target in names.linears.items():
                self._set_linear(draft.get_submodule(target), source, names.scale)
            for source, target in names.others.items():
                module, _, part = target.rpartition(".")
                self._set(draft.get_submodule(module), part, self._read(source))
            self._set_experts(draft.get_submodule("layers.0.mlp.experts"), names)

    def _read(self, name: str, *, scale: bool = False) -> Tensor:
        """Read a tensor; raise for NaN codes and for invalid scales."""
        from safetensors import safe_open

        file, whole = self.headers[name].file, f"{self.prefix}{name}"
        if file not in self._opened:
            self._opened[file] = self._files.enter_context(safe_open(file, framework="pt"))
        tensor: Tensor = self._opened[file].get_tensor(whole)
        settings = {"scale": scale, "power_of_two": self.power_of_two}
        check_values(self.op, whole, tensor, "Download it again", **settings)
        return tensor

    def _set(self, module: Any, name: str, value: Tensor) -> None:
        """Set a parameter or buffer, and keep the dtype of this parameter or buffer."""
        parameter = getattr(module, name)
        value = value.to(device=self.device, dtype=parameter.dtype)
        if name in module._parameters:
            module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[name] = value

    def _set_linear(self, module: Any, source: str, suffix: str) -> None:
        weight, scale_name = self._read(f"{source}.weight"), f"{source}.{suffix}"
        is_quantized = quantized.is_quantized(module)
        if scale_name not in self.headers:
            self._check_plain(f"{source}.weight", is_quantized)
            self._set(module, "weight", weight)
            return
        scale = self._read(scale_name, scale=True)
        if is_quantized:
            self._set(module, "weight", weight)
            self._set(module, "weight_scale_inv", scale)
        else:
            self._set(module, "weight", _values(weight, _bytes(scale)))

    def _set_experts(self, module: Any, names: DraftNames) -> None:
        is_quantized = quantized.is_quantized(module)
        for name, parts in names.parts.items():
            weights, scales = [], []
            for index in range(names.num_experts(self.headers)):
                each = [f"{names.experts}.{index}.{part}" for part in parts]
                weights.append(torch.cat([self._read(f"{one}.weight") for one in each]))
                of_parts = [f"{one}.{names.scale}" for one in each]
                if of_parts[0] in self.headers:
                    read = [_bytes(self._read(one, scale=True)) for one in of_parts]
                    scales.append(torch.cat(read))
            if not scales:
                self._check_plain(f"{names.experts}.0.{parts[0]}.weight", is_quantized)
                self._set(module, name, torch.stack(weights))
            elif is_quantized:
                scale = torch.stack(scales)
                scale = scale if scale.dtype == torch.float32 else scale.view(torch.float8_e8m0fnu)
                self._set(module, name, torch.stack(weights))
                self._set(module, f"{name}_scale_inv", scale)
            else:
                values = [expert_values(*pair) for pair in zip(weights, scales, strict=True)]
                self._set(module, name, torch.stack(values))

    def _check_plain(self, name: str, is_quantized: bool) -> None:
        if is_quantized:
            raise argument_error(
                self.op,
                f"{self.prefix}{name}",
                must="be quantised, as the same weight in the model's layers is",
                got="no codes",
                do="Load a model whose layers are not quantised, or the model's own checkpoint",
                kind=NotImplementedError,
            )


def check_sizes(op: str, config: Any, sizes: Mapping[str, int]) -> None:
    """Raise if the files belong to a model with other sizes."""
    for name, actual in sizes.items():
        size = getattr(config, name)
        if actual != size:
            raise argument_error(
                op,
                "path",
                must=f"have the model's {name}, {size}",
                got=actual,
                do="Pass the model's own checkpoint",
            )


def _bytes(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 else scale.view(torch.uint8)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantise codes whose last blocks may be incomplete."""
    rows, columns = codes.shape
    ends = (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK)
    whole = torch.nn.functional.pad(codes.to(torch.float32), ends)
    return weight_values(whole, scale)[:rows, :columns].contiguous()

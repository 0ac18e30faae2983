"""Fuse linear layers with the same input, because a decode step spends more time on launches than
on reading weights.

The weights become views of one tensor, so parameters, state dict and memory stay the same. An added
module multiplies by that tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.core.registry import AUTO, REFERENCE
from dsv4_ops.integrations.transformers.modules import quantized
from dsv4_ops.integrations.transformers.modules.checks import is_unchanged
from dsv4_ops.integrations.transformers.modules.replacement import (
    QUANTIZED_LINEAR,
    Maker,
    class_of,
    is_linear,
    linear_float32,
    local,
    own_forward,
    quantized_weights,
    runs_ours,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.integrations.transformers.modules.split import split_of
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.ops.linear import fp8_linear_norms, fp8_linear_swiglu

FUSED = "dsv4_ops_fused"
FUSED_ON = ("cuda",)
"""Devices where launches cost more than the GEMMs of a few tokens."""


class FusedLinear(nn.Module):
    """Several linear layers with the same input; their outputs are concatenated."""

    weight: Tensor
    scale: Tensor | None

    def __init__(self, layers: list[Any], recipe: Recipe, impl: str) -> None:
        super().__init__()
        self.recipe, self.impl = recipe, impl
        self.sizes = [int(local(layer.weight).shape[0]) for layer in layers]
        self.gather(layers)

    @torch.no_grad()
    def gather(self, layers: list[Any]) -> None:
        """Copy the weights into one tensor, and make the layers' weights views of this tensor."""
        self.register_buffer("weight", _gathered(layers, "weight"), persistent=False)
        scale = None
        if not is_linear(layers[0]):
            scale = _gathered(layers, "weight_scale_inv")
            scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
        self.register_buffer("scale", scale, persistent=False)

    def holds(self, layers: list[Any]) -> bool:
        """Whether the weights and scales of ``layers`` are still views of this module's tensors."""
        return _holds(self.weight, layers, "weight") and (
            self.scale is None or _holds(self.scale, layers, "weight_scale_inv")
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 outputs for plain layers, and outputs in the dtype of ``x`` for FP8
        layers."""
        if self.scale is None:
            return linear_float32(x, self.weight)
        rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
        out = quantized.product(self.recipe, self.impl, rows, self.weight, self.scale)
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    def heads(self, x: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Return the output of each layer for ``x`` [rows, k]. An output is [rows, heads, dim];
        ``dims`` has the ``dim`` of each layer."""
        out = self(x)
        # the product is at the start of its storage, so a layer's offset in the product is its
        # offset in the storage
        starts = itertools.accumulate(self.sizes, initial=0)
        # Inductor would specialise a view of a slice to one row or to several, and compile again
        return [
            out.as_strided((out.shape[0], size // dim, dim), (out.stride(0), dim, 1), start)
            for size, dim, start in zip(self.sizes, dims, starts, strict=False)
        ]

    def normed(self, x: Tensor, norms: tuple[Any, Any]) -> tuple[Tensor, Tensor] | None:
        """Return the two outputs after their norms; None if a norm was changed, or if no fused op
        supports the call."""
        ours = all(runs_ours(norm) and is_unchanged(norm) for norm in norms)
        if self.scale is None or not self._has_op(x) or not ours:
            return None
        eps, other = (norm.variance_epsilon for norm in norms)
        if eps != other:
            return None
        tensors = (x, self.weight, self.scale, *(norm.weight.float() for norm in norms))
        return fp8_linear_norms(*tensors, eps=eps, activations=self.recipe.activations)

    def swiglu(self, x: Tensor, limit: float) -> Tensor | None:
        """Return the SwiGLU of gates and ups; None if no fused op supports the call."""
        if self.scale is None or not self._has_op(x):
            return None
        rows, activations = x.reshape(-1, x.shape[-1]), self.recipe.activations
        weight = (self.weight, self.scale)
        out = fp8_linear_swiglu(rows, *weight, swiglu_limit=limit, activations=activations)
        return out.view(*x.shape[:-1], -1)

    def _has_op(self, x: Tensor) -> bool:
        """Whether the fused ops support the recipe, ``impl`` and the dtype of ``x``."""
        scale = "pow2" if self.recipe.activations == "bf16" else self.recipe.activation_scale
        return self.impl != REFERENCE and scale == "pow2" and x.dtype == torch.bfloat16


def _holds(whole: Tensor, layers: list[Any], name: str) -> bool:
    at = whole.data_ptr()
    for layer in layers:
        part = local(layer._parameters[name])
        if part.data_ptr() != at:
            return False
        at += part.nbytes
    return True


def _gathered(layers: list[Any], name: str) -> Tensor:
    weights = [local(layer._parameters[name]) for layer in layers]
    parts = [weight.detach() for weight in weights]
    dtype = parts[0].dtype
    whole = parts if dtype.itemsize > 1 else [part.view(torch.uint8) for part in parts]
    fused = torch.cat(whole).view(dtype)
    for weight, part in zip(weights, fused.split([len(part) for part in parts]), strict=True):
        weight.data = part
    return fused


def fused_layer(holder: Any, layers: list[Any]) -> FusedLinear | None:
    """Return the fused layer of ``holder``. Return None if ``holder`` has no fused layer, if
    autograd may need gradients, or if a program changed one of ``layers``."""
    fused: FusedLinear | None = holder._modules.get(FUSED)
    if fused is None or torch.is_grad_enabled() or not all(map(_is_own, layers)):
        return None
    return fused


def _is_own(layer: Any) -> bool:
    """Whether a layer is Hugging Face's, in bf16 or FP8, and has no hooks."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    if split_of(layer) is not None:  # a split layer is always FP8; a trace cannot read its dtype
        return not hooks and own_forward(layer) is None
    if is_linear(layer):
        return bool(layer.weight.dtype == torch.bfloat16)
    fp8 = quantized_weights(layer) == QUANTIZED_LINEAR
    return fp8 and not hooks and own_forward(layer) is None


def of_attention(module: Any) -> list[Any]:
    """Return the layers that an attention module applies to its input."""
    return [module.q_a_proj, module.kv_proj]


def of_compressor(compressor: Any) -> list[Any]:
    """Return the layers that a compressor and its indexer apply to the same input."""
    layers = [compressor.kv_proj, compressor.gate_proj]
    indexer = getattr(compressor, "indexer", None)
    if indexer is not None:
        owner = getattr(indexer, "scorer", indexer)  # depends on the version of transformers
        layers += [indexer.kv_proj, indexer.gate_proj, owner.weights_proj]
    return layers


def of_queries(module: Any) -> list[Any]:
    """Return the layers that an attention module and its indexer apply to the query's latent."""
    return [module.q_b_proj, module.compressor.indexer.q_b_proj]


def of_shared_experts(module: Any) -> list[Any]:
    """Return the gate and up projections."""
    return [module.gate_proj, module.up_proj]


class FusedProjections(Rewrite):
    """Fuse linear layers with the same input on devices where the fused layer is faster.

    Args:
        recipe: The recipe that ``patch`` got.
        impl: ``patch``'s argument ``impl``.
    """

    def __init__(self, recipe: Recipe, impl: str) -> None:
        self.recipe, self.impl = recipe, REFERENCE if impl == REFERENCE else AUTO

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's attention or shared experts."""
        return class_of(module) in ("DeepseekV4Attention", "DeepseekV4MLP")

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Add the fused layers; no method is replaced."""
        for holder, layers in self._groups(module):
            if layers[0].weight.device.type in FUSED_ON:
                holder.add_module(FUSED, FusedLinear(layers, self.recipe, self.impl))
        return iter(())

    def needs_refresh(self, body: Any) -> bool:
        """True: weights may have been moved or replaced."""
        return True

    def refresh(self, op: str, name: str, module: Any) -> None:
        """Fuse weights again if a program moved or replaced weights."""
        for holder, layers in self._groups(module):
            fused = holder._modules.get(FUSED)
            if fused is not None and not fused.holds(layers):
                fused.gather(layers)

    def restore(self, module: Any) -> None:
        """Remove the fused layers; the weights remain views."""
        compressor = module._modules.get("compressor")
        for holder in (module, compressor, getattr(compressor, "indexer", None)):
            if holder is not None:
                holder._modules.pop(FUSED, None)

    def _groups(self, module: Any) -> Iterator[tuple[Any, list[Any]]]:
        """Yield each module with layers to fuse, and these layers: FP8 layers, or bf16 layers with
        float32 outputs."""
        if class_of(module) == "DeepseekV4MLP":
            groups = [(module, of_shared_experts(module), False)]
        else:
            groups = [(module, of_attention(module), False)]
            indexer = getattr(module.compressor, "indexer", None)
            if indexer is not None:
                groups.append((indexer, of_queries(module), False))
            if module.compressor is not None and self.recipe.compressor_float32:
                groups.append((module.compressor, of_compressor(module.compressor), True))
        for holder, layers, plain in groups:
            if all(_is_own(layer) and is_linear(layer) == plain for layer in layers):
                yield holder, layers

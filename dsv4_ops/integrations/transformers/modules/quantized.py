"""Run our ops on FP8 linear layers, and on FP8 or FP4 experts.

Parameters stay as Hugging Face loaded them. Our forwards replace Hugging Face's forwards, which
download kernels from a hub at the first call. A module is quantised if it has codes and
``*_scale_inv`` as parameters. Compilers do not support float8_e8m0fnu, so buffers hold these scales
as bytes, in the storage of the parameters. Ops take codes in whole blocks of 128 rows. For a layer
that ends within a block, such as DeepSeek-V3's ``kv_a_proj_with_mqa`` with 576 rows, a larger
buffer holds the codes, and the parameter becomes a view of this buffer. If Hugging Face split a
module over ranks, buffers hold this rank's part of codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.checkpoint.values import check_values
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.core.layout import FP4_BLOCK, WEIGHT_BLOCK, round_up
from dsv4_ops.core.registry import AUTO, REFERENCE
from dsv4_ops.core.types import QuantizedGroups
from dsv4_ops.integrations.transformers.modules.bf16_experts import limit_of
from dsv4_ops.integrations.transformers.modules.replacement import (
    QUANTIZED_LINEAR,
    Forward,
    Maker,
    has_global_hooks,
    is_split,
    local,
    own_forward,
    quantized_weights,
    runs_ours,
    unwrapped,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.integrations.transformers.modules.split import own_experts, split_of, summed
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.ops.experts import experts
from dsv4_ops.ops.linear import fp8_grouped_linear, fp8_linear, quantize_rows
from dsv4_ops.reference.linear import weight_values

_CODES = "dsv4_ops_weight_codes"
"""Buffer that holds a linear layer's codes, if the last block is filled up with zeros, or if the
codes are only this rank's part."""

_AGAIN = "Load the released checkpoint again; check_checkpoint says what is wrong with a file"
_OTHER = "Load it with FineGrainedFP8Config(dequantize=True)"
_HF_MIN_AMAX = 1e-12


class QuantizedWeights(Rewrite):
    """Let FP8 linear layers, and FP8 or FP4 experts, run our ops.

    Args:
        recipe: The recipe that ``patch`` got.
        impl: ``patch``'s argument ``impl``.
    """

    def __init__(self, recipe: Recipe, impl: str) -> None:
        self.recipe, self.impl = recipe, REFERENCE if impl == REFERENCE else AUTO

    def applies(self, module: Any) -> bool:
        """Whether a module has quantised weights, or is an adapter of a quantised parameter."""
        return bool(quantized_weights(module)) or _adapts_codes(module)

    def check(self, op: str, name: str, module: Any) -> None:
        """Raise if a weight is not as in DeepSeek's files, or if an adapter would change codes.

        Codes and scales are read on their device without a copy; meta tensors are not read.
        """
        _check_adapter(op, name, module)
        for weight in quantized_weights(module):
            _check_weight(op, f"{name}.{weight}", module, weight)
        if quantized_weights(module):
            _check_settings(op, name, module)

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Add scales in dtypes that ops take, and yield our forward."""
        share_scales(module)
        weights = quantized_weights(module)
        if weights and own_forward(module) is None:
            maker = _linear_forward if weights == QUANTIZED_LINEAR else _experts_forward
            yield "forward", partial(maker, self.recipe, self.impl)

    def needs_refresh(self, body: Any) -> bool:
        """Whether the model is quantised."""
        return getattr(body.config, "quantization_config", None) is not None

    def refresh(self, op: str, name: str, module: Any) -> None:
        """Raise if an adapter changes codes. If a program moved or replaced scales, let the buffers
        share the storage of the scales again."""
        _check_adapter(op, name, module)
        share_scales(module)

    def restore(self, module: Any) -> None:
        """Remove the buffers of scales and codes."""
        for weight in quantized_weights(module):
            delattr(module, _buffer(weight))
            if hasattr(module, _own(weight)):
                delattr(module, _own(weight))


def _adapts_codes(module: Any) -> bool:
    """Whether PEFT adapts a parameter that holds codes, such as a weight of fused experts.

    An adapter of a linear layer is allowed, because it only adds to the layer's output, and does
    not change the codes.
    """
    of_parameter = "base_layer" in module._modules and hasattr(module, "parameter_name")
    return of_parameter and bool(quantized_weights(unwrapped(module)))


def _check_adapter(op: str, name: str, module: Any) -> None:
    if _adapts_codes(module) and not module.disable_adapters:
        raise _adapted(op, f"{name}.{module.parameter_name}")


def _adapted(op: str, name: str) -> Exception:
    return argument_error(
        op,
        name,
        must="have no adapter, as it holds codes that count with their scales",
        got="one",
        do="Adapt linear layers only, or load with FineGrainedFP8Config(dequantize=True)",
        kind=NotImplementedError,
    )


def _codes(module: Any, name: str) -> Tensor:
    """Return a parameter with codes; raise if a parametrization replaced the parameter."""
    if name not in module._parameters:
        raise _adapted("model", name)
    codes: Tensor = module._parameters[name]
    return codes.detach() if split_of(module) is None else module._buffers[_own(name)]


def share_scales(module: Any) -> None:
    """Add buffers with a quantised module's scales, in dtypes that ops take, without a copy.

    Call this function again after scales were moved or replaced: the buffers then no longer share
    the storage of the scales.
    """
    weights = quantized_weights(module)
    if all(_shares_storage(module, weight) for weight in weights):
        return
    for weight in weights:
        scale = _op_scale(_scale(module, weight))
        module.register_buffer(_buffer(weight), scale, persistent=False)
        codes = module._parameters[weight]
        if is_split(codes):
            module.register_buffer(_own(weight), local(codes).detach(), persistent=False)
    if weights == QUANTIZED_LINEAR and not is_split(module.weight):
        _fill_blocks(module)


def _shares_storage(module: Any, weight: str) -> bool:
    scale, codes = (getattr(module, name, None) for name in (_buffer(weight), _own(weight)))
    if scale is None or scale.data_ptr() != local(_scale(module, weight)).data_ptr():
        return False
    return codes is None or codes.data_ptr() == local(module._parameters[weight]).data_ptr()


def takes_codes(module: Any) -> bool:
    """Whether a module has our forward for FP8 weights, and no hook sees its input."""
    hooks = module._forward_hooks or module._forward_pre_hooks or has_global_hooks()
    return not hooks and quantized_weights(module) == QUANTIZED_LINEAR and runs_ours(module)


def is_quantized(module: Any) -> bool:
    """Whether a module has weights that are quantised as in DeepSeek's checkpoints."""
    return bool(quantized_weights(module))


def _scale(module: Any, weight: str) -> Tensor:
    return module._parameters[f"{weight}_scale_inv"]


def _op_scale(scale: Tensor) -> Tensor:
    """Return scales in a dtype that ops take, without a copy."""
    # call local first: torch cannot detach a distributed tensor in inference mode
    scale = local(scale).detach()
    return scale if scale.dtype in (torch.float32, torch.uint8) else scale.view(torch.uint8)


def _fill_blocks(module: Any) -> None:
    """Move the codes of a layer that ends within a block to storage with whole blocks."""
    weight = module.weight
    if weight.shape[0] % WEIGHT_BLOCK == 0:
        return
    whole = weight.new_zeros((round_up(weight.shape[0], WEIGHT_BLOCK), weight.shape[1]))
    whole[: weight.shape[0]] = weight.detach()
    weight.data = whole[: weight.shape[0]]
    module.register_buffer(_CODES, whole, persistent=False)


def dense_weight(linear: Any, split: bool | None = None) -> Tensor:
    """Return this rank's part of a linear layer's weight, dequantised to float32 if the layer is
    quantised. In a step, pass whether the weight is split."""
    if quantized_weights(linear) != QUANTIZED_LINEAR:
        return local(linear.weight, split)
    if not torch.compiler.is_compiling():
        share_scales(linear)  # the loop over modules may not have visited this layer yet
    codes, scale = _codes(linear, "weight"), getattr(linear, _buffer("weight"))
    values: Tensor = weight_values(getattr(linear, _CODES, codes), scale)[: codes.shape[0]]
    return values


def _buffer(weight: str) -> str:
    return f"dsv4_ops_{weight}_scale"


def _own(weight: str) -> str:
    return f"dsv4_ops_{weight}_codes"


def _check_weight(op: str, name: str, module: Any, weight: str) -> None:
    of_ranks, label = module._parameters[weight], f"{name}_scale_inv"
    codes, scale = (local(each) for each in (of_ranks, _scale(module, weight)))
    *lead, rows, columns = codes.shape
    if codes.dtype in (torch.int8, torch.uint8):
        dtypes: tuple[torch.dtype, ...] = (torch.float8_e8m0fnu, torch.uint8)
        shape = (*lead, rows, 2 * columns // FP4_BLOCK)
    else:
        dtypes = (torch.float8_e8m0fnu, torch.uint8, torch.float32)
        shape = (*lead, -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
        whole = columns % WEIGHT_BLOCK == 0
        is_part = is_split(of_ranks)
        may_end = weight in QUANTIZED_LINEAR and not is_part
        if not whole or (rows % WEIGHT_BLOCK and not may_end):
            raise argument_error(
                op,
                name,
                must=f"have whole blocks of {WEIGHT_BLOCK}" + " on each rank" * is_part,
                got=list(codes.shape),
                do="Split it over fewer ranks, or leave it whole" if is_part else _OTHER,
                kind=NotImplementedError,
            )
    from_file = getattr(of_ranks, "_is_hf_initialized", False)
    has_scale = getattr(_scale(module, weight), "_is_hf_initialized", False)
    if scale is None or (from_file and not has_scale):
        raise argument_error(
            op,
            label,
            must="come with the checkpoint's codes",
            got=None if scale is None else "no such tensor in it",
            do=_AGAIN,
        )
    if tuple(scale.shape) != shape:
        transposed = tuple(scale.shape) == (*lead, *shape[:-3:-1])
        raise argument_error(
            op,
            label,
            must=f"have the shape {list(shape)}",
            got=list(scale.shape),
            do="It is transposed" if transposed else _AGAIN,
        )
    if scale.dtype not in dtypes:
        raise argument_error(
            op,
            label,
            must="be " + " or ".join(map(str, dtypes)),
            got=scale.dtype,
            do=_AGAIN,
            kind=TypeError,
        )
    check_values(op, label, scale.detach(), _AGAIN, scale=True)
    check_values(op, name, codes.detach(), _AGAIN)


def _check_settings(op: str, name: str, module: Any) -> None:
    """Raise for settings that Hugging Face's classes have for other models."""
    settings = (
        ("bias", getattr(module, "bias", None), None),
        ("activation_scheme", getattr(module, "activation_scheme", "dynamic"), "dynamic"),
        ("swiglu_alpha", getattr(module, "swiglu_alpha", None), None),
        ("gate_softcap", getattr(module, "gate_softcap", None), None),
        ("has_gate", getattr(module, "has_gate", True), True),
    )
    for setting, actual, supported in settings:
        if actual is not supported and actual != supported:
            is_plain = isinstance(actual, (str, bool, int, float))
            raise argument_error(
                op,
                f"{name}.{setting}",
                must=f"be {supported!r}",
                got=repr(actual) if is_plain else kind_of(actual),
                do=_OTHER,
                kind=NotImplementedError,
            )


def _linear_forward(recipe: Recipe, impl: str, _: Forward) -> Forward:
    """Make a linear layer's forward, [.., k] -> [.., n].

    With g groups, the forward maps [.., g, k] to [.., g, n / g]. A forward with groups also takes
    FP8 codes, and then returns bf16.
    """

    def forward(self: Any, x: Tensor | QuantizedGroups) -> Tensor:
        groups = getattr(self, "n_groups", 1)
        if isinstance(x, QuantizedGroups):
            codes, scale = _codes(self, "weight"), self.dsv4_ops_weight_scale
            out = fp8_grouped_linear(x.values, codes, scale, x.scales, impl=impl)
            return out.unflatten(1, (groups, -1))
        lead = x.shape[:-1]
        rows = x.to(torch.bfloat16)
        rows = rows.flatten(0, -3) if groups > 1 else rows.reshape(-1, x.shape[-1])
        codes, scale = _codes(self, "weight"), self.dsv4_ops_weight_scale
        weight = getattr(self, _CODES, codes)
        if torch.is_grad_enabled() and x.requires_grad:
            out = _differentiable(rows, weight, scale, groups)
        else:
            out = product(recipe, impl, rows, weight, scale, groups)
        out = out[..., : codes.shape[0]]
        # a graph for all sizes cannot reshape a slice without a guard on the number of rows
        out = out if out.dim() == x.dim() == 2 else out.reshape(*lead, len(codes) // groups)
        return summed(self, out.to(x.dtype))

    return forward


def product(
    recipe: Recipe, impl: str, rows: Tensor, weight: Tensor, scale: Tensor, groups: int = 1
) -> Tensor:
    """Multiply bf16 rows by a weight, with the activations that ``recipe`` sets."""
    if recipe.activations == "fp8" and recipe.activation_scale == "float32":
        return _as_hugging_face(rows, weight, scale, groups, impl)
    op = fp8_grouped_linear if groups > 1 else fp8_linear
    return op(rows, weight, scale, activations=recipe.activations, impl=impl)


def _as_hugging_face(rows: Tensor, weight: Tensor, scale: Tensor, groups: int, impl: str) -> Tensor:
    """Quantise rows to FP8 as Hugging Face does, with float32 scales, and multiply by a weight."""
    flat = rows.transpose(0, 1).flatten(0, 1) if groups > 1 else rows
    codes, scales = quantize_rows(flat, scale="float32", min_amax=_HF_MIN_AMAX)
    if groups == 1:
        return fp8_linear(codes, weight, scale, scales, impl=impl)
    sizes = (groups, -1)
    codes, scales = codes.unflatten(0, sizes), scales.unflatten(0, sizes)
    return fp8_grouped_linear(codes, weight, scale, scales, impl=impl)


def _differentiable(rows: Tensor, weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """Multiply bf16 activations by FP8 weights with torch ops, because adapters need a gradient."""
    values = weight_values(weight, scale).unflatten(0, (groups, -1))
    inputs = rows.float().view(-1, groups, rows.shape[-1])
    out = torch.einsum("tgk,gnk->tgn", inputs, values).to(rows.dtype)
    return out if groups > 1 else out.squeeze(1)


def _experts_forward(recipe: Recipe, impl: str, _: Forward) -> Forward:
    def forward(
        self: Any,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
    ) -> Tensor:
        codes = _codes(self, "gate_up_proj")
        out = experts(
            x.to(torch.bfloat16),
            weights.float(),
            own_experts(self, expert_ids.to(torch.int32), codes.shape[0]),
            codes,
            self.dsv4_ops_gate_up_proj_scale,
            _codes(self, "down_proj"),
            self.dsv4_ops_down_proj_scale,
            shared,
            swiglu_limit=limit_of(self),
            activations=recipe.expert_activations,
            impl=impl,
        )
        return summed(self, out.to(x.dtype))

    return forward

"""``load_mtp``: the draft layer of a released checkpoint, which Hugging Face skips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.checkpoint.format import draft_tensors
from dsv4_ops.checkpoint.headers import StoredTensor
from dsv4_ops.checkpoint.values import check_values
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers import forwards
from dsv4_ops.integrations.transformers.architectures.base import DRAFT, draft_of
from dsv4_ops.integrations.transformers.modules import quantized, rewrite
from dsv4_ops.integrations.transformers.patch import add_replacements
from dsv4_ops.integrations.transformers.steps.step import spec_of
from dsv4_ops.reference.experts import expert_values
from dsv4_ops.reference.linear import weight_values

OP = "load_mtp"

_LINEARS = {
    "e_proj": "e_proj",
    "h_proj": "h_proj",
    "attn.wq_a": "layers.0.self_attn.q_a_proj",
    "attn.wq_b": "layers.0.self_attn.q_b_proj",
    "attn.wkv": "layers.0.self_attn.kv_proj",
    "attn.wo_a": "layers.0.self_attn.o_a_proj",
    "attn.wo_b": "layers.0.self_attn.o_b_proj",
    "ffn.shared_experts.w1": "layers.0.mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w3": "layers.0.mlp.shared_experts.up_proj",
    "ffn.shared_experts.w2": "layers.0.mlp.shared_experts.down_proj",
}
_OTHERS = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "attn_norm.weight": "layers.0.input_layernorm.weight",
    "ffn_norm.weight": "layers.0.post_attention_layernorm.weight",
    "attn.q_norm.weight": "layers.0.self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "layers.0.self_attn.kv_norm.weight",
    "attn.attn_sink": "layers.0.self_attn.sinks",
    "ffn.gate.weight": "layers.0.mlp.gate.weight",
    "ffn.gate.bias": "layers.0.mlp.gate.e_score_correction_bias",
    **{f"hc_head_{part}": f"hc_head.hc_{part}" for part in ("fn", "base", "scale")},
    **{
        f"hc_{block}_{part}": f"layers.0.{block}_hc.{part}"
        for block in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
}
_EXPERTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Names of the stacked experts' projections, and of their parts in the files."""


def load_mtp(model: Any, path: Path | str) -> Any:
    """Load the draft layer (MTP) of a released checkpoint into a patched model.

    The model then drafts for itself: ``generate(num_draft_tokens=)`` and ``speculative_step``.
    Weights are quantised if the model's are, and are dequantised to its dtype otherwise. The layer
    is the model's module ``mtp``, and its parameters are in the state dict; ``unpatch`` removes it.

    Args:
        model: A patched ``DeepseekV4ForCausalLM``, whole on one device, which ``load_mtp`` changes.
        path: Folder of the checkpoint. Only the draft layer's tensors are read.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is not patched, has a draft layer already, or has other sizes; the
            checkpoint has no draft layer; or a tensor of it (which the error names) is missing,
            transposed, unknown, of another dtype, or contains NaN, an infinity or a float32 scale
            that is not a power of two.
        NotImplementedError: a DSpark draft, several draft layers, another architecture, or a model
            that is split over ranks. The model is not changed.
        ImportError: safetensors is missing.

    Example:
        >>> import tempfile
        >>> from dsv4_ops.integrations import transformers as v4
        >>> from dsv4_ops.testing.checkpoint import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = v4.patch(v4.load_quantized(write_checkpoint(folder)))
        ...     model = v4.load_mtp(model, folder)
        >>> model.mtp.e_proj.weight.dtype
        torch.float8_e4m3fn
    """
    spec = spec_of(OP, model)
    if draft_of(model) is not None:
        raise argument_error(
            OP,
            "model",
            must="have no draft layer yet",
            got="one that has",
            do="It is loaded already",
        )
    spec.draft_kinds(OP)
    for name, weight in model.named_parameters():
        if hasattr(weight, "to_local"):
            raise argument_error(
                OP,
                name,
                must="be whole on this rank",
                got="a part of it",
                do="Load the model without a tp_plan",
                kind=NotImplementedError,
            )
    headers = draft_tensors(path, op=OP)
    _check_sizes(model.config, headers)
    draft = spec.draft_layer(OP, model)
    fill(draft, headers, model.device)
    return attach(model, draft)


def attach(model: Any, draft: Any) -> Any:
    """Add a draft layer with weights to a patched model; return the model."""
    spec = spec_of(OP, model)
    rewrites = forwards.rewrites(model, spec)
    rewrite.check(OP, draft, rewrites)
    add_replacements(model, list(rewrite.apply(draft, rewrites)))
    model.add_module(DRAFT, draft)
    return model


def _check_sizes(config: Any, headers: Mapping[str, StoredTensor]) -> None:
    """Raise if the files belong to a model with other sizes."""
    shapes = {name: tensor.info.shape for name, tensor in headers.items()}
    heads = shapes["attn.attn_sink"][0]
    dim = shapes["attn.kv_norm.weight"][0]
    group_inputs = shapes["attn.wo_a.weight"][1]
    groups = heads * dim // group_inputs
    sizes = {
        "hidden_size": shapes["norm.weight"][0],
        "num_attention_heads": heads,
        "head_dim": dim,
        "q_lora_rank": shapes["attn.q_norm.weight"][0],
        "o_lora_rank": shapes["attn.wo_a.weight"][0] // groups,
        "o_groups": groups,
        "n_routed_experts": _num_experts(headers),
        "moe_intermediate_size": shapes["ffn.experts.0.w1.weight"][0],
        "hc_mult": shapes["hc_head_base"][0],
    }
    for name, actual in sizes.items():
        size = getattr(config, name)
        if actual != size:
            raise argument_error(
                OP,
                "path",
                must=f"have the model's {name}, {size}",
                got=actual,
                do="Pass the model's own checkpoint",
            )


@torch.no_grad()
def fill(draft: Any, headers: Mapping[str, StoredTensor], device: torch.device) -> None:
    """Read the tensors of a draft layer, and set its parameters."""
    opened: dict[Path, Any] = {}
    with ExitStack() as files:

        def read(name: str) -> Tensor:
            return _read(files, opened, headers[name], f"{DRAFT}.0.{name}")

        for source, target in _LINEARS.items():
            _set_linear(draft.get_submodule(target), source, read, device)
        for source, target in _OTHERS.items():
            name, _, part = target.rpartition(".")
            _set(draft.get_submodule(name), part, read(source), device)
        experts = draft.get_submodule("layers.0.mlp.experts")
        _set_experts(experts, _num_experts(headers), read, device)


def released_weights(draft: Any) -> dict[str, Tensor]:
    """Weights of an unquantised draft layer, by their names in released files."""
    linears = {f"{source}.weight": f"{target}.weight" for source, target in _LINEARS.items()}
    state = draft.state_dict()
    weights = {source: state[target] for source, target in (linears | _OTHERS).items()}
    for name, parts in _EXPERTS.items():
        for index, expert in enumerate(state[f"layers.0.mlp.experts.{name}"]):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                weights[f"ffn.experts.{index}.{part}.weight"] = weight
    return {f"{DRAFT}.0.{name}": weight for name, weight in weights.items()}


def _num_experts(headers: Mapping[str, StoredTensor]) -> int:
    return sum(name.startswith("ffn.experts.") and name.endswith(".w2.weight") for name in headers)


def _read(files: ExitStack, opened: dict[Path, Any], header: StoredTensor, name: str) -> Tensor:
    """Read a tensor; raise for codes that are NaN and for scales that are not bytes."""
    from safetensors import safe_open

    if header.file not in opened:
        opened[header.file] = files.enter_context(safe_open(header.file, framework="pt"))
    tensor: Tensor = opened[header.file].get_tensor(name)
    scale, advice = name.endswith(".scale"), "Download it again"
    check_values(OP, name, tensor, advice, scale=scale, power_of_two=True)
    return tensor


def _set(module: Any, name: str, value: Tensor, device: torch.device) -> None:
    """Set a parameter or buffer, in its dtype."""
    parameter = getattr(module, name)
    value = value.to(device=device, dtype=parameter.dtype)
    if name in module._parameters:
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[name] = value


def _bytes(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 else scale.view(torch.uint8)


def _set_linear(
    module: Any, source: str, read: Callable[[str], Tensor], device: torch.device
) -> None:
    codes, scale = read(f"{source}.weight"), read(f"{source}.scale")
    if quantized.is_quantized(module):
        _set(module, "weight", codes, device)
        _set(module, "weight_scale_inv", scale, device)
    else:
        _set(module, "weight", weight_values(codes, _bytes(scale)), device)


def _set_experts(
    module: Any, count: int, read: Callable[[str], Tensor], device: torch.device
) -> None:
    for name, parts in _EXPERTS.items():
        codes, scales = [], []
        for index in range(count):
            each = [f"ffn.experts.{index}.{part}" for part in parts]
            codes.append(torch.cat([read(f"{one}.weight") for one in each]))
            scales.append(torch.cat([_bytes(read(f"{one}.scale")) for one in each]))
        if quantized.is_quantized(module):
            scale = torch.stack(scales)
            scale = scale if scale.dtype == torch.float32 else scale.view(torch.float8_e8m0fnu)
            _set(module, name, torch.stack(codes), device)
            _set(module, f"{name}_scale_inv", scale, device)
        else:
            values = [expert_values(*pair) for pair in zip(codes, scales, strict=True)]
            _set(module, name, torch.stack(values), device)

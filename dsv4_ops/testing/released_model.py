"""Build DeepSeek-V4, V3.2, V3, V2 or GLM-5 of any size in the released precision, with random
weights, on any device.

The build reads and writes no checkpoint, and no temporary allocation exceeds one weight. The 43
layers of Flash take 145 GiB, which is the size of their codes and scales. A GPU builds these layers
in seconds.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NOT_QUANTIZED = (r".*compressor.*\.(kv|gate)_proj", r".*\.weights_proj", r"lm_head")
"""Linear layers that are bfloat16 in the released files."""

_CODES, _SCALES, _EXPERT_SCALES = (0, 256), (119, 122), (117, 120)
"""Ranges of the sampled bytes. With scales of 2^-8 to 2^-6, sums of thousands of products are near
one. The sampled e2m1 codes reach 6 and the e4m3 codes stay below 2, so experts have a quarter of
these scales."""
_COLUMNS, _ROWS = "colwise", "rowwise"
_HEADS = {"q_b_proj": _COLUMNS, "sinks": _COLUMNS, "o_a_proj": _COLUMNS, "o_b_proj": _ROWS}
_SHARED_EXPERTS = {"gate_proj": _COLUMNS, "up_proj": _COLUMNS, "down_proj": _ROWS}
_BELOW_TWO = 0xBF
"""Mask that makes an e4m3 code less than 2, and never NaN."""


def released_model(
    config: Mapping[str, Any],
    *,
    device: torch.device | str = "cuda",
    seed: int = 0,
    distributed: Any = None,
) -> Any:
    """Build Hugging Face's model of a ``config.json`` with FP8 linears, and with FP4 experts for V4
    or FP8 experts for the others.

    Modules, names, shapes and dtypes are those of ``load_quantized``. Every tensor depends only on
    ``seed`` and on its name, so it is the same on all ranks and machines with the same kind of
    device.

    Args:
        config: A ``config.json``, such as ``testing.checkpoint.FLASH`` with fewer layers, or
            ``DeepseekV3Config().to_dict()``. Without a ``model_type`` it is that of V4.
        device: Device of the weights.
        seed: Seed of the weights.
        distributed: ``transformers.distributed.DistributedConfig``, such as ``split_over(2)``:
            Hugging Face's plans place the weights, and this process gets its part of each weight.

    Returns:
        The model, such as ``DeepseekV4ForCausalLM``, in evaluation mode, not patched.
    """
    from dsv4_ops.integrations.transformers.modules.replacement import is_split

    model = on_meta(config)
    if distributed is not None:
        kind = type(model)
        distributed, _, mesh = kind.prepare_distribute_model(distributed)
        model = kind.maybe_distribute_model(model, distributed, mesh)
    num_experts = model.config.n_routed_experts
    for prefix, module in list(model.named_modules()):
        if "rotary_emb" in prefix.rpartition(".")[2]:
            continue  # the loop below makes rotary embeddings
        for name, weight in list(module.named_parameters(recurse=False)):
            sampled = _sampled(f"{prefix}.{name}", weight, num_experts, device, seed)
            own = _own_part(sampled, weight) if is_split(weight) else sampled
            module._parameters[name] = nn.Parameter(own, requires_grad=False)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = _sampled(f"{prefix}.{name}", buffer, num_experts, device, seed)
    for prefix, module in list(model.named_modules()):
        if "rotary_emb" in prefix.rpartition(".")[2]:
            parent, _, name = prefix.rpartition(".")
            with torch.device(device):
                setattr(model.get_submodule(parent), name, type(module)(model.config))
    return model


def split_over(ranks: int, *, heads: bool = True, experts: str = "whole") -> Any:
    """Return Hugging Face's ``DistributedConfig`` that splits a released DeepSeek-V4 over ranks.

    The indexer is whole on every rank: the indexer has few weights, and ranks need not gather the
    indexer's queries.

    Args:
        ranks: Number of processes.
        heads: Whether to split attention heads. If so, patch the model with ``parallel``.
        experts: "whole" gives every rank some of the experts; "parts" gives every rank a part of
            each expert.
    """
    from transformers.distributed import DistributedConfig

    shards = ("grouped_gemm", "grouped_gemm") if experts == "whole" else ("packed_colwise", _ROWS)
    of_layer = {f"self_attn.{name}": style for name, style in _HEADS.items() if heads}
    of_layer |= {f"mlp.shared_experts.{name}": style for name, style in _SHARED_EXPERTS.items()}
    of_layer["mlp.experts"] = "moe_tp_experts"
    for name, style in zip(("gate_up_proj", "down_proj"), shards, strict=True):
        of_layer |= dict.fromkeys((f"mlp.experts.{name}", f"mlp.experts.{name}_scale_inv"), style)
    plan = {f"model.layers.*.{name}": style for name, style in of_layer.items()}
    plan |= {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    return DistributedConfig(tp_size=ranks, tp_plan=plan)


def _own_part(sampled: Tensor, placed: Any) -> Any:
    """Copy this rank's part of a tensor, as ``from_pretrained`` reads it from a file."""
    from transformers.distributed import sharding_utils

    part = sharding_utils.DtensorShardOperation(placed).shard_tensor
    # not every device can copy all one-byte dtypes
    own = part(sampled.view(torch.uint8) if sampled.element_size() == 1 else sampled)
    own = own.clone(memory_format=torch.contiguous_format).view(sampled.dtype)
    return sharding_utils._dtensor_from_local_like(own, placed)


def on_meta(config: Mapping[str, Any], not_quantized: Sequence[str] = NOT_QUANTIZED) -> Any:
    """Build Hugging Face's model of a ``config.json`` in the released precision, without
    storage."""
    import transformers

    given = {"model_type": "deepseek_v4", **copy.deepcopy(dict(config))}  # for_model changes it
    settings = transformers.AutoConfig.for_model(**given)
    settings._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
            model = kind(settings).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    return with_released_dtypes(keep_float32(model), not_quantized)


def with_released_dtypes(model: Any, not_quantized: Sequence[str] = NOT_QUANTIZED) -> Any:
    """Replace linear layers and experts by Hugging Face's modules for FP8, or for FP4 experts of
    V4, with weights on the meta device."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    is_v4 = model.config.model_type == "deepseek_v4"
    of_v4 = {"scale_fmt": "ue8m0", "expert_dtype": "fp4"} if is_v4 else {}
    settings = FineGrainedFP8Config(**of_v4)
    model = replace_with_fp8_linear(model, list(not_quantized), settings)
    model.config.quantization_config = settings
    return model


def keep_float32(model: Any) -> Any:
    """Cast to float32 the parameters that ``from_pretrained`` keeps in float32."""
    names = set(model._keep_in_fp32_modules_strict)
    for name, weight in model.named_parameters():
        if not names.isdisjoint(name.split(".")):
            weight.data = weight.data.float()
    return model


def _sampled(
    name: str, like: Tensor, num_experts: int, device: torch.device | str, seed: int
) -> Tensor:
    """Sample a tensor of the shape and dtype of ``like``."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    weight = torch.empty(like.shape, dtype=like.dtype, device=device)
    if name.endswith("tid2eid"):
        keys = torch.rand(len(weight), num_experts, generator=generator, device=device)
        return weight.copy_(keys.argsort(1)[:, : weight.shape[1]])
    if like.element_size() == 1:
        return _sampled_bytes(name, weight, generator)
    if not like.is_floating_point():
        return weight.zero_()
    if name.endswith("scale_inv"):
        bits = torch.randint(*_SCALES, like.shape, generator=generator, device=device)
        return weight.copy_(torch.exp2(bits - 127.0))
    if name.endswith("norm.weight"):
        return weight.normal_(1.0, 0.1, generator=generator)
    return weight.normal_(
        0.0, weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5, generator=generator
    )


def _sampled_bytes(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    data = weight.view(torch.uint8)
    if "scale" in name:
        low, high = _EXPERT_SCALES if weight.dim() == 3 else _SCALES
        data.random_(low, high, generator=generator)
    else:
        data.random_(*_CODES, generator=generator)
        if weight.dtype == torch.float8_e4m3fn:
            data &= _BELOW_TWO
    return weight

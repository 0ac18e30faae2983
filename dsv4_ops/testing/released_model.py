"""DeepSeek-V4 of any size in the released precision, built where it runs, with random weights.

No checkpoint is read or written, and the largest temporary allocation is one weight: 43 layers of
Flash take the 145 GiB of their codes and scales, and a device builds them in seconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NOT_QUANTIZED = (r".*compressor.*\.(kv|gate)_proj", r".*\.weights_proj", r"lm_head")
"""Linear layers that are bfloat16 in the released files."""

_CODES, _SCALES, _EXPERT_SCALES = (0, 256), (119, 122), (117, 120)
"""Ranges of the sampled bytes. Scales are 2^-8 to 2^-6, with which sums of thousands of products
are near one. e2m1 codes are larger than e4m3 codes, so their scales are a quarter of that."""
_BELOW_TWO = 0xBF
"""Mask of an e4m3 code's bits that makes it less than 2, and never NaN."""


def released_model(
    config: Mapping[str, Any], *, device: torch.device | str = "cuda", seed: int = 0
) -> Any:
    """Build Hugging Face's DeepSeek-V4 with FP8 linears and FP4 experts.

    Modules, names, shapes and dtypes are those of ``load_quantized``. Every tensor depends on
    ``seed`` and its name only, so that ranks and machines with the same kind of device agree.

    Args:
        config: A ``config.json``, such as ``testing.checkpoint.FLASH`` with fewer layers.
        device: Device of the weights.
        seed: Seed of the weights.

    Returns:
        ``DeepseekV4ForCausalLM`` in evaluation mode, not patched.
    """
    model = on_meta(config)
    num_experts = model.config.n_routed_experts
    for prefix, module in list(model.named_modules()):
        if "rotary_emb" in prefix.rpartition(".")[2]:
            continue  # its buffers are computed later
        for name, weight in list(module.named_parameters(recurse=False)):
            sampled = _sampled(f"{prefix}.{name}", weight, num_experts, device, seed)
            module._parameters[name] = nn.Parameter(sampled, requires_grad=False)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = _sampled(f"{prefix}.{name}", buffer, num_experts, device, seed)
    for prefix, module in list(model.named_modules()):
        if "rotary_emb" in prefix.rpartition(".")[2]:
            parent, _, name = prefix.rpartition(".")
            with torch.device(device):
                setattr(model.get_submodule(parent), name, type(module)(model.config))
    return model


def on_meta(config: Mapping[str, Any], not_quantized: Sequence[str] = NOT_QUANTIZED) -> Any:
    """Build Hugging Face's model of a ``config.json`` in the released precision, without
    storage."""
    import transformers

    settings = transformers.DeepseekV4Config.from_dict(dict(config))
    settings._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = transformers.DeepseekV4ForCausalLM(settings).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    return with_released_dtypes(keep_float32(model), not_quantized)


def with_released_dtypes(model: Any, not_quantized: Sequence[str] = NOT_QUANTIZED) -> Any:
    """Replace linear layers and experts by Hugging Face's modules for FP8 and FP4, with weights on
    the meta device."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    settings = FineGrainedFP8Config(scale_fmt="ue8m0", expert_dtype="fp4")
    model = replace_with_fp8_linear(model, list(not_quantized), settings)
    model.config.quantization_config = settings
    return model


def keep_float32(model: Any) -> Any:
    """Cast parameters that ``from_pretrained`` keeps in float32; transformers 5.17 cannot run
    these."""
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

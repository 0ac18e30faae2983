"""Write models of V3, V3.2, V2 or GLM-5 in DeepSeek-V3's released format: FP8 codes (e4m3) with a
float32 scale per block of at most 128 x 128."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4_ops.testing.models import random_weight, small_dsa_config, small_mla_config

BLOCK = 128
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256,
    "moe_intermediate_size": 128,
}  # fmt: skip
"""Sizes at which, as in V3, a layer ends within a block: ``kv_a_proj_with_mqa`` has 576 rows."""
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
"""Every token has all experts, because a router's near tie would hide errors of weights."""
AROUND = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""Modules of a draft layer that other layers do not have."""
QUANTIZED = tuple(f"{name}.weight" for name in ("proj", "with_mqa", "wq_b", "wk"))


def random_model(version: int | str = 3, **changed: Any) -> Any:
    """Return Hugging Face's model of these sizes in bf16. Version 32 is V3.2; "GLM-5" has no
    indexer in its second layer."""
    sizes, prefix = {**SIZES, **EXPERTS, **changed}, f"DeepseekV{version}"
    if version == 32:
        config = small_dsa_config(**{"index_topk": 200, **sizes})
    elif version == "GLM-5":
        prefix, config = "GlmMoeDsa", small_dsa_config(version, **{"index_topk": 200, **sizes})
    else:
        config = small_mla_config(version, **sizes)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    seed = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=seed)
        norm = name.endswith("norm.weight")
        weight.data = (1 + values / 8 if norm else values * weight.shape[-1] ** -0.5).bfloat16()
    return model


def dense_model(path: Path, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Load a folder as Hugging Face's model with dequantised weights."""
    config = transformers.AutoConfig.from_pretrained(path)
    del config.quantization_config
    config.dtype = dtype
    model = getattr(transformers, config.architectures[0])(config).to(dtype)
    model.load_state_dict(state)
    return model.eval()


def quantized(weight: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales, and the float32 values that they represent."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    values = torch.empty(rows, columns)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = tuple(slice(at * BLOCK, (at + 1) * BLOCK) for at in (row, column))
            block = weight[part].float()
            scale = float(block.abs().max() / 448)
            scales[row, column] = 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale
            codes[part] = (block / scales[row, column]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[row, column]
    return codes, scales, values


def write(
    path: Path, model: Any, *, shards: int = 1, scale_fmt: str | None = None
) -> dict[str, Tensor]:
    """Write a model's weights; return its state with dequantised values.

    With ``scale_fmt`` "ue8m0", scales are powers of two, as in V3.1."""
    power_of_two = scale_fmt == "ue8m0"
    files: dict[str, Tensor] = {}
    state = model.state_dict()
    for name, weight in list(state.items()):
        if "experts." in name and weight.dim() == 3:
            place, _, kind = name.rpartition(".")
            state[name] = torch.empty_like(weight, dtype=torch.float32)
            for index, expert in enumerate(weight):
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
                values = []
                for part, each in zip(names, expert.chunk(len(names)), strict=True):
                    codes, scales, value = quantized(each, power_of_two)
                    files[f"{place}.{index}.{part}.weight"] = codes
                    files[f"{place}.{index}.{part}.weight_scale_inv"] = scales
                    values.append(value)
                state[name][index] = torch.cat(values)
        elif name.endswith(QUANTIZED) and not name.endswith("weights_proj.weight"):
            codes, scales, state[name] = quantized(weight, power_of_two)
            files[name], files[f"{name}_scale_inv"] = codes, scales
        else:
            files[name] = weight.contiguous()
    save(path, files, shards)
    config = model.config.to_dict()
    config["dtype"], config["architectures"] = "bfloat16", [type(model).__name__]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        **({} if scale_fmt is None else {"scale_fmt": scale_fmt}),
    }
    if config["model_type"] == "glm_moe_dsa":  # its head weights have another name
        plain = ("input_layernorm", "self_attn.indexers_proj", "mlp.gate")
        layers = range(config["num_hidden_layers"])
        named = [f"model.layers.{layer}.{name}" for layer in layers for name in plain]
        skipped = ["lm_head", "model.embed_tokens", *named]
        config["quantization_config"]["modules_to_not_convert"] = skipped
    (path / "config.json").write_text(json.dumps(config))
    return state


def save(path: Path, files: dict[str, Tensor], shards: int = 1) -> None:
    """Write tensors to one file, or to several with an index."""
    if shards == 1:
        save_file(files, path / "model.safetensors", metadata={"format": "pt"})
        return
    names, shard_of = sorted(files), {}
    for shard in range(shards):
        part = names[shard::shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: files[name] for name in part}, path / file, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": shard_of}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def add_draft(path: Path, layers: int) -> Path:
    """Make the last layer of written files the draft layer: add a projection and norms, and remove
    a layer from the config."""
    config = json.loads((path / "config.json").read_text())
    files, width = load_file(path / "model.safetensors"), config["hidden_size"]
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    for name in ("mlp_layer_types", "indexer_types", "layer_types"):
        if config.get(name):
            config[name] = config[name][:layers]
    dtype = files["model.norm.weight"].dtype
    for name in AROUND:
        shape = (width, 2 * width) if name == "eh_proj" else (width,)
        values = random_weight(name, shape, 1, {"norm": (1.0, 0.5)}, 0)
        files[f"model.layers.{layers}.{name}.weight"] = values.to(dtype)
    files[f"model.layers.{layers}.embed_tokens.weight"] = torch.zeros(1, 1)  # a copy, not read
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path

"""Tiny checkpoints of V3, V3.2, V2 and GLM-5 in DeepSeek-V3's released format, with FP8 codes
(e4m3) and a float32 scale per block of at most 128 x 128.

    from dsv4_ops.testing.mla_checkpoint import write_mla_checkpoint

    write_mla_checkpoint("tiny-v32", "v32")

The command ``python -m dsv4_ops checkpoint tiny-v32 --model v32`` writes the same, and a tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.checkpoint.headers import CONFIG, INDEX, WHOLE
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import FP8_MAX, WEIGHT_BLOCK
from dsv4_ops.testing.models import small_dsa_config, small_mla_config

MODELS = {"v2": "DeepseekV2", "v3": "DeepseekV3", "v32": "DeepseekV32", "glm5": "GlmMoeDsa"}
"""Prefixes of Hugging Face's classes."""

_SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256,
    "moe_intermediate_size": 128,
}  # fmt: skip
"""Sizes at which, as in V3, a layer ends within a block: ``kv_a_proj_with_mqa`` has 576 rows."""

_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
"""Every token has all experts, because a router's near tie would hide errors of weights."""

_QUANTIZED = tuple(f"{name}.weight" for name in ("proj", "with_mqa", "wq_b", "wk"))
_TOPK = 200


def write_mla_checkpoint(
    path: Path | str, model: str = "v3", *, seed: int = 0, shards: int = 1
) -> Path:
    """Write a checkpoint of two layers with random weights.

    Args:
        path: Folder to create; existing files of the same names are replaced.
        model: "v2", "v3", "v32" (V3.2) or "glm5". R1 and Kimi-K2 have the format of "v3".
        seed: Seed of the weights.
        shards: Number of files over which the tensors are split. At least 1.

    Returns:
        ``path``.

    Raises:
        ValueError: the model is unknown, or ``shards`` is below 1.
        ImportError: safetensors or transformers is missing.

    Example:
        >>> import tempfile
        >>> from dsv4_ops.integrations import transformers as hf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = hf.load_quantized(write_mla_checkpoint(folder, "v32"))
        >>> model.model.layers[0].self_attn.o_proj.weight.dtype
        torch.float8_e4m3fn
    """
    checks = Checks("write_mla_checkpoint")
    checks.one_of("model", model, *MODELS, belongs_to="you want to load")
    checks.at_least(1, shards=shards)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    write_model(path, random_model(model, seed=seed), shards=shards)
    return path


def random_model(model: str = "v3", *, seed: int = 0, **changed: Any) -> Any:
    """Return Hugging Face's model with random bf16 weights. ``changed`` are fields of its config.
    GLM-5 has no indexer in its second layer."""
    import transformers

    config: Any
    sizes = {**_SIZES, **_EXPERTS, **changed}
    if model in ("v2", "v3"):
        config = small_mla_config(int(model[1:]), **sizes)
    else:
        family = "GLM-5" if model == "glm5" else "V3.2"
        config = small_dsa_config(family, **{"index_topk": _TOPK, **sizes})
    made = getattr(transformers, f"{MODELS[model]}ForCausalLM")(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in made.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        norm = name.endswith("norm.weight")
        weight.data = (1 + values / 8 if norm else values * weight.shape[-1] ** -0.5).bfloat16()
    return made


def write_model(
    path: Path, model: Any, *, shards: int = 1, scale_fmt: str | None = None
) -> dict[str, Tensor]:
    """Write the weights and the config of a model; return its state with dequantised values.

    With ``scale_fmt`` "ue8m0", scales are powers of two, as in V3.1.
    """
    power_of_two = scale_fmt == "ue8m0"
    files: dict[str, Tensor] = {}
    state: dict[str, Tensor] = model.state_dict()
    for name, weight in list(state.items()):
        if "experts." in name and weight.dim() == 3:
            place, _, kind = name.rpartition(".")
            state[name] = torch.empty_like(weight, dtype=torch.float32)
            for index, expert in enumerate(weight):
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
                values = []
                for part, each in zip(names, expert.chunk(len(names)), strict=True):
                    codes, scales, value = _quantized(each, power_of_two)
                    files[f"{place}.{index}.{part}.weight"] = codes
                    files[f"{place}.{index}.{part}.weight_scale_inv"] = scales
                    values.append(value)
                state[name][index] = torch.cat(values)
        elif name.endswith(_QUANTIZED) and not name.endswith("weights_proj.weight"):
            codes, scales, state[name] = _quantized(weight, power_of_two)
            files[name], files[f"{name}_scale_inv"] = codes, scales
        else:
            files[name] = weight.contiguous()
    save_tensors(path, files, shards)
    config = model.config.to_dict()
    config |= {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [WEIGHT_BLOCK, WEIGHT_BLOCK],
        "activation_scheme": "dynamic",
        **({} if scale_fmt is None else {"scale_fmt": scale_fmt}),
    }
    if config["model_type"] == "glm_moe_dsa":  # its head weights have another name
        plain = ("input_layernorm", "self_attn.indexers_proj", "mlp.gate")
        layers = range(config["num_hidden_layers"])
        named = [f"model.layers.{layer}.{name}" for layer in layers for name in plain]
        skipped = ["lm_head", "model.embed_tokens", *named]
        config["quantization_config"]["modules_to_not_convert"] = skipped
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return state


def save_tensors(path: Path, files: Mapping[str, Tensor], shards: int = 1) -> None:
    """Write tensors to one file, or to several with an index."""
    from safetensors.torch import save_file

    if shards == 1:
        save_file(dict(files), path / WHOLE, metadata={"format": "pt"})
        return
    names, shard_of = sorted(files), dict[str, str]()
    for shard in range(shards):
        part = names[shard::shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: files[name] for name in part}, path / file, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(part, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def _quantized(weight: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales, and the float32 values that they represent."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    values = torch.empty(rows, columns)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = tuple(slice(at * WEIGHT_BLOCK, (at + 1) * WEIGHT_BLOCK) for at in (row, column))
            block = weight[part].float()
            scale = float(block.abs().max() / FP8_MAX)
            scales[row, column] = 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale
            codes[part] = (block / scales[row, column]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[row, column]
    return codes, scales, values

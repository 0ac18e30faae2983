"""DeepSeek-V3's released format with random weights: FP8 codes (e4m3) and a float32 scale for each
128 x 128 of them, blocks at the ends less."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 128
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
"""Those of V3 where a block ends within a layer: ``kv_a_proj_with_mqa`` has 576 rows."""


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the values that both stand for, in float32."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    values = torch.empty(rows, columns)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            block = weight[part].float()
            scales[row, column] = block.abs().max() / 448
            codes[part] = (block / scales[row, column]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[row, column]
    return codes, scales, values


def write(path: Path, model: Any) -> dict[str, Tensor]:
    """Write a model's weights; return its state with the values of the codes."""
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
                    codes, scales, value = quantized(each)
                    files[f"{place}.{index}.{part}.weight"] = codes
                    files[f"{place}.{index}.{part}.weight_scale_inv"] = scales
                    values.append(value)
                state[name][index] = torch.cat(values)
        elif name.endswith("proj.weight") or name.endswith("with_mqa.weight"):
            codes, scales, state[name] = quantized(weight)
            files[name], files[f"{name}_scale_inv"] = codes, scales
        else:
            files[name] = weight.contiguous()
    save_file(files, path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config["dtype"], config["architectures"] = "bfloat16", ["DeepseekV3ForCausalLM"]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    (path / "config.json").write_text(json.dumps(config))
    return state

"""Change and load the checkpoints of ``dsv4_ops.testing.mla_checkpoint``."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4_ops.testing.models import random_weight

AROUND = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""Modules of a draft layer that other layers do not have."""


def dense_model(path: Path, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Load a folder as Hugging Face's model with dequantised weights."""
    config = transformers.AutoConfig.from_pretrained(path)
    del config.quantization_config
    config.dtype = dtype
    model = getattr(transformers, config.architectures[0])(config).to(dtype)
    model.load_state_dict(state)
    return model.eval()


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

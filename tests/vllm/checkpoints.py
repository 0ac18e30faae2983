"""Small checkpoints with configs like the released ones, for vLLM."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

from dsv4_ops.testing.checkpoint import TINY
from dsv4_ops.testing.models import small_mla_model, small_model
from tests.support.v3_checkpoint import add_draft

_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
FILE = "model.safetensors"
_HUGGING_FACE = ("layer_types", "mlp_layer_types", "rope_parameters", "compress_rates", "dtype")
"""Fields that only Hugging Face's config class has."""


def write_v4(path: Path, model: Any = None, **changed: Any) -> Path:
    """Write ``model``, or a small DeepSeek-V4 in float32. vLLM's config class refuses the fields
    that Hugging Face saves."""
    model = model or small_model(**changed)
    model.save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in saved.items() if name not in _HUGGING_FACE}
    config |= {name: TINY[name] for name in ("rope_theta", "compress_rope_theta", "rope_scaling")}
    config |= {
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "compress_ratios": [*(_RATIOS[kind] for kind in saved["layer_types"]), 0],
        "num_hash_layers": saved["mlp_layer_types"].count("hash_moe"),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_v3(path: Path) -> Path:
    """Write a DeepSeek-V3 in float32."""
    small_mla_model().save_pretrained(path)
    return path


def write_drafting_v4(path: Path, released: Path) -> Path:
    """Write a released folder's DeepSeek-V4 in float32, but its draft layer unchanged."""
    loaded = DeepseekV4ForCausalLM.from_pretrained(released)
    model = DeepseekV4ForCausalLM(loaded.config).float()  # the loaded one would be saved in FP8
    model.load_state_dict(loaded.state_dict())
    model.config.dtype = torch.float32
    write_v4(path, model)
    files = [load_file(each) for each in (path / FILE, *released.glob("*.safetensors"))]
    drafts = {n: each for file in files for n, each in file.items() if n.startswith("mtp.")}
    save_file(files[0] | drafts, path / FILE, metadata={"format": "pt"})
    return path


def write_drafting_v3(path: Path) -> Path:
    """Write a DeepSeek-V3 in float32 whose fourth layer is the draft layer."""
    small_mla_model(num_hidden_layers=4).save_pretrained(path)
    return add_draft(path, layers=3)

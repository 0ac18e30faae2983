"""Small checkpoints with the config of released ones, as vLLM reads them."""

import json
from pathlib import Path
from typing import Any

from dsv4_ops.testing.checkpoint import TINY
from dsv4_ops.testing.models import small_mla_model, small_model

_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_HUGGING_FACE = ("layer_types", "mlp_layer_types", "rope_parameters", "compress_rates", "dtype")
"""Fields that only Hugging Face's class has."""


def write_v4(path: Path, model: Any = None, **changed: Any) -> Path:
    """Write a DeepSeek-V4: ``model``, or a small one in float32.

    vLLM's own class of its config refuses the fields that Hugging Face saves.
    """
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

"""Names and sizes of the draft layer in the files of DeepSeek-V3, V3.2 and GLM-5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4_ops.checkpoint.headers import StoredTensor
from dsv4_ops.integrations.transformers.loading.draft_reader import DraftNames

_EXPERTS, _SCALE = "mlp.experts", "weight_scale_inv"
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_AROUND = {
    **{f"{name}.weight": f"{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm.weight": "norm.weight",
}
"""Parameters outside of the decoder layer: for each name in the files, the path in our module."""


def names_of(headers: Mapping[str, StoredTensor]) -> DraftNames:
    """Return the names of the tensors. Except for experts, the files have Hugging Face's names."""
    linears, others = {}, dict(_AROUND)
    for name, tensor in headers.items():
        module, _, last = name.rpartition(".")
        if name in _AROUND or name.startswith(f"{_EXPERTS}.") or last == _SCALE:
            continue
        if len(tensor.info.shape) == 2 and module != "mlp.gate":
            linears[module] = f"layers.0.{module}"
        else:
            others[name] = f"layers.0.{name}"
    return DraftNames(linears, others, _EXPERTS, _PARTS, _SCALE)


def sizes_of(config: Any, headers: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the sizes of the layer in the files, by their names in the config."""
    shapes = {name: tensor.info.shape for name, tensor in headers.items()}
    values, ranks = shapes["self_attn.o_proj.weight"][1], shapes["self_attn.kv_a_layernorm.weight"]
    sizes = {
        "hidden_size": shapes["enorm.weight"][0],
        "num_attention_heads": values // config.v_head_dim,
        "kv_lora_rank": ranks[0],
        "n_routed_experts": names_of(headers).num_experts(headers),
        "moe_intermediate_size": shapes[f"{_EXPERTS}.0.gate_proj.weight"][0],
    }
    if "self_attn.q_a_layernorm.weight" in shapes:
        sizes["q_lora_rank"] = shapes["self_attn.q_a_layernorm.weight"][0]
    if "self_attn.indexer.weights_proj.weight" in shapes:
        sizes["index_n_heads"] = shapes["self_attn.indexer.weights_proj.weight"][0]
    return sizes

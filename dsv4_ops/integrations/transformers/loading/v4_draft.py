"""Names and sizes of the draft layer in DeepSeek-V4's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsv4_ops.checkpoint.headers import StoredTensor
from dsv4_ops.integrations.transformers.architectures.base import DRAFT
from dsv4_ops.integrations.transformers.loading.draft_reader import DraftNames

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
NAMES = DraftNames(_LINEARS, _OTHERS, "ffn.experts", _EXPERTS, "scale")


def names_of(headers: Mapping[str, StoredTensor]) -> DraftNames:
    """Return the names of the tensors, which are the same in all checkpoints."""
    return NAMES


def sizes_of(config: Any, headers: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the sizes of the layer in the files, by their names in the config."""
    shapes = {name: tensor.info.shape for name, tensor in headers.items()}
    heads = shapes["attn.attn_sink"][0]
    dim = shapes["attn.kv_norm.weight"][0]
    groups = heads * dim // shapes["attn.wo_a.weight"][1]
    return {
        "hidden_size": shapes["norm.weight"][0],
        "num_attention_heads": heads,
        "head_dim": dim,
        "q_lora_rank": shapes["attn.q_norm.weight"][0],
        "o_lora_rank": shapes["attn.wo_a.weight"][0] // groups,
        "o_groups": groups,
        "n_routed_experts": NAMES.num_experts(headers),
        "moe_intermediate_size": shapes["ffn.experts.0.w1.weight"][0],
        "hc_mult": shapes["hc_head_base"][0],
    }


def released_weights(draft: Any) -> dict[str, Tensor]:
    """Return the weights of an unquantised draft layer, by their names in released files."""
    linears = {f"{source}.weight": f"{target}.weight" for source, target in _LINEARS.items()}
    state = draft.state_dict()
    weights = {source: state[target] for source, target in (linears | _OTHERS).items()}
    for name, parts in _EXPERTS.items():
        for index, expert in enumerate(state[f"layers.0.mlp.experts.{name}"]):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                weights[f"ffn.experts.{index}.{part}.weight"] = weight
    return {f"{DRAFT}.0.{name}": weight for name, weight in weights.items()}

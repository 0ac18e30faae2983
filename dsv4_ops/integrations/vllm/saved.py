"""vLLM 0.32's config of V4, which also reads what ``save_pretrained`` of transformers wrote."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Transformers' default of ``compress_rates``."""


class SavedV4Config(DeepseekV4Config):
    """The config of a released folder, or of a folder whose config has transformers' fields.

    Args:
        fields: The fields of ``config.json``.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(**_as_released(fields))


def _as_released(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert transformers' fields to those of a released folder, because vLLM refuses
    transformers' names of layer types."""
    fields = dict(fields)
    kinds, experts = fields.pop("layer_types", None), fields.pop("mlp_layer_types", None)
    if kinds is not None:
        rates = _RATES | (fields.get("compress_rates") or {})
        drafts = fields.get("num_nextn_predict_layers") or 0
        fields.setdefault("compress_ratios", [*(rates.get(k, 0) for k in kinds), *[0] * drafts])
    if experts is not None:
        fields.setdefault("num_hash_layers", experts.count("hash_moe"))
    if "main" in (fields.get("rope_parameters") or {}):  # a set of fields per kind of layer
        del fields["rope_parameters"]
    return fields

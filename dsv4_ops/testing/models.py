"""Small random DeepSeek models, whose parameters all affect the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dsv4_ops.core.errors import argument_error, install_extra
from dsv4_ops.testing.checkpoint import random_weight
from dsv4_ops.testing.text import BOS, EOS, PAD, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
LAYER_TYPES = (SLIDING, SPARSE, HEAVY)

YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
"""The released YaRN scaling of layers with a compressor."""

MLA_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""The released YaRN scaling of DeepSeek-V3."""

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    # the default compiles to a Python op in float32, which packages cannot call
    "experts_implementation": "batched_mm",
}
"""Fields of the configuration of every small model."""

_MLA: dict[str, Any] = {
    **_SHARED,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 163840,
}
"""Fields of the configuration of every small model with latent attention."""

_DSA = {"V3.2": "DeepseekV32", "GLM-5": "GlmMoeDsa"}
"""Prefix of Hugging Face's classes, by family."""

_GLM_TYPES = ("full", "shared", "full")

# Centre and half width of the uniform distribution of non-matrix weights, by a part of the name.
# Large key norms make attention sharp, so that a single key changes the logits. With these sinks, a
# sink weighs as much as all other logits of a head.
_RANGES = {
    "sinks": (5.0, 3.0),
    "position_bias": (0.0, 1.7),
    "e_score_correction_bias": (0.0, 0.4),
    "compressor.kv_norm": (4.0, 1.0),
    "self_attn.kv_norm": (2.5, 1.0),
    "norm.weight": (1.0, 0.5),  # all other norms
    "_hc.base": (0.0, 2.0),
    "_hc.scale": (1.0, 0.5),
    "hc_head.hc_base": (0.0, 2.0),
    "hc_head.hc_scale": (1.0, 0.5),
}

_MLA_STYLES = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_HEAD_STYLES = {
    **dict.fromkeys(("v3", "v32", "glm"), _MLA_STYLES),
    "v4": {
        "q_b_proj": "colwise",
        "sinks": "colwise",
        "o_a_proj": "colwise",
        "o_b_proj": "rowwise",
        "compressor.indexer.q_b_proj": "colwise",
        "compressor.indexer.scorer.weights_proj": "colwise",
    },
}


def head_plan(family: str, without: str = "") -> dict[str, str]:
    """Return Hugging Face's ``tp_plan`` of the attention heads of a "v3", "v32", "glm" or "v4"
    model, except for the parameters in ``without``."""
    styles = _HEAD_STYLES[family].items()
    return {f"model.layers.*.self_attn.{name}": style for name, style in styles if name != without}


def small_config(**changed: Any) -> DeepseekV4Config:
    """Configure three layers, one per type.

    Compression rates, window, head_dim and RoPE size are those of the released models.

    Args:
        changed: Fields of ``DeepseekV4Config`` to override. More layers repeat the three types
            unless ``layer_types`` is given.

    Raises:
        ImportError: transformers is missing or has no DeepSeek-V4.
    """
    config_class, _ = require_transformers()
    layers = changed.get("num_hidden_layers", len(changed.get("layer_types", LAYER_TYPES)))
    settings: dict[str, Any] = {
        **_SHARED,
        "num_hidden_layers": layers,
        "layer_types": [LAYER_TYPES[layer % 3] for layer in range(layers)],
        "mlp_layer_types": ["hash_moe" if layer == 0 else "moe" for layer in range(layers)],
        "head_dim": 512,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 16,
        "rope_parameters": dict(YARN),
    }
    return config_class(**{**settings, **changed})


def small_model(
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **changed: Any,
) -> DeepseekV4ForCausalLM:
    """Build Hugging Face's model of ``small_config(**changed)``.

    The model is in evaluation mode and not patched.

    Every weight depends only on ``seed`` and on its name and shape, so it is the same in models
    with more or fewer layers, on any machine. All weights, including norms and sinks, are random
    and affect the logits, whose standard deviation is near one.

    Args:
        seed: Seed of the weights.
        dtype: Dtype of the weights except those that Hugging Face keeps in float32.
        device: Device of the weights.
        changed: See ``small_config``.

    Raises:
        ImportError: transformers is missing or has no DeepSeek-V4.
    """
    _, model_class = require_transformers()
    model: DeepseekV4ForCausalLM = _filled(
        model_class(small_config(**changed)), seed, dtype, device
    )
    return model


def small_mla_config(version: int = 3, **changed: Any) -> Any:
    """Configure three layers, one dense and two with experts, with the released YaRN scaling.

    Args:
        version: 3 for ``DeepseekV3Config``, which Kimi-K2 uses too, or 2 for ``DeepseekV2Config``.
        changed: Fields of the configuration to override.

    Raises:
        ValueError: another version.
    """
    import transformers

    _check_version("small_mla_config", version)
    settings: dict[str, Any] = {
        **_MLA,
        "rope_parameters": dict(MLA_YARN),
    }
    if version == 2:
        settings |= {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0}
    return getattr(transformers, f"DeepseekV{version}Config")(**{**settings, **changed})


def small_mla_model(
    version: int = 3,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **changed: Any,
) -> Any:
    """Build Hugging Face's model of ``small_mla_config(version, **changed)``, like
    ``small_model``."""
    import transformers

    _check_version("small_mla_model", version)
    kind = getattr(transformers, f"DeepseekV{version}ForCausalLM")
    return _filled(kind(small_mla_config(version, **changed)), seed, dtype, device)


def small_dsa_config(family: str = "V3.2", **changed: Any) -> Any:
    """Configure three layers, one dense and two with experts. Tokens attend to 16 rows.

    Args:
        family: "V3.2" for ``DeepseekV32Config``, or "GLM-5" for ``GlmMoeDsaConfig``, whose second
            layer shares the selection of the first layer.
        changed: Fields of the configuration to override.

    Raises:
        ValueError: another family.
    """
    import transformers

    _check_dsa("small_dsa_config", family)
    settings: dict[str, Any] = {
        **_MLA,
        "index_n_heads": 16,  # with few heads many scores are 0
        "index_head_dim": 128,
        "index_topk": 16,
        "rope_parameters": dict(MLA_YARN),
    }
    if family == "GLM-5":
        rope = {"rope_type": "default", "rope_theta": 1e6}
        settings |= {"rope_parameters": rope, "qk_nope_head_dim": 48, "v_head_dim": 64}
        layers = changed.get("num_hidden_layers", settings["num_hidden_layers"])
        settings["indexer_types"] = [_GLM_TYPES[layer % 3] for layer in range(layers)]
    return getattr(transformers, f"{_DSA[family]}Config")(**{**settings, **changed})


def small_dsa_model(
    family: str = "V3.2",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **changed: Any,
) -> Any:
    """Build Hugging Face's model of ``small_dsa_config(family, **changed)``, like
    ``small_model``."""
    import transformers

    _check_dsa("small_dsa_model", family)
    kind = getattr(transformers, f"{_DSA[family]}ForCausalLM")
    return _filled(kind(small_dsa_config(family, **changed)), seed, dtype, device)


def _check_dsa(op: str, family: str) -> None:
    if family not in _DSA:
        must = "be " + " or ".join(map(repr, _DSA))
        advice = "Call small_mla_model or small_model for other models"
        raise argument_error(op, "family", must=must, got=repr(family), do=advice)


def _check_version(op: str, version: int) -> None:
    if version not in (2, 3):
        advice = "Call small_model or small_config for DeepSeek-V4"
        raise argument_error(op, "version", must="be 2 or 3", got=repr(version), do=advice)


def _filled(model: Any, seed: int, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Sample the weights of a model."""
    model = model.eval().requires_grad_(False)
    float32_parts = set(model._keep_in_fp32_modules_strict)
    state = model.state_dict()  # parameters and persistent buffers, as in a checkpoint
    num_experts = model.config.n_routed_experts
    for name, weight in state.items():
        weight.copy_(random_weight(name, weight.shape, seed, _RANGES, num_experts))
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if (
            name in state
            and weight.is_floating_point()
            and float32_parts.isdisjoint(name.split("."))
        ):
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    return model.to(device)


def require_transformers() -> tuple[Any, Any]:
    """Import Hugging Face's DeepSeek-V4 configuration and model classes.

    Raises:
        ImportError: transformers is missing or has no DeepSeek-V4.
    """
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError as error:
        raise ImportError(
            "demo: transformers must have DeepSeek-V4 (5.17 or later), "
            f"got {type(error).__name__}: {error}. {install_extra('transformers')}."
        ) from error
    return DeepseekV4Config, DeepseekV4ForCausalLM

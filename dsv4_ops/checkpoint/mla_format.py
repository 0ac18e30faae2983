"""List the tensors of an FP8 checkpoint of DeepSeek-V3, R1, V3.2, V2 or GLM-5, from the config.

Tensors have the names of Hugging Face's modules, except that the files store each expert
separately. Linear layers have e4m3 codes and a scale for each block of 128 x 128; the last blocks
may be smaller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsv4_ops.checkpoint.config import check_size, check_sizes, skipped_modules
from dsv4_ops.checkpoint.headers import TensorInfo
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import WEIGHT_BLOCK

MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "deepseek_v32", "glm_moe_dsa")
_WITH_INDEXER = ("deepseek_v32", "glm_moe_dsa")
SCALES = "F32 or F8_E8M0"
FLOATS = "BF16 or F16 or F32"
"""Dtypes of unquantised tensors, which loaders convert to the dtype of the model."""

_SIZES = (
    *("num_hidden_layers", "first_k_dense_replace", "vocab_size", "hidden_size"),
    *("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_INDEXER_SIZES = ("q_lora_rank", "index_n_heads", "index_head_dim")
"""Sizes that a config of V3.2 or GLM-5 must have as well."""
_HAS_INDEXER = "has_indexer"
"""Field of our copy of a config. Its value is a function that takes the number of a layer and says
whether the layer has an indexer."""
_DRAFTS = "num_nextn_predict_layers"
_SKIPPED = (".rotary_emb.inv_freq", ".self_attn.k_scale", ".self_attn.v_scale")
"""Suffixes of tensors that loaders skip: RoPE frequencies, which old files store but loaders
compute from the config, and KV cache scales of other engines."""
_DRAFT_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's embedding and head that some files store with the draft layer."""
_SHARED_EXPERTS = {"deepseek_v2": 2}
"""Hugging Face's default of ``n_shared_experts`` for families whose default is not 1."""


def mla_tensors(op: str, config: Mapping[str, Any]) -> Iterator[tuple[str, TensorInfo]]:
    """Return the name, allowed dtypes and shape of every tensor that a checkpoint must have.

    Raises:
        ValueError: a size is missing or not an integer, the config has biases, or the config's
            skipped modules are not patterns.
    """
    config = _checked(op, config)
    return _Tensors(config, skipped_modules(op, config)).all()


def _checked(op: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with defaults for the fields that it may leave out; raise like
    ``mla_tensors``."""
    kind = config["model_type"]
    config = {"n_shared_experts": _SHARED_EXPERTS.get(kind, 1), **config}
    check_sizes(op, config, _SIZES, zero=("first_k_dense_replace",))
    if kind in _WITH_INDEXER:
        check_sizes(op, config, _INDEXER_SIZES)
    config[_HAS_INDEXER] = _has_indexer(op, config)
    if "q_lora_rank" not in config:
        check_sizes(op, config, ("q_lora_rank",))
    for name, least in (("q_lora_rank", 1), (_DRAFTS, 0)):
        if config.get(name) is not None:
            check_size(op, name, config[name], least)
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise argument_error(
                op,
                f"config.{name}",
                must="be false",
                got=repr(config[name]),
                do="Quantised layers with biases are unknown",
            )
    return config


def mla_draft_tensors(op: str, config: Mapping[str, Any]) -> Iterator[tuple[str, TensorInfo]]:
    """Return the name, allowed dtypes and shape of every tensor of the draft layer: a layer with
    experts (and an indexer in families with indexers), and the projection and norms around this
    layer.

    If the config has no ``quantization_config``, weights are not quantised.
    """
    quantization = config.get("quantization_config") or {"modules_to_not_convert": [".*"]}
    config = _checked(op, {**config, "quantization_config": quantization})
    layer, width = config["num_hidden_layers"], config["hidden_size"]
    config["first_k_dense_replace"] = min(config["first_k_dense_replace"], layer)
    if config["model_type"] in _WITH_INDEXER:
        config[_HAS_INDEXER] = lambda _: True
    yield from _Tensors(config, skipped_modules(op, config)).layer(layer)
    prefix = draft_prefix(config)
    yield _plain(f"{prefix}eh_proj", width, 2 * width)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield _plain(f"{prefix}{name}", width)


def is_skipped_draft(name: str) -> bool:
    """Whether loaders skip a tensor of the draft layer; ``name`` has no prefix."""
    return name in _DRAFT_COPIES or f".{name}".endswith(_SKIPPED)


def draft_prefix(config: Mapping[str, Any]) -> str:
    """Return the prefix of the names of the draft layer's tensors."""
    return f"model.layers.{config['num_hidden_layers']}."


def is_other(config: Mapping[str, Any], name: str) -> bool:
    """Whether loaders skip a tensor, for example a tensor of a draft layer."""
    return name.endswith(_SKIPPED) or is_draft(config, name)


def is_draft(config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor belongs to a draft layer (multi-token prediction)."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    default = int(config["model_type"] != "deepseek_v2")
    drafts = config.get(_DRAFTS, default) or 0
    return match is not None and 0 <= int(match[1]) - config["num_hidden_layers"] < drafts


def _has_indexer(op: str, config: Mapping[str, Any]) -> Callable[[int], bool]:
    """Return a function that says whether a layer has an indexer, as Hugging Face reads the config.

    The configs of GLM-5 list each layer's type, "full" or "shared", or give the number of leading
    "full" layers and the period of the "full" layers after these.
    """
    count = config["num_hidden_layers"]
    if config["model_type"] != "glm_moe_dsa":
        always = config["model_type"] in _WITH_INDEXER
        return lambda _: always
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is None:
        period, first = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
        check_size(op, "index_topk_freq", period, 0)
        check_size(op, "index_skip_topk_offset", first, 0)
        return lambda layer: max(layer - first + 1, 0) % max(period, 1) == 0
    if isinstance(types, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    known = isinstance(types, list) and all(each in ("full", "shared") for each in types)
    if not known or len(types) != count:
        raise argument_error(
            op,
            "config.indexer_types",
            must=f"be 'full' or 'shared' for each of {count} layers",
            got=repr(types),
            do="Correct config.json",
        )
    return lambda layer: bool(types[layer] == "full")


class _Tensors:
    def __init__(self, config: Mapping[str, Any], skipped: list[str]) -> None:
        self.config, self.skipped = config, skipped

    def all(self) -> Iterator[tuple[str, TensorInfo]]:
        config = self.config
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        yield _plain("model.embed_tokens", vocabulary, width)
        yield from self.linear("lm_head", vocabulary, width)
        yield _plain("model.norm", width)
        for layer in range(config["num_hidden_layers"]):
            yield from self.layer(layer)

    def layer(self, layer: int) -> Iterator[tuple[str, TensorInfo]]:
        config, prefix = self.config, f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield _plain(f"{prefix}{name}", config["hidden_size"])
        yield from self.attention(f"{prefix}self_attn.", layer)
        if layer < config["first_k_dense_replace"]:
            yield from self.block(f"{prefix}mlp.", config["intermediate_size"])
        else:
            yield from self.experts(f"{prefix}mlp.")

    def attention(self, prefix: str, layer: int) -> Iterator[tuple[str, TensorInfo]]:
        config = self.config
        width, heads = config["hidden_size"], config["num_attention_heads"]
        q_rank, rank = config.get("q_lora_rank"), config["kv_lora_rank"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        if q_rank is None:
            yield from self.linear(f"{prefix}q_proj", heads * (nope + rope), width)
        else:
            yield from self.linear(f"{prefix}q_a_proj", q_rank, width)
            yield _plain(f"{prefix}q_a_layernorm", q_rank)
            yield from self.linear(f"{prefix}q_b_proj", heads * (nope + rope), q_rank)
        yield from self.linear(f"{prefix}kv_a_proj_with_mqa", rank + rope, width)
        yield _plain(f"{prefix}kv_a_layernorm", rank)
        rows = heads * (nope + config["v_head_dim"])
        yield from self.linear(f"{prefix}kv_b_proj", rows, rank)
        yield from self.linear(f"{prefix}o_proj", width, heads * config["v_head_dim"])
        if config[_HAS_INDEXER](layer):
            yield from self.indexer(f"{prefix}indexer.")

    def indexer(self, prefix: str) -> Iterator[tuple[str, TensorInfo]]:
        config = self.config
        width, heads, dim = (config[name] for name in ("hidden_size", *_INDEXER_SIZES[1:]))
        yield from self.linear(f"{prefix}wq_b", heads * dim, config["q_lora_rank"])
        yield from self.linear(f"{prefix}wk", dim, width)
        yield _plain(f"{prefix}k_norm", dim)
        yield f"{prefix}k_norm.bias", TensorInfo(FLOATS, (dim,))
        yield _plain(f"{prefix}weights_proj", heads, width)  # float32 in Hugging Face

    def experts(self, prefix: str) -> Iterator[tuple[str, TensorInfo]]:
        config, size = self.config, self.config["moe_intermediate_size"]
        count = config["n_routed_experts"]
        yield _plain(f"{prefix}gate", count, config["hidden_size"])
        if config["model_type"] != "deepseek_v2":
            yield f"{prefix}gate.e_score_correction_bias", TensorInfo(FLOATS, (count,))
        yield from self.block(f"{prefix}shared_experts.", size * config["n_shared_experts"])
        for index in range(count):
            yield from self.block(f"{prefix}experts.{index}.", size, f"{prefix}experts")

    def block(
        self, prefix: str, size: int, module: str | None = None
    ) -> Iterator[tuple[str, TensorInfo]]:
        width = self.config["hidden_size"]
        for name, rows, columns in (
            ("gate_proj", size, width),
            ("up_proj", size, width),
            ("down_proj", width, size),
        ):
            yield from self.linear(f"{prefix}{name}", rows, columns, module)

    def linear(
        self, name: str, rows: int, columns: int, module: str | None = None
    ) -> Iterator[tuple[str, TensorInfo]]:
        """Yield the weight of a linear layer, and its scales unless Hugging Face leaves ``module``
        unquantised. ``module`` is the module into which Hugging Face loads the layer, by default
        the layer itself."""
        if any(_matches(pattern, module or name) for pattern in self.skipped):
            yield _plain(name, rows, columns)
            return
        blocks = -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)
        yield f"{name}.weight", TensorInfo("F8_E4M3", (rows, columns))
        yield f"{name}.weight_scale_inv", TensorInfo(SCALES, blocks)


def _plain(name: str, *shape: int) -> tuple[str, TensorInfo]:
    return f"{name}.weight", TensorInfo(FLOATS, shape)


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the name of a module or of a module around it, or the name ends
    with the pattern."""
    return bool(re.match(rf"(?:{pattern})(?:(?<=\.)|\.|$)", name)) or name.endswith(pattern)

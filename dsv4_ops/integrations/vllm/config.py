"""Read vLLM's configuration, and refuse unsupported settings. This file does not import vLLM."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_ops.core.errors import argument_error

OP = "DeepseekForCausalLM"

OWN_DRAFTS = "mtp"
"""vLLM's name for drafts from the checkpoint's own draft layer."""

CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v4": "DeepseekV4",
}
"""Prefix of Hugging Face's classes for each ``model_type``."""

_KV = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""``patch``'s argument ``kv`` for each ``--dtype``, unless ``--kv-cache-dtype`` is FP8."""

_FP8_KV = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "ds_fp8"}
"""``patch``'s argument ``kv`` for each FP8 ``--kv-cache-dtype``."""


def patch_settings(vllm_config: Any) -> dict[str, Any]:
    """Return the arguments of ``patch``."""
    model, given = vllm_config.model_config, _given(vllm_config)
    given.pop("backend", None)
    kv = _FP8_KV.get(vllm_config.cache_config.cache_dtype, _KV[model.dtype])
    if kv == "ds_fp8" and model.hf_config.model_type == "deepseek_v4":
        kv = "fp8"  # vLLM has one name for the layouts of V3 and V4
    return {"kv": kv} | given


def compile_backend(vllm_config: Any) -> str | None:
    """Return the backend of ``torch.compile`` for the layers; None runs the layers eagerly.

    vLLM's compilation mode decides whether layers are compiled, as for vLLM's own models. With
    ``--enforce-eager`` or ``-O0``, the mode is NONE.
    """
    config = vllm_config.compilation_config
    if getattr(config.mode, "name", "NONE") == "NONE":
        return None
    return _given(vllm_config).get("backend") or config.backend or "inductor"


def _given(vllm_config: Any) -> dict[str, Any]:
    more = vllm_config.additional_config
    return dict(more.get("dsv4_ops", {})) if isinstance(more, dict) else {}


def check_config(vllm_config: Any) -> None:
    """Raise for settings of vLLM that the model would ignore or does not support."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    family, families = model.hf_config.model_type, " or ".join(CLASSES)
    _check("model_type", family in CLASSES, families, family)
    one = "1, as weights are Hugging Face's"
    if parallel.tensor_parallel_size > 1:  # Hugging Face's TP plan spans all processes
        ranks, device = "with several ranks", vllm_config.device_config.device
        _check("tensor_parallel_size", str(device) == "cpu", "1 on a GPU", "several ranks")
        _check(
            "compilation_config.mode", compile_backend(vllm_config) is None, f"NONE {ranks}", "on"
        )
        plain = getattr(model.hf_config, "quantization_config", None) is None
        _check("quantization_config", plain, f"None {ranks}", "that of a released folder")
        _check("data_parallel_size", parallel.data_parallel_size == 1, f"1 {ranks}", "several")
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        _check(name, getattr(parallel, name, 1) == 1, one, getattr(parallel, name, 1))
    _check("enable_expert_parallel", not parallel.enable_expert_parallel, "off", "on")
    _check("enable_lora", vllm_config.lora_config is None, "off", "on")
    _check("dtype", model.dtype in _KV, "bfloat16 or float32", model.dtype)
    cache_dtype = vllm_config.cache_config.cache_dtype
    same = str(model.dtype).removeprefix("torch.")
    known = ("auto", same, *_FP8_KV)
    _check("kv_cache_dtype", cache_dtype in known, "one of " + ", ".join(known), cache_dtype)
    _check("hf_overrides", not model.hf_overrides, "empty", model.hf_overrides)
    compiled = getattr(vllm_config.compilation_config.mode, "name", "NONE")
    fits = compiled != "STOCK_TORCH_COMPILE"  # vLLM would trace caches that share one storage
    _check("compilation_config.mode", fits, "another", compiled)
    load = vllm_config.load_config.load_format
    _check("load_format", load in ("auto", "hf", "safetensors"), "auto", load)
    drafts = vllm_config.speculative_config
    methods = ("ngram", "ngram_gpu", "suffix", OWN_DRAFTS)
    method = methods[0] if drafts is None else drafts.method
    _check("speculative_config", method in methods, "of method " + " or ".join(methods), method)
    if method == OWN_DRAFTS:
        drafting = ("deepseek_v4", "deepseek_v3")
        _check(
            "model_type", family in drafting, " or ".join(drafting) + " with a draft layer", family
        )


def _check(name: str, fulfilled: bool, must: str, got: object) -> None:
    if not fulfilled:
        raise argument_error(
            OP, name, must=f"be {must}", got=got, do="Change it", kind=NotImplementedError
        )

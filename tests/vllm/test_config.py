"""vLLM's settings that the plugin accepts or refuses, tested without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from dsv4_ops.integrations.vllm.config import check_config, compile_backend, patch_settings


def config(dtype=torch.bfloat16, cache_dtype="auto", family="deepseek_v4", **changed):
    """Return the parts of a ``VllmConfig`` that the plugin reads, with ``changed`` fields."""
    parts = {
        "model_config": {"dtype": dtype, "hf_overrides": {},
         "hf_config": SimpleNamespace(model_type=family)},
        "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 1,
         "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
         "prefill_context_parallel_size": 1, "enable_expert_parallel": False},
        "cache_config": {"cache_dtype": cache_dtype},
        "device_config": {"device": "cpu"},
        "load_config": {"load_format": "auto"},
        "compilation_config": {"mode": SimpleNamespace(name="VLLM_COMPILE"), "backend": ""},
    }  # fmt: skip
    whole = {"additional_config": {}, "lora_config": None, "speculative_config": None}
    for name, value in changed.items():
        part = next((part for part in parts.values() if name in part), whole)
        part[name] = value
    made = {name: SimpleNamespace(**values) for name, values in parts.items()}
    return SimpleNamespace(**made, **whole)


@pytest.mark.parametrize(
    ("given", "kv"),
    [
        ({}, "bf16"),
        ({"dtype": torch.float32, "cache_dtype": "float32"}, "fp32"),
        ({"cache_dtype": "fp8"}, "fp8"),
        ({"cache_dtype": "fp8_ds_mla"}, "fp8"),
        ({"cache_dtype": "fp8_ds_mla", "family": "deepseek_v3"}, "ds_fp8"),
    ],
)
def test_the_cache_dtype_is_kv_of_patch(given, kv):
    check_config(config(**given))
    assert patch_settings(config(**given)) == {"kv": kv}


def test_additional_config_has_arguments_of_patch():
    given = {"dsv4_ops": {"precision": "reference", "kv": "fp8"}}
    found = patch_settings(config(additional_config=given))
    assert found == {"kv": "fp8", "precision": "reference"}


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({}, "inductor"),
        ({"backend": "eager"}, "eager"),
        ({"backend": "eager", "additional_config": {"dsv4_ops": {"backend": "x"}}}, "x"),
        ({"mode": SimpleNamespace(name="NONE"), "backend": "inductor"}, None),
    ],
)
def test_the_mode_of_vllm_compiles_or_does_not(given, backend):
    assert compile_backend(config(**given)) == backend
    assert "backend" not in patch_settings(config(**given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf_config", SimpleNamespace(model_type="kimi_k2")), ("enable_expert_parallel", True),
        *((f"{name}_parallel_size", 2)
          for name in ("pipeline", "decode_context", "prefill_context")),
        ("lora_config", SimpleNamespace()), ("dtype", torch.float16), ("load_format", "dummy"),
        ("cache_dtype", "fp8_e5m2"), ("cache_dtype", "float32"), ("hf_overrides", {"x": 2}),
        ("mode", SimpleNamespace(name="STOCK_TORCH_COMPILE")),
        ("speculative_config", SimpleNamespace(method="eagle")),
    ],
)  # fmt: skip
def test_what_the_model_would_ignore_is_refused_by_name(name, value):
    said = {"lora_config": "enable_lora", "cache_dtype": "kv_cache_dtype"}
    said |= {"hf_config": "model_type", "mode": "compilation_config.mode"}
    rule = f"DeepseekForCausalLM: {said.get(name, name)} must be "
    with pytest.raises(NotImplementedError, match=rule):
        check_config(config(**{name: value}))


def test_v4_and_v3_draft_by_their_own_layer():
    given = {"speculative_config": SimpleNamespace(method="mtp")}
    for family in ("deepseek_v4", "deepseek_v3"):
        check_config(config(**given, family=family))
    with pytest.raises(NotImplementedError, match="with a draft layer, got deepseek_v2"):
        check_config(config(**given, family="deepseek_v2"))


SPLIT = {"tensor_parallel_size": 2, "mode": SimpleNamespace(name="NONE")}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"device": "cuda"}, "tensor_parallel_size"),
        ({"mode": SimpleNamespace(name="VLLM_COMPILE")}, "compilation_config.mode"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"hf_config": SimpleNamespace(model_type="deepseek_v4", quantization_config={})},
         "quantization_config"),
    ],
)  # fmt: skip
def test_several_ranks_run_eagerly_on_a_cpu(changed, name):
    check_config(config(**SPLIT))
    with pytest.raises(NotImplementedError, match=f"DeepseekForCausalLM: {name} must be "):
        check_config(config(**SPLIT | changed))

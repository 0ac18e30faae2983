"""Blocks of released models, as vLLM plans them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")

from transformers import DeepseekV3Config, DeepseekV4Config
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import Platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from dsv4_ops.integrations.transformers.architectures import spec_of_config
from dsv4_ops.integrations.vllm.pages import Pages, kv_cache_spec
from dsv4_ops.integrations.vllm.steps import cache_name, family_of
from dsv4_ops.testing.checkpoint import FLASH, PRO

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # 0.33
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups


def caches_of(config):
    """Return the caches of a model, by name."""
    family = family_of(spec_of_config("test", config, "fp8", "serve"))
    return {
        cache_name(layer, field): cache
        for layer, kind in enumerate(family.spec.kinds)
        for field, cache in family.caches(kind).items()
    }


def groups_of(config):
    """Return vLLM's groups of caches, and check that each block has our bytes."""
    caches = caches_of(config)
    layout = {"get_resolved_kv_cache_layout": lambda: KVCacheLayout.BLHNC}
    settings = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=256, **layout),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(hf_config=config),
        **dict.fromkeys(("speculative_config", "diffusion_config")),
    )
    specs = {name: kv_cache_spec(cache) for name, cache in caches.items()}
    groups = get_kv_cache_groups(settings, specs)
    for name, cache in caches.items():
        assert specs[name].page_size_bytes == cache.layout.page_bytes, name
    return groups


@pytest.mark.parametrize(("config", "windows"), [(FLASH, (22, 21)), (PRO, (31, 30))])
def test_v4_has_two_tables_of_windows_and_one_of_everything_else(config, windows):
    groups = groups_of(DeepseekV4Config.from_dict(config))
    fields = [sorted({name.split(".")[2] for name in group.layer_names}) for group in groups]
    pairs = zip(groups, fields, strict=True)
    of_windows = [len(group.layer_names) for group, names in pairs if names == ["swa"]]
    assert tuple(of_windows) == windows
    assert sorted(names for names in fields if names != ["swa"]) == [
        ["compressed", "indexer"],
        ["indexer_states", "states"],
        ["states"],
    ]


@pytest.mark.parametrize(
    ("config", "size"), [(DeepseekV4Config.from_dict(FLASH), 256), (DeepseekV3Config(), 64)]
)
def test_vllm_asks_for_the_block_size_where_none_is_given(config, size):
    """vLLM's platforms for GPUs do this."""
    settings = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(settings):
        for name, cache in caches_of(config).items():
            Pages(name, cache)
    settings.model_config = SimpleNamespace(is_hybrid=False)
    Platform.update_block_size_for_backend(settings)
    assert settings.cache_config.block_size == size


def test_v3_has_one_table():
    (group,) = groups_of(DeepseekV3Config())
    assert len(group.layer_names) == 61

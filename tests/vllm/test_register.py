"""The plugin without vLLM: it is off by default, and in other releases an error names it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dsv4_ops.integrations.vllm import SWITCH, register
from dsv4_ops.testing.models import HEAVY, small_model

SETTINGS = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0", "VLLM_MLA_DISABLE": "1"}

ALONE = """
import sys, torch
from importlib.metadata import EntryPoint
EntryPoint("dsv4_ops", "dsv4_ops.integrations.vllm:register", "vllm.general_plugins").load()()
print(*{name.partition(".")[0] for name in sys.modules} & {"vllm", "transformers", "triton"})
"""


def test_installed_alone_it_imports_neither_vllm_nor_transformers(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    command = [sys.executable, "-c", ALONE]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "\n"


class Registry(SimpleNamespace):
    def register_model(self, name, path):
        self.models[name] = path


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1+cpu"])
def test_switched_on_it_registers_one_class_for_all_families(monkeypatch, version):
    registry = Registry(models={})
    monkeypatch.setattr(os, "environ", {SWITCH: "1"})  # the test leaves variables as they were
    platform = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    module = SimpleNamespace(__version__=version, ModelRegistry=registry)
    monkeypatch.setitem(sys.modules, "vllm", module)
    known = {"deepseek_v4": "its own"} if version == "0.32.0" else {}
    configs, parts = SimpleNamespace(_CONFIG_REGISTRY=known), "vllm.transformers_utils.config"
    monkeypatch.setitem(sys.modules, parts, configs)
    given = SimpleNamespace(DeepseekV4Config=SimpleNamespace)
    monkeypatch.setitem(sys.modules, f"{parts}s.deepseek_v4", given)
    register()
    assert bool(known) == (version == "0.32.0")
    if known:
        fields = small_model().config.to_dict() | {"compress_rates": {HEAVY: 64}}
        config = known["deepseek_v4"](**fields)  # other rates are those of transformers
        assert (config.compress_ratios, config.num_hash_layers) == ([0, 4, 64, 0], 1)
        assert not {"layer_types", "mlp_layer_types", "rope_parameters"} & set(vars(config))
    drafts = {registry.models.pop(f"DeepSeek{name}Model") for name in ("V4MTP", "MTP")}
    assert drafts == {"dsv4_ops.integrations.vllm.draft:DeepseekDraft"}
    assert sorted(registry.models) == [f"DeepseekV{n}ForCausalLM" for n in (2, 3, 4)]
    (path,) = set(registry.models.values())
    assert path == "dsv4_ops.integrations.vllm.model:DeepseekForCausalLM"
    assert SETTINGS.items() <= os.environ.items()


def test_other_releases_are_refused(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.0"))
    with pytest.raises(ImportError, match=r"vllm must be 0.32 or 0.33, got 0.34.0"):
        register()

"""The entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

import os

from dsv4_ops.core.errors import argument_error, install_extra
from dsv4_ops.core.versions import release

SWITCH = "DSV4_OPS_VLLM"
"""Environment variable that turns the plugin on."""

RELEASES = ((0, 32), (0, 33))
"""Supported vLLM releases. Each release changes names, and what vLLM expects of caches."""

ARCHITECTURES = ("DeepseekV4ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")
"""Architectures of checkpoints that vLLM runs with our model class."""

DRAFTS = ("DeepSeekV4MTPModel", "DeepSeekMTPModel")
"""vLLM's names of the draft layers of V4 and V3."""

_DRAFT = "dsv4_ops.integrations.vllm.draft:DeepseekDraft"
_MODEL = "dsv4_ops.integrations.vllm.model:DeepseekForCausalLM"


def register() -> None:
    """Let vLLM run DeepSeek models on our ops; do nothing if ``DSV4_OPS_VLLM`` is 0 or not set.

    Raises:
        ImportError: the plugin is on, and the release of vLLM is none of ``RELEASES``.
    """
    if os.environ.get(SWITCH, "") in ("", "0"):
        return
    import vllm

    if release(vllm.__version__) not in RELEASES:
        raise argument_error(
            SWITCH,
            "vllm",
            must="be " + " or ".join(f"{major}.{minor}" for major, minor in RELEASES),
            got=vllm.__version__,
            do=install_extra("vllm"),
            kind=ImportError,
        )
    # turn off vLLM's default for V4, which is to compile nothing and to split CUDA graphs at vLLM's
    # own ops; our model does not call these ops
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # on a CPU without AMX, vLLM overrides the block size of V3 and V2 for its own MLA kernels,
        # and turns off chunked prefills and prefix caching
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
    for architecture in ARCHITECTURES:
        vllm.ModelRegistry.register_model(architecture, _MODEL)
    for architecture in DRAFTS:
        vllm.ModelRegistry.register_model(architecture, _DRAFT)
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if "deepseek_v4" in _CONFIG_REGISTRY:  # vLLM 0.33 uses the class of transformers
        from dsv4_ops.integrations.vllm.saved import SavedV4Config

        _CONFIG_REGISTRY["deepseek_v4"] = SavedV4Config

"""Load a released checkpoint in its own precision, on any device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4_ops.checkpoint.format import check_checkpoint
from dsv4_ops.checkpoint.headers import CONFIG
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.architectures.base import require_transformers

OP = "load_quantized"
_LOCK = threading.Lock()
_CLASSES = {
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
"""Model class for each ``model_type``."""
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of ``device_map`` that let Hugging Face choose the devices."""
_ELSEWHERE = ("gguf_file", "state_dict", "subfolder", "variant")
"""Settings with which ``from_pretrained`` would read files that were not checked."""


def load_quantized(path: Path | str, *, scales: bool = True, **settings: Any) -> Any:
    """Load DeepSeek-V4, V3.2, V3, R1, V2 or GLM-5 with its FP8 and FP4 weights, for ``patch``.

    On a GPU, ``from_pretrained(path)`` of the model's class returns the same model. This function
    also loads

    - on a CPU, where Hugging Face dequantises V4 and fails for V3, whose ``kv_a_proj_with_mqa``
      ends within a block of 128 rows;
    - without accelerate;
    - from a config without the dtype of the experts, such as the config of V4-Pro.

    ``check_checkpoint`` checks all files first; ``patch`` checks codes and scales on their device.

    Args:
        path: Folder of the checkpoint.
        scales: Whether ``check_checkpoint`` reads the scales. If it does not, no check finds
            float32 scales that Hugging Face rounds to bytes (``scale_fmt="ue8m0"``).
        settings: Arguments of ``from_pretrained``, such as ``device_map="cuda"``.

    Returns:
        ``DeepseekV4ForCausalLM``, ``DeepseekV32ForCausalLM``, ``DeepseekV3ForCausalLM``,
        ``DeepseekV2ForCausalLM`` or ``GlmMoeDsaForCausalLM`` in evaluation mode, not patched,
        without the draft layer, which ``load_mtp`` loads.

    Raises:
        ValueError, TypeError: the path is not a folder; the files are not as released, for example
            because a tensor is missing, transposed, unknown or not quantised; or the settings would
            read other files.
        NotImplementedError: the checkpoint has another architecture.
        ImportError: transformers is missing or too old.

    Example:
        >>> import tempfile
        >>> from dsv4_ops.integrations import transformers as v4
        >>> from dsv4_ops.testing.checkpoint import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = v4.patch(v4.load_quantized(write_checkpoint(folder)))
        >>> model.model.layers[0].mlp.experts.down_proj.dtype
        torch.int8
    """
    library = require_transformers(OP)
    checks = Checks(OP)
    path = checks.path("path", path)
    if not path.is_dir():  # Hugging Face would search the hub
        raise argument_error(
            OP,
            "path",
            must="be a folder",
            got=repr(str(path)),
            do="Download the checkpoint, and pass its folder",
        )
    checks.flag("scales", scales)
    places = settings.get("device_map")
    if isinstance(places, dict) and not places:
        raise checks.error("device_map", must="name a device", got="{}", do="Leave it out")
    if not isinstance(places, dict) and places not in _STRATEGIES:
        checks.device_name("device_map", places)
    config = settings.pop("config", None)
    if config is not None and not hasattr(config, "model_type"):
        raise argument_error(
            OP,
            "config",
            must="be a configuration",
            got=type(config).__name__,
            do="Pass AutoConfig.from_pretrained(path), or none",
            kind=TypeError,
        )
    elsewhere = [name for name in _ELSEWHERE if settings.get(name) not in (None, "")]
    if settings.get("use_safetensors") is None:
        settings["use_safetensors"] = True
    checks.flag("use_safetensors", settings["use_safetensors"])
    if elsewhere or not settings["use_safetensors"]:
        name = (*elsewhere, "use_safetensors")[0]
        raise argument_error(
            OP,
            name,
            must="not be given, as path is what is checked",
            got=repr(settings[name]),
            do="Load it by from_pretrained",
        )
    info = check_checkpoint(path, scales=scales)
    config = config or library.AutoConfig.from_pretrained(path)
    if config.model_type != info.model_type:
        raise argument_error(
            OP,
            "config.model_type",
            must=f"be {info.model_type!r}, as {CONFIG} has it",
            got=repr(config.model_type),
            do="Pass the model's own config",
        )
    if getattr(config, "quantization_config", None) is None:
        raise argument_error(
            OP,
            "config.quantization_config",
            must="say how weights are quantised",
            got=None,
            do="Load it by from_pretrained",
        )
    if info.expert_dtype == "fp4":
        config.quantization_config["expert_dtype"] = info.expert_dtype
    with _any_environment():
        model = getattr(library, _CLASSES[info.model_type]).from_pretrained(
            path, config=config, **settings
        )
    return model.eval()


@contextmanager
def _any_environment() -> Iterator[None]:
    """Skip Hugging Face's check, which needs accelerate, and dequantises on CPUs and old GPUs."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    name = "validate_environment"
    with _LOCK:
        before = getattr(FineGrainedFP8HfQuantizer, name)
        setattr(FineGrainedFP8HfQuantizer, name, lambda *_, **__: None)
        try:
            yield
        finally:
            setattr(FineGrainedFP8HfQuantizer, name, before)

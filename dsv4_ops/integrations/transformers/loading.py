"""Load a released checkpoint in its own precision, on any device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4_ops.core.checkpoint import check_checkpoint
from dsv4_ops.integrations.transformers.architectures.base import require_transformers

_LOCK = threading.Lock()


def load_quantized(path: Path | str, *, scales: bool = True, **settings: Any) -> Any:
    """Load DeepSeek-V4 with its FP8 and FP4 weights as they are, to be patched.

    On a GPU ``DeepseekV4ForCausalLM.from_pretrained(path)`` does the same. This differs where
    Hugging Face looks after its own kernels: it loads on a CPU too, where Hugging Face dequantises;
    without accelerate; and a config that does not name the dtype of its experts (Pro's). The files
    are checked first.

    Args:
        path: Folder of the checkpoint.
        scales: Whether ``check_checkpoint`` reads the scales.
        settings: Arguments of ``from_pretrained``, such as ``device_map="cuda"``.

    Returns:
        ``DeepseekV4ForCausalLM`` in evaluation mode, not patched; without its draft layer,
        which ``load_mtp`` loads.

    Raises:
        ValueError: the files are not as released: a tensor is missing, transposed or unknown.
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
    library = require_transformers("load_quantized")
    info = check_checkpoint(path, scales=scales)
    config = settings.pop("config", None) or library.AutoConfig.from_pretrained(path)
    if info.expert_dtype == "fp4":
        config.quantization_config["expert_dtype"] = info.expert_dtype
    with _any_environment():
        model = library.DeepseekV4ForCausalLM.from_pretrained(path, config=config, **settings)
    return model.eval()


@contextmanager
def _any_environment() -> Iterator[None]:
    """Without Hugging Face's check of what its own kernels need."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    name = "validate_environment"
    with _LOCK:
        before = getattr(FineGrainedFP8HfQuantizer, name)
        setattr(FineGrainedFP8HfQuantizer, name, lambda *_, **__: None)
        try:
            yield
        finally:
            setattr(FineGrainedFP8HfQuantizer, name, before)

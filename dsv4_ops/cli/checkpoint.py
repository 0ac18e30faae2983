"""Write a tiny checkpoint in the released format, or check any checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dsv4_ops.checkpoint.format import check_checkpoint
from dsv4_ops.checkpoint.headers import CONFIG, INDEX, WHOLE
from dsv4_ops.core.errors import argument_error
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.text import write_tokenizer


def write(path: str, family: str, seed: int, shards: int) -> None:
    """Write a checkpoint of ``dsv4_ops.testing.checkpoint.TINY`` with random weights. If
    transformers is installed, also write a tokenizer whose tokens are single bytes.

    Raises:
        ValueError: the folder already has a checkpoint, or the number of shards is below 1.
    """
    if any((Path(path) / name).exists() for name in (CONFIG, INDEX, WHOLE)):
        raise argument_error(
            "checkpoint",
            "DIR",
            must="hold no checkpoint to write over",
            got=repr(path),
            do="Pass --check to check it, or remove it",
        )
    write_checkpoint(path, family=family, seed=seed, shards=shards)
    if importlib.util.find_spec("transformers"):
        write_tokenizer(path, bos=TINY["bos_token_id"], eos=TINY["eos_token_id"])


def describe(path: str) -> str:
    """Check all tensors of a checkpoint, and describe the checkpoint.

    Raises:
        ValueError: a tensor or setting is not as released; the message names it.
        NotImplementedError: the checkpoint is of another architecture.
    """
    info = check_checkpoint(path, codes=True)
    lines = [
        f"{path}: {info.model_type}, {info.num_tensors} tensors, {info.num_bytes / 1e6:.1f} MB",
        f"  {info.expert_dtype} experts, scales {info.scale_dtype}, draft layers: {info.draft}",
    ]
    if info.expert_dtype == "fp4" and not info.names_experts:
        lines.append(
            "  config.json has no expert_dtype: Hugging Face takes fp8, and then loads no fp4"
        )
    return "\n".join(lines)

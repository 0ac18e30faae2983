"""Write a tiny checkpoint in the released format, or check any checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dsv4_ops.checkpoint.format import check_checkpoint
from dsv4_ops.checkpoint.headers import CONFIG, INDEX, WHOLE
from dsv4_ops.core.errors import argument_error
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.mla_checkpoint import write_mla_checkpoint
from dsv4_ops.testing.text import BOS, EOS, write_tokenizer


def write(path: str, model: str, family: str, seed: int, shards: int) -> None:
    """Write a checkpoint with random weights: for "v4" ``dsv4_ops.testing.checkpoint.TINY``, else
    ``write_mla_checkpoint``. If transformers is installed, also write a tokenizer whose tokens are
    single bytes.

    Raises:
        ValueError: the folder already has a checkpoint, the number of shards is below 1, or
            ``family`` is not of ``model``.
    """
    if any((Path(path) / name).exists() for name in (CONFIG, INDEX, WHOLE)):
        raise argument_error(
            "checkpoint",
            "DIR",
            must="hold no checkpoint to write over",
            got=repr(path),
            do="Pass --check to check it, or remove it",
        )
    if model != "v4":
        if family != "instruct":
            raise argument_error(
                "checkpoint",
                "--family",
                must="be left out with other models than v4",
                got=repr(family),
                do="V3, V3.2, V2 and GLM-5 have one format",
            )
        write_mla_checkpoint(path, model, seed=seed, shards=shards)
        write_tokenizer(path, bos=BOS, eos=EOS)
        return
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

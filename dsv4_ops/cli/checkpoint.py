"""Write a tiny checkpoint in the released format, and check one."""

from __future__ import annotations

from dsv4_ops.core.checkpoint import check_checkpoint
from dsv4_ops.testing.checkpoint import write_checkpoint


def write(path: str, family: str, seed: int, shards: int) -> None:
    """Write ``dsv4_ops.testing.checkpoint.TINY`` with random weights."""
    write_checkpoint(path, family=family, seed=seed, shards=shards)


def describe(path: str) -> str:
    """Check a checkpoint and say what it is.

    Raises:
        ValueError: what is not as released, by name.
    """
    info = check_checkpoint(path)
    lines = [
        f"{path}: {info.num_tensors} tensors, {info.num_bytes / 1e6:.1f} MB",
        f"  {info.expert_dtype} experts, scales {info.scale_dtype}, draft layers: {info.draft}",
    ]
    if not info.names_experts:
        lines.append(
            "  config.json has no expert_dtype: Hugging Face takes fp8, and then loads no fp4"
        )
    return "\n".join(lines)

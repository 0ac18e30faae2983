"""Ranks in Triton's interpreter, one process each, which map each other's workspaces as files."""

import time
from pathlib import Path

import torch

from tests.support import forked

_mapped: list[list[torch.Tensor]] = []


def run_mapped(world: int, folder: Path) -> None:
    """Run ``interpret_ranks.py``, which starts a process for every rank."""
    from dsv4_ops.kernels.context_parallel.exchange import workspace_bytes

    for kernel in ("combine", "gather"):
        (folder / kernel).mkdir()
        for rank in range(world):
            (folder / kernel / str(rank)).write_bytes(bytes(workspace_bytes(world)))
    forked.interpreted(Path(__file__).with_name("interpret_ranks.py"), folder, world)


def workspace(folder: str, rank: int, world: int) -> torch.Tensor:
    """Return this rank's workspace, for kernels of few programs, and map those of all ranks."""
    import triton.language as tl

    import tests.kernels.interpreter.masks  # noqa: F401  # before any kernel runs
    from dsv4_ops.kernels.context_parallel import combine, exchange, gather

    combine.FEW_PROGRAMS = gather.FEW_PROGRAMS = 3
    exchange._now = _rest
    combine.PROGRAMS = gather.PROGRAMS = exchange.PROGRAMS = tl.constexpr(4)
    size = exchange.workspace_bytes(world)
    paths = [str(Path(folder, str(each))) for each in range(world)]
    mapped = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    _mapped.append(mapped)
    header = exchange.workspace_header([each.data_ptr() for each in mapped])
    mapped[rank][: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return mapped[rank]


def _rest() -> int:
    """Return the time; a waiting program also yields the core to other ranks."""
    time.sleep(0.001)
    return 0

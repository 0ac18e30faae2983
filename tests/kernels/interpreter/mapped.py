"""Ranks in Triton's interpreter, a process each, that map each other's workspaces: a file each."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

_mapped: list[list[torch.Tensor]] = []


def run_mapped(world: int, folder: Path) -> None:
    """Run ``interpret_ranks.py`` as every rank; it gets the folder, its rank and ``world``."""
    from dsv4_ops.kernels.context_parallel.exchange import workspace_bytes

    for kernel in ("combine", "gather"):
        (folder / kernel).mkdir()
        for rank in range(world):
            (folder / kernel / str(rank)).write_bytes(bytes(workspace_bytes(world)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    logs = [folder / f"log{rank}" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        script = Path(__file__).with_name("interpret_ranks.py")
        command = [sys.executable, script, folder, str(rank), str(world)]
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
    deadline = time.monotonic() + 300
    # the first that fails ends it, as others wait for that one
    while time.monotonic() < deadline:
        codes = [each.poll() for each in ranks]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    for each in ranks:
        each.kill()
    codes = [each.wait() for each in ranks]
    assert codes == [0] * world, "\n".join(log.read_text() for log in logs)


def workspace(folder: str, rank: int, world: int) -> torch.Tensor:
    """That of this rank, for kernels of few programs; this process maps those of all ranks."""
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
    """The time, for who waits: on few cores others need the processor."""
    time.sleep(0.001)
    return 0

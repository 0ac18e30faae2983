"""Gathers of ranks in each other's memory, in Triton's interpreter: a process a rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreter.mapped import run_mapped

pytest.importorskip("triton", reason="triton is published for Linux only")

SEVERAL_FLAGS = pytest.mark.nightly("two ranks raise one flag each; GPUs run four ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [2, *(pytest.param(each, marks=SEVERAL_FLAGS) for each in (3, 4))]
)
def test_ranks_gather_in_each_others_memory(world: int, tmp_path: Path) -> None:
    """Byte for byte, in calls of changing shapes between merges that take the same memory."""
    run_mapped("interpret_gather.py", world, tmp_path)


def part(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


PAIR = [part(32, 32, 128, dtype=torch.uint8), part(32, 32, 1, dtype=torch.float32)]
CANDIDATES = [part(4, 512, dtype=torch.int32)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "dim", "world", "grid"),
    [
        ([part(32, 32, 512)], 1, 2, 128),  # queries: 1 MiB in tiles of 8 KiB
        (CANDIDATES, 0, 2, 4),
        pytest.param(PAIR, 1, 8, 66, marks=pytest.mark.nightly("two ranks, one tensor")),
        pytest.param(
            [part(256, 32, 512)], 1, 2, 256, marks=pytest.mark.nightly("fewer bytes a tile")
        ),
    ],
    ids=["queries", "candidates", "queries and weights", "8 MiB"],
)
def test_gather_moves_16_bytes_and_spills_no_registers(
    parts: list[torch.Tensor], dim: int, world: int, grid: int
) -> None:
    """Two programs fit an SM, so that all run at once on an H100; what waits is ordered."""
    from dsv4_ops.cli import kernels
    from dsv4_ops.kernels.context_parallel import gather
    from dsv4_ops.kernels.launcher import Launcher

    made: list[Any] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, found: tuple[int]) -> Any:
            assert found == (grid,)
            return lambda *args, **named: made.append(kernels._Launch(self.kernel, args, named))

    workspace = part(1, dtype=torch.uint8)
    gathered = gather.gather(Launcher(Recorder), parts, workspace, 1, world, dim, 10**9)
    for each, given in zip(gathered, parts, strict=True):
        assert each.shape[dim] == world * given.shape[dim]
    compiled = kernels.compiled(made[0], 90)
    spills, registers = kernels._usage(compiled, 90)
    assert spills == 0
    assert registers * 32 * made[0].kwargs["num_warps"] * 2 <= 65536
    ptx = compiled.asm["ptx"]
    assert "st.global.v2.b64" in ptx
    assert "st.global.b64" not in ptx  # of whole vectors only
    assert "atom.global.sys.release.exch" in ptx
    assert ".sys.acquire" in ptx

"""Merges and gathers of ranks in each other's memory: in Triton's interpreter, with a process per
rank, and compiled for Hopper."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import nightly
from tests.kernels.interpreter.mapped import run_mapped

pytest.importorskip("triton", reason="published for Linux only")
pytestmark = pytest.mark.slow

MORE = pytest.mark.nightly("other tiles")


@pytest.mark.parametrize(
    "world", [2, *nightly("two ranks raise one flag each; GPUs run four ranks", 3, 4)]
)
def test_ranks_work_in_each_others_memory(world: int, tmp_path: Path) -> None:
    """Calls have changing shapes, and run twice, because counters continue. Gathers are equal byte
    for byte, between merges in the same memory."""
    run_mapped(world, tmp_path)


def compiled_for_hopper(launch: Any) -> tuple[Any, str]:
    """Return grid and PTX of the kernel that ``launch`` launches. An SM holds two programs, so that
    all run at once on an H100, and flags are written and read in order for all GPUs."""
    from dsv4_ops.cli import kernels
    from dsv4_ops.kernels.launcher import Launcher

    made: list[Any] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *args, **named: made.append(
                (grid, kernels._Launch(self.kernel, args, named))
            )

    launch(Launcher(Recorder))
    ((grid, found),) = made
    compiled = kernels.compiled(found, 90)
    spills, registers = kernels._usage(compiled, 90)
    assert spills == 0
    assert registers * 32 * found.kwargs["num_warps"] * 2 <= 65536
    ptx: str = compiled.asm["ptx"]
    assert "atom.global.sys.release.exch" in ptx
    assert ".sys.acquire" in ptx
    return grid, ptx


@pytest.mark.parametrize(
    ("tokens", "world"),
    [(64, 4), *(pytest.param(*each, marks=MORE) for each in ((32, 2), (4, 8), (64, 8)))],
)
def test_merge_spills_no_registers(tokens: int, world: int) -> None:
    from dsv4_ops.kernels.context_parallel import combine

    out = torch.empty(tokens, 128, 512, dtype=torch.bfloat16, device="meta")
    lse, workspace = out[..., 0].float(), out.new_empty(1, dtype=torch.uint8)
    grid, _ = compiled_for_hopper(
        lambda launcher: combine.combine_ranks(launcher, out, lse, workspace, 1, world, "e", 10**9)
    )
    assert grid[0] in (64, 128, 256)


def part(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


PAIR = [part(32, 32, 128, dtype=torch.uint8), part(32, 32, 1, dtype=torch.float32)]


@pytest.mark.parametrize(
    ("parts", "dim", "world", "grid"),
    [
        ([part(32, 32, 512)], 1, 2, 128),  # queries: 1 MiB in tiles of 8 KiB
        pytest.param([part(4, 512, dtype=torch.int32)], 0, 2, 4, marks=MORE),
        pytest.param(PAIR, 1, 8, 66, marks=MORE),
        pytest.param([part(256, 32, 512)], 1, 2, 256, marks=MORE),
    ],
    ids=["queries", "candidates", "queries and weights", "8 MiB"],
)
def test_gather_moves_16_bytes_and_spills_no_registers(
    parts: list[torch.Tensor], dim: int, world: int, grid: int
) -> None:
    from dsv4_ops.kernels.context_parallel import gather

    workspace, gathered = part(1, dtype=torch.uint8), []
    found, ptx = compiled_for_hopper(
        lambda launcher: gathered.extend(
            gather.gather(launcher, parts, workspace, 1, world, dim, 10**9)
        )
    )
    assert found == (grid,)
    for each, given in zip(gathered, parts, strict=True):
        assert each.shape[dim] == world * given.shape[dim]
    assert "st.global.v2.b64" in ptx
    assert "st.global.b64" not in ptx  # every store is a whole vector

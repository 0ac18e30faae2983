"""The merge of ranks in each other's memory, in Triton's interpreter: a process a rank."""

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
def test_ranks_merge_in_each_others_memory(world: int, tmp_path: Path) -> None:
    """Calls of changing shapes, twice: counts go on where they were."""
    run_mapped("interpret_combine.py", world, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "world"),
    [
        (64, 4),
        *(
            pytest.param(*each, marks=pytest.mark.nightly("other tiles"))
            for each in ((32, 2), (4, 8), (64, 8))
        ),
    ],
)
def test_merge_spills_no_registers(tokens: int, world: int) -> None:
    """An SM holds two of its largest programs, so that all run at once on an H100."""
    from dsv4_ops.cli import kernels
    from dsv4_ops.kernels.context_parallel import combine
    from dsv4_ops.kernels.launcher import Launcher

    made: list[Any] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            assert grid[0] in (64, 128, 256)
            return lambda *args, **named: made.append(kernels._Launch(self.kernel, args, named))

    out = torch.empty(tokens, 128, 512, dtype=torch.bfloat16, device="meta")
    lse, workspace = out[..., 0].float(), out.new_empty(1, dtype=torch.uint8)
    combine.combine_ranks(Launcher(Recorder), out, lse, workspace, 1, world, "e", 10**9)
    compiled = kernels.compiled(made[0], 90)
    spills, registers = kernels._usage(compiled, 90)
    assert spills == 0
    assert registers * 32 * made[0].kwargs["num_warps"] * 2 <= 65536
    # what waits and what is waited for is ordered for all GPUs
    assert "atom.global.sys.release.exch" in compiled.asm["ptx"]
    assert ".sys.acquire" in compiled.asm["ptx"]

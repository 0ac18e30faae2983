"""The merge of ranks in each other's memory, in Triton's interpreter: a process a rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_merge_in_each_others_memory(world: int, tmp_path: Path) -> None:
    """Calls of changing shapes, twice: counts go on where they were."""
    from dsv4_ops.kernels.context_parallel.combine import workspace_bytes

    for rank in range(world):
        (tmp_path / str(rank)).write_bytes(bytes(workspace_bytes(world)))
    script = Path(__file__).parent / "interpret_combine.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path, str(rank), str(world)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        outputs = [each.communicate(timeout=120)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0] * world, "\n".join(outputs)

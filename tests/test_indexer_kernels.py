"""The indexer's kernels in Triton's interpreter, where their scratch rows are small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")


@pytest.mark.slow
def test_parts_reductions_and_groups_choose_the_same_rows():
    script = Path(__file__).parent / "interpret_indexer.py"
    done = subprocess.run(
        [sys.executable, script, "20"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "merge_groups_kernel" in done.stdout
    assert "merge_parts_kernel" in done.stdout

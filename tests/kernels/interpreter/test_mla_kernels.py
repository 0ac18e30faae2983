"""Sparse MLA in Triton's interpreter: prefill over longer batches, decode with plans and
with the rotation undone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")
NAMES = ("sparse_mla_decode", "sparse_mla_decode_paged")


@pytest.mark.slow
def test_prefill_plans_rotations_and_rows_with_gaps():
    script = Path(__file__).parent / "interpret_mla.py"
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env={**os.environ, **hidden}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    gaps = [f"gaps {name}" for name in (*NAMES, "sparse_mla_prefill")]
    kinds = ("plans", "rotations", "units", "magnitudes")
    passed = [f"{what} {name}" for what in kinds for name in NAMES]
    assert done.stdout.splitlines() == ["prefill", *passed, *gaps]

"""MLA in Triton's interpreter: sparse prefill over longer batches, decode with plans and with the
rotation undone; dense decode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")
NAMES = ("sparse_mla_decode", "sparse_mla_decode_paged")


def passed_in(script):
    """What has passed, line by line."""
    path = Path(__file__).parent / script
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env={**os.environ, **hidden}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_dense_rows_of_all_layouts_and_plans():
    assert passed_in("interpret_dense_mla.py")[-1] == "rows of NaN"


@pytest.mark.slow
def test_prefill_plans_rotations_and_rows_with_gaps():
    gaps = [f"gaps {name}" for name in (*NAMES, "sparse_mla_prefill")]
    kinds = ("plans", "rotations", "units", "magnitudes")
    passed = [f"{what} {name}" for what in kinds for name in NAMES]
    assert passed_in("interpret_mla.py") == ["prefill", *passed, *gaps]

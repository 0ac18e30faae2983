"""The kernel of ``mla_prefill`` with the tiles of every GPU, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")


@pytest.mark.slow
def test_every_tile_equals_the_reference_and_nan_stays_in_its_request() -> None:
    """Requests of more queries and keys than a tile, without queries or keys, padding of NaN; and
    keys and values of one request that are NaN leave the bits of the others."""
    script = Path(__file__).parent / "interpret_context.py"
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines() == ["128 64 2 8", "64 32 2 4"]

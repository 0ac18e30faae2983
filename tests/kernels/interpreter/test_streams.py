"""Kernels of the residual streams in Triton's interpreter."""

from pathlib import Path

import pytest

from tests.support import forked

pytest.importorskip("triton", reason="triton is published for Linux only")


@pytest.mark.slow
def test_programs_that_go_on_to_other_columns() -> None:
    script = Path(__file__).parent / "interpret_streams.py"
    (line,) = forked.interpreted(script)
    assert line.startswith("hyper_connection ")

"""The kernels of ``experts`` in blocks of every size, in Triton's interpreter."""

from pathlib import Path

import pytest

from tests.support import forked

pytest.importorskip("triton", reason="triton is published for Linux only")


@pytest.mark.slow
def test_blocks_of_every_size_equal_the_reference() -> None:
    """Of FP4, scales included whose rows kernels cannot load as words, and of bf16; and the plan of
    many rows, which samples of the contract are too small for."""
    script = Path(__file__).parent / "interpret_experts.py"
    assert forked.interpreted(script) == ["16", "32", "64", "128"]

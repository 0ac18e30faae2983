"""The kernel of ``mla_prefill`` with the tiles of every GPU, in Triton's interpreter."""

from pathlib import Path

import pytest

from tests.support import forked

pytest.importorskip("triton", reason="triton is published for Linux only")


@pytest.mark.slow
def test_every_tile_equals_the_reference_and_nan_stays_in_its_request() -> None:
    """Requests of more queries and keys than a tile, without queries or keys, padding of NaN; and
    keys and values of one request that are NaN leave the bits of the others."""
    script = Path(__file__).parent / "interpret_context.py"
    assert forked.interpreted(script) == ["128 64 2 8", "64 32 2 4"]

"""MLA in Triton's interpreter: sparse prefill over longer batches, decode with plans and with the
rotation undone; dense decode."""

from pathlib import Path

import pytest

from tests.helpers import NIGHTLY
from tests.support import forked

pytest.importorskip("triton", reason="triton is published for Linux only")
NAMES = ("sparse_mla_decode", "sparse_mla_decode_paged")


def passed_in(script, *arguments):
    """What has passed, line by line."""
    return forked.interpreted(Path(__file__).parent / script, *arguments)


@pytest.mark.slow
def test_dense_rows_of_all_layouts_and_plans():
    assert passed_in("interpret_dense_mla.py")[-1] == "rows of NaN"


@pytest.mark.slow
def test_prefill_plans_rotations_and_rows_with_gaps():
    gaps = [f"gaps {name}" for name in (*NAMES, "sparse_mla_prefill")]
    kinds = ("plans", "rotations", "units", "magnitudes")
    every = NAMES if NIGHTLY else NAMES[:1]
    passed = [f"{what} {name}" for what in kinds for name in (NAMES if what == "plans" else every)]
    found = passed_in("interpret_mla.py", *["thorough"] * NIGHTLY)
    assert found == ["prefill", *passed, *gaps]

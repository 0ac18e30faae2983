"""Kernels in Triton's interpreter, at sizes beyond those of sampled calls: each script runs in a
process of its own, and prints what was right."""

from pathlib import Path

import pytest

from tests.helpers import NIGHTLY
from tests.support import forked

pytest.importorskip("triton", reason="published for Linux only")
pytestmark = pytest.mark.slow
DECODES = ("sparse_mla_decode", "sparse_mla_decode_paged")


def passed_in(script: str, *arguments: str) -> list[str]:
    """Return the lines that a script printed, one per check that passed."""
    return forked.interpreted(Path(__file__).parent / script, *arguments)


def test_every_value_and_every_code_by_integers() -> None:
    """All bf16 values, and the ties between codes, become the codes of torch's cast; all codes,
    with all scales that inserts write, become torch's values. GPUs before 8.9 convert like this."""
    counted = 65536 + 6 * 127 + 256 + 256 * len(range(105, 248))
    assert passed_in("interpret_codes.py") == [str(counted)]


@pytest.mark.nightly("test_kernels.py has few tokens, tests/gpu/test_compressor.py many")
def test_programs_of_the_compressor_that_scan_many_tokens() -> None:
    found = passed_in("interpret_compressor.py", "6" if NIGHTLY else "2")
    assert len(found) == (4 if NIGHTLY else 1)


def test_the_tiles_of_mla_prefill_for_every_gpu() -> None:
    """Requests have more queries and keys than a tile, or none, and padding of NaN. Keys and values
    of NaN in one request change no bit of the others."""
    tiles = ["128 64 2 8", "64 32 2 4"]
    found = passed_in("interpret_context.py", *["thorough"] * NIGHTLY)
    assert found == (tiles if NIGHTLY else tiles[1:])


def test_dense_rows_of_all_layouts_and_plans() -> None:
    """Most named cases have narrower rows than the kernel supports."""
    assert passed_in("interpret_dense_mla.py", *["thorough"] * NIGHTLY)[-1] == "rows of NaN"


def test_experts_in_blocks_of_every_size() -> None:
    """FP4 experts include scales whose rows kernels cannot load as words. Bf16 experts run, too,
    and the plan of more rows than the contract samples."""
    arguments = ["thorough"] * NIGHTLY
    blocks = ["16", "32", "64", "128"] if NIGHTLY else ["16", "64"]
    assert passed_in("interpret_experts.py", *arguments) == blocks


def test_prefills_plans_rotations_and_rows_with_gaps() -> None:
    gaps = [f"gaps {name}" for name in (*DECODES, "sparse_mla_prefill")]
    passed = []
    for what in ("plans", "rotations", "units", "magnitudes"):
        passed += [f"{what} {name}" for name in (DECODES if NIGHTLY else DECODES[:1])]
    found = passed_in("interpret_mla.py", *["thorough"] * NIGHTLY)
    assert found == ["prefill", *passed, *gaps]

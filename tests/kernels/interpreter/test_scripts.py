"""What sampled calls are too small for, in Triton's interpreter: each script runs in a process of
its own, and prints what was right."""

from pathlib import Path

import pytest

from tests.helpers import NIGHTLY
from tests.support import forked

pytest.importorskip("triton", reason="published for Linux only")
pytestmark = pytest.mark.slow
DECODES = ("sparse_mla_decode", "sparse_mla_decode_paged")


def passed_in(script: str, *arguments: str) -> list[str]:
    """What has passed, line by line."""
    return forked.interpreted(Path(__file__).parent / script, *arguments)


def test_every_value_and_every_code_by_integers() -> None:
    """All bf16 values and the ties between codes become the codes of torch's cast; all codes, with
    all scales that are written, the values of torch's. GPUs before 8.9 compute as this does."""
    counted = 65536 + 6 * 127 + 256 + 256 * len(range(105, 248))
    assert passed_in("interpret_codes.py") == [str(counted)]


@pytest.mark.nightly("test_kernels.py has few tokens, tests/gpu/test_compressor.py many")
def test_programs_of_the_compressor_that_scan_many_tokens() -> None:
    found = passed_in("interpret_compressor.py", "6" if NIGHTLY else "2")
    assert len(found) == (4 if NIGHTLY else 1)


def test_the_tiles_of_mla_prefill_for_every_gpu() -> None:
    """Requests of more queries and keys than a tile, without queries or keys, padding of NaN; and
    keys and values of one request that are NaN leave the bits of the others."""
    tiles = ["128 64 2 8", "64 32 2 4"]
    found = passed_in("interpret_context.py", *["thorough"] * NIGHTLY)
    assert found == (tiles if NIGHTLY else tiles[1:])


def test_dense_rows_of_all_layouts_and_plans() -> None:
    """Most named cases have narrower rows than the kernel takes."""
    assert passed_in("interpret_dense_mla.py", *["thorough"] * NIGHTLY)[-1] == "rows of NaN"


def test_experts_in_blocks_of_every_size() -> None:
    """Of FP4, scales included whose rows kernels cannot load as words, and of bf16; and the plan of
    many rows, which samples of the contract are too small for."""
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

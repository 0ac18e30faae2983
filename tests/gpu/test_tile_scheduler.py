"""Batches that Hopper's decode kernel schedules by their lengths: the work of its programs, results
against the reference, and graphs whose lengths change. Run them with ``pytest -m gpu tests``."""

import pytest
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import i32
from tests.support import attention_batches as batches
from tests.support.attention_batches import DEVICE, PAGED, agrees, kernel, launches_both, paged_case
from tests.support.prefill_batches import compiled_and_captured, replayed

work_tiles = pytest.importorskip("tests.kernels.emulator.work_tiles", reason="for Linux only")


@pytest.mark.parametrize("programs", [132, 66, 44])
def test_programs_find_their_splits(programs: int) -> None:
    for seed in range(60):
        tokens = 1 + (7 * seed) % min(programs, 120)
        given = work_tiles.sampled(seed, tokens)
        found = work_tiles.scheduled(work_tiles.written_schedule_kernel, given, programs, DEVICE)
        assert found == work_tiles.expected(*given, programs), (seed, tokens)


@pytest.mark.parametrize(
    ("tokens", "at_once"), [(61, 66), (121, 132), (128, 66), (129, 66), (256, 132)]
)
def test_programs_find_their_pieces_beyond_those_at_once(tokens: int, at_once: int) -> None:
    programs = tokens + 32 * at_once // 132
    for seed in range(20):
        given = work_tiles.sampled(seed, tokens)
        found = work_tiles.scheduled(
            work_tiles.written_schedule_kernel, given, programs, DEVICE, at_once=at_once
        )
        assert found == work_tiles.expected(*given, programs, at_once=at_once), (seed, tokens)


@pytest.mark.parametrize("widths", [(128, 2**22), (2**31 - 1, 2**31 - 1)])
def test_tables_for_millions_of_rows(widths: tuple[int, int]) -> None:
    """Adding 63 to these lengths would overflow; tables have more blocks than are read."""
    extra = [2**31 - 1, 2**22, 2**21 + 65]
    extra += [64 * 37 * count + count % 3 - 1 for count in range(37)]
    given = [128, 2**31 - 1, 0, 2**22] * 10, extra, list(range(40)), 40
    found = work_tiles.scheduled(work_tiles.written_schedule_kernel, given, 132, DEVICE, widths)
    assert found == work_tiles.expected(*given, 132, widths)


def lengths(case: Case, long: int, short: int, every: int) -> Case:
    """Return the lengths of a few long contexts among short ones."""
    tokens = case.tensors[0].shape[0]
    lens = i32([long if token % every == every - 1 else short for token in range(tokens)])
    tensors = list(case.tensors)
    tensors[5] = lens
    return Case(case.name, tuple(tensors), case.settings)


@pytest.mark.parametrize("heads", [8, 64, 65, 128])
@pytest.mark.parametrize("tokens", [31, 32, 60, 61, 120, 121, 128, 129, 256, 257])
def test_batches_of_any_lens(tokens: int, heads: int) -> None:
    """The numbers of tokens are near those at which batches begin and cease to be split."""
    agrees(PAGED, paged_case(tokens, tokens, heads))


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [(32, 64), (50, 64), (119, 64), (16, 128), (57, 100), (64, 128), (150, 64), (140, 100)],
)
@pytest.mark.parametrize(("long", "every"), [(2048, 40), (900, 7), (70, 2), (0, 1)])
def test_long_contexts_among_short_ones(tokens: int, heads: int, long: int, every: int) -> None:
    case = lengths(paged_case(long, tokens, heads, columns=1024), long, 9, every)
    agrees(PAGED, case)
    agrees(PAGED, batches.with_inverse_rope(case))


def test_the_same_bits_every_time() -> None:
    case = paged_case(4, 64, 64, columns=1024)
    first = kernel(PAGED, case)
    for _ in range(20):
        assert all(map(equal, kernel(PAGED, case), first))


@pytest.mark.parametrize("captured_by", ["inductor", "torch.cuda.graph"])
def test_a_graph_follows_its_lens(captured_by: str) -> None:
    """Every replay computes the splits, and what to combine, again."""
    made = paged_case(1, 64, 64, columns=1024)

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.sparse_mla_decode_paged(*tensors, **made.settings))

    static = [tensor.to(DEVICE) for tensor in made.tensors[:-3]]
    replay, code = compiled_and_captured(step, static, captured_by)
    assert launches_both(code)
    for long, every in ((2048, 40), (1, 1), (600, 2), (2048, 1), (0, 3), (2048, 64)):
        case = lengths(made, long, 9, every)
        results = replayed(replay, static, list(case.tensors[:-3]))
        agrees(PAGED, case, results)
        assert all(map(equal, results, kernel(PAGED, case)))

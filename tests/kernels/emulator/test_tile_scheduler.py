"""Batches that Hopper's decode kernel schedules by their lengths; its source runs over numpy."""

import functools

import pytest
import torch

from dsv4_ops.core.registry import OPS
from dsv4_ops.core.tiles import MIN_SCHEDULED_TILES, ONE_WAVE_TILES, PROGRAMS

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.kernels.common.attention import combine, splits as splitting
from dsv4_ops.kernels.sparse_mla import decode
from tests.helpers import NIGHTLY, nightly
from tests.kernels.emulator import test_kernels as calls
from tests.support.attention_batches import PAGED, case_of, with_inverse_rope

work_tiles = pytest.importorskip("tests.kernels.emulator.work_tiles", reason="for Linux only")
emulated = pytest.importorskip("tests.gluon_emulator.emulate", reason="published for Linux only")


SEEDS = range(3 if NIGHTLY else 1)


def scheduled(swa, extra, requests, num_reqs, programs, **more):
    kernel = emulated.Emulator()(work_tiles.written_schedule_kernel)
    return work_tiles.scheduled(kernel, (swa, extra, requests, num_reqs), programs, **more)


def of_blocks(*counts):
    """Return lengths for tokens with these numbers of blocks; the first block is the window's."""
    window = [64 * (count > 0) for count in counts]
    return window, [64 * max(count - 1, 0) for count in counts], list(range(len(counts)))


def test_a_long_token_among_short_ones():
    """10 blocks for 4 programs: with 3 blocks per split, 8 blocks are 3 splits, one more than there
    are programs. 4 per split cost (4 + 2) * 4 + 1 = 25, whole tokens 8 * 4 = 32."""
    rows, combines = scheduled(*of_blocks(1, 8, 1), 3, 4)
    assert rows == [(0, 0, 1), (1, 0, 2, 0), (1, 1, 2, 0), (2, 0, 1)]
    assert combines == [(1, 2, 0)]


def test_tokens_are_left_whole_where_a_join_takes_longer():
    """7 blocks for 8 programs: 1 block per split costs (1 + 2) * 8 + 4 = 28, 2 blocks cost (2 + 2)
    * 8 + 1 = 33, whole tokens 3 * 8 = 24."""
    rows, combines = scheduled(*of_blocks(2, 3, 2), 3, 8)
    assert rows == [(0, 0, 1), (1, 0, 1), (2, 0, 1)] + [None] * 5
    assert combines == []


def test_where_a_program_looks_no_further():
    """132 programs have a mean of 1 block. 3 blocks cost (1 + 2) * 132 + 2 in splits of one, or 3 *
    132 whole. 4 blocks cost (1 + 2) * 132 + 3, (2 + 2) * 132 + 1, or 4 * 132 whole."""
    assert scheduled(*of_blocks(3, 1), 2, 132) == ([(0, 0, 1), (1, 0, 1)] + [None] * 130, [])
    rows, combines = scheduled(*of_blocks(4, 1), 2, 132)
    splits = [(0, split, 4, 0) for split in range(4)]
    assert rows == [*splits, (1, 0, 1)] + [None] * 127
    assert combines == [(0, 4, 0)]


def test_rows_of_requests_that_do_not_exist_have_no_weight():
    """Padding of a captured batch may have any number of table rows."""
    swa, extra, _ = of_blocks(1, 8, 1)
    rows, combines = scheduled(swa, [4096, *extra[1:]], [-1, 1, 2], 3, 4)
    assert rows == [(0, 0, 1), (1, 0, 2, 0), (1, 1, 2, 0), (2, 0, 1)]
    assert combines == [(1, 2, 0)]
    assert scheduled([0] * 3, [4096] * 3, [3, -(2**31), 2**31 - 1], 3, 4)[0][:3] == [
        (token, 0, 1) for token in range(3)
    ]


def test_more_tokens_than_run_at_once_take_the_longest_first():
    """16 blocks of 5 tokens, 2 programs at once, and 6 programs. Splits of 8 (the mean) and 10 cost
    (16 + 4 * (6 - 2)) + 2 * 2 + 1 = 37, whole tokens (12) cost 16 + 4 * 3 = 28. In 14ths of 12
    blocks, 12 blocks are 14 and 1 block is 1; tokens of 1 block keep their order."""
    rows, combines = scheduled(*of_blocks(1, 1, 12, 1, 1), 5, 6, at_once=2)
    assert rows == [(token, 0, 1) for token in (2, 0, 1, 3, 4)] + [None]
    assert combines == []


def test_tokens_about_as_long_as_each_other_keep_their_order():
    """The mean of 5 tokens is 3 blocks: 5 blocks are at most the mean and a combine, 6 are more."""
    given = of_blocks(1, 2, 3, 5, 4)
    want = [(token, 0, 1) for token in range(5)]
    assert scheduled(*given, 5, 6, at_once=2) == ([*want, None], [])
    rows, _ = scheduled(*of_blocks(1, 2, 2, 6, 4), 5, 6, at_once=2)
    assert [row[0] for row in rows if row] == [3, 4, 1, 2, 0]


@pytest.mark.parametrize(
    ("tokens", "programs", "at_once"),
    [
        *((1, 132, None), (40, 44, None), (3, 4, 2), (64, 80, 66)),
        *nightly(
            "those before",
            *((2, 3, None), (33, 132, None), (32, 66, None), (120, 132, None), (7, 7, None)),
            *((121, 153, 132), (128, 144, 66), (129, 145, 66), (256, 288, 132)),
        ),
    ],
)
def test_every_program_finds_what_the_others_leave(tokens, programs, at_once):
    """All programs run at once, or ``at_once`` of them."""
    for seed in SEEDS:
        given = work_tiles.sampled(seed, tokens)
        found = scheduled(*given, programs, at_once=at_once)
        assert found == work_tiles.expected(*given, programs, at_once=at_once)


@pytest.mark.parametrize(
    "widths",
    [(2**31 - 1,) * 2, *nightly("int32", ((128, 2**22),), ((2**22,) * 2,), ((128, 2**31 - 1),))],
)
@pytest.mark.parametrize("seed", [0, *nightly("seed 0", 1)])
def test_tables_for_millions_of_rows(seed, widths):
    """Contexts have whole numbers of splits, or a row more or less; more blocks than the scheduler
    reads; or as many rows as int32 holds, where adding 63 would overflow."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 700, (40,), generator=made)
    numbers = torch.randint(1, 90, (40,), generator=made)
    near = torch.randint(-1, 2, (40,), generator=made)
    extra = (64 * sizes * numbers + near).tolist()
    extra[::13] = [2**31 - 1, 2**22, 2**21 + 65, 2**31 - 64]
    swa = [128, 2**31 - 1, 0, 2**22] * 10
    given = swa, extra, list(range(40)), 40
    assert scheduled(*given, 132, widths=widths) == work_tiles.expected(*given, 132, widths)


def test_the_oracle_leaves_no_piece_out():
    """Each split of a token occurs once, and so does each place of a partial result."""
    for seed in range(50):
        tokens = 1 + seed * 119 // 49
        rows, combines = work_tiles.expected(*work_tiles.sampled(seed, tokens), PROGRAMS)
        splits = sorted(row[:2] for row in rows if row is not None)
        counts = {row[0]: row[2] for row in rows if row is not None}
        assert splits == [(token, each) for token in range(tokens) for each in range(counts[token])]
        places = [place + each for _, count, place in combines for each in range(count)]
        assert places == list(range(len(places)))
        assert len(places) <= PROGRAMS


def test_a_batch_that_is_cut_has_a_program_for_every_token():
    """There are as many programs as SMs, or more than tokens, and places for all partial results: a
    token of several splits needs one more place than it has extra programs."""
    for wide in (1, 2, 3, 16, 40):
        for tokens in (*range(1, 140), 255, 256):
            q = torch.empty(tokens, 64 * wide, 1, device="meta")
            schedule = splitting.schedule_of(q, 18, wide)
            assert (schedule is not None) == (tokens * wide >= MIN_SCHEDULED_TILES)
            if schedule is None:
                continue
            extra = schedule.programs - tokens
            assert 0 <= extra <= PROGRAMS - min(tokens, extra)
            assert (schedule.programs <= schedule.wave) == (tokens * wide <= ONE_WAVE_TILES)
            assert schedule.by_lengths == 1
        queries = torch.empty(257, 64 * wide, 1, device="meta")
        assert splitting.schedule_of(queries, 18, wide) is None


@pytest.mark.parametrize(
    ("tokens", "heads", "programs"),
    [(5, 8, 132), (6, 8, 6), *nightly("those before", (3, 128, 18), (4, 65, 9), (2, 8, 3))],
)
def test_batches_scheduled_by_their_lens(tokens, heads, programs, monkeypatch):
    """Lengths, requests and blocks are adversarial, with or without a rotation, in any order."""
    monkeypatch.setattr(splitting, "MIN_SCHEDULED_TILES", 1)
    for module in (decode, splitting):
        monkeypatch.setattr(module, "PROGRAMS", programs)
    monkeypatch.setattr(combine, "LIST_PROGRAMS", 2 * heads)  # programs combine several tokens
    for seed in SEEDS:
        case = case_of(PAGED, seed, tokens, heads)
        calls.check(PAGED, case, seed)
        calls.check(PAGED, with_inverse_rope(case), seed)
    emulator = emulated.Emulator(0)
    OPS[PAGED].implementation("kernels")(emulator, *case.tensors, **case.settings)
    assert emulator.launched == ["hopper_split_keys_kernel", "combine_listed_kernel"]


@pytest.mark.parametrize(
    ("tokens", "heads", "splits"), [(3, 65, 2), *nightly("2 splits", (5, 8, 0), (2, 8, 1))]
)
def test_splits_where_a_package_might_schedule(tokens, heads, splits, monkeypatch):
    """All tokens have equally many splits; those with several are listed for the combine."""
    made = functools.partial(splitting.TileSchedule, 0, 132, 132)
    room = torch.full((tokens + 1, 4), -7, dtype=torch.int32)
    monkeypatch.setattr(decode, "schedule_of", lambda *_: made(room))
    monkeypatch.setattr(decode, "num_splits_of", lambda *_: splits or 5)
    for seed in range(2 if NIGHTLY else 1):
        calls.check(PAGED, case_of(PAGED, seed, tokens, heads), seed)
    listed = room[: int(room[0, 0]) + 1, :3].tolist()[1:]
    count = splits or 5
    combines = [[token, count, token * count] for token in range(tokens)]
    assert listed == (combines if count > 1 else [])


def test_sampled_calls_scheduled_by_their_lens(monkeypatch):
    monkeypatch.setattr(splitting, "MIN_SCHEDULED_TILES", 1)
    monkeypatch.setattr(splitting, "MIN_UNITS", 1)
    for name, chosen in calls.SETTINGS:
        if name == PAGED and chosen["num_splits"] == 0 and not chosen["batch_invariant"]:
            calls.test_sampled_calls(name, chosen)

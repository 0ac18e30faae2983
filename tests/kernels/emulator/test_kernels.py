"""The Gluon kernels for Hopper against the references. The emulator runs their Python source over
numpy, and raises if partitions race or deadlock. GPU tests check what Triton compiles."""

import math

import pytest
import torch
from hypothesis import given

from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS, TRITON
from dsv4_ops.dispatch.limits import limit
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.checks import strided_copy
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import INT32_MAX, INT32_MIN, NIGHTLY, assert_right, i32, i64, nightly, strided
from tests.support import attention_batches as batches
from tests.support.attention_batches import DECODE, PAGED, case_of, decode_case, with_inverse_rope
from tests.support.prefill_batches import MODES, PREFILL, plan_of, prefill_case, unsplit, with_plan
from tests.support.sampled import sampled

emulated = pytest.importorskip("tests.gluon_emulator.emulate", reason="published for Linux only")
interpret_mla = pytest.importorskip("tests.kernels.interpreter.interpret_mla")

KERNELS = {
    DECODE: "hopper_split_keys_kernel",
    PAGED: "hopper_split_keys_kernel",
    PREFILL: "hopper_prefill_keys_kernel",
}
SETTINGS = [
    (name, chosen)
    for name in KERNELS
    for chosen in OPS[name].implementation("testing").settings
    if chosen["layout"] == MainLayout.tag
]
each_op = pytest.mark.parametrize("name", KERNELS)
each_split = pytest.mark.parametrize("splits", [3, *nightly("3 of them", 0, 1)])


def kernel(name, case, seed=0):
    results, launched = emulated.results_of(name, case, seed)
    if case.tensors[0].numel():
        assert launched[0] == KERNELS[name]
    return results


def check(name, case, seed=0):
    """Check the kernel, for a prefill also without splits; return the last results."""
    for each in (case, unsplit(case)) if name == PREFILL else (case,):
        actual = kernel(name, each, seed)
        assert_right(name, case, actual)
    return actual


def near(name, case):
    """Compare results that are not finite, for which float64 has no budget."""
    expected = case.run(OPS[name].reference)
    for actual, close in zip(kernel(name, case), expected, strict=True):
        torch.testing.assert_close(actual, close, rtol=2**-6, atol=2**-8, equal_nan=True)


def replaced(case, **changed):
    """Return a decode's call with other tensors."""
    place = OPS[DECODE].parameters.index
    return with_tensors(case, {place(name): value for name, value in changed.items()})


def with_tensors(case, changed):
    tensors = [changed.get(place, tensor) for place, tensor in enumerate(case.tensors)]
    return Case(case.name, tuple(tensors), case.settings)


@each_op
def test_named_cases(name):
    for case in testing.cases_of(name):
        if is_taken(name, case):
            check(name, case)


def is_taken(name, case):
    return limit(name, TRITON, OPS[name].arguments(case.tensors, case.settings)) is None


@pytest.mark.parametrize(("name", "chosen"), SETTINGS)
def test_sampled_calls(name, chosen):
    @sampled(8, 1)
    @given(OPS[name].implementation("testing").strategy(settings=chosen))
    def compare(case):
        if is_taken(name, case):
            check(name, case)

    compare()


@pytest.mark.parametrize(("block", "extra"), [(1, 70), (48, None), (256, 70)])
def test_pages_of_any_size(block, extra):
    check(DECODE, decode_case(1, 3, 8, extra, block=block, extra_block=48, num_splits=2))


OF_ONE = pytest.mark.nightly("plans and what follows the keys are those of the other")


@pytest.fixture
def emulates(monkeypatch):
    """Let the checks of the Triton kernels run these kernels."""
    monkeypatch.setattr(interpret_mla, "kernel", kernel)
    monkeypatch.setattr(interpret_mla, "check", check)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=OF_ONE if name == PAGED else [])
        for what in ("plans", "adversarial", "rotations", "odd_units", "magnitudes")
        for name in (DECODE, PAGED)
    ],
)
@pytest.mark.usefixtures("emulates")
def test_what_the_triton_kernel_promises(what, name):
    """Results are right with stale plans, adversarial plans, rotations, splits of half blocks, and
    keys of any scale."""
    tokens = {"plans": 5, "adversarial": 5, "rotations": 3}.get(what, 2)
    getattr(interpret_mla, what)(name, case_of(name, 3, tokens, 8))


@pytest.mark.parametrize("name", [DECODE, pytest.param(PAGED, marks=OF_ONE)])
@pytest.mark.usefixtures("emulates")
@pytest.mark.parametrize("what", ["plans", *nightly("plans of other lengths", "adversarial")])
def test_a_program_joins_several_tokens(name, what, monkeypatch):
    """Programs of a large plan combine several tokens; here one program combines all 9."""
    monkeypatch.setattr("dsv4_ops.kernels.common.attention.combine.PROGRAMS", 1)
    case = case_of(name, 4, 9, 3)
    if what == "plans" and not NIGHTLY:
        check(name, with_plan(case, plan_of(case, 9)))
    else:
        getattr(interpret_mla, what)(name, case)


@pytest.mark.parametrize("name", [DECODE, PAGED])
def test_pieces_that_are_none_write_nothing(name):
    """A wrong plan row has one invalid number. Its token has no valid row, so the call writes
    nothing for this token."""
    good = [[0, 0, 1, 0], [1, 0, 2, 4], [1, 1, 2, 4]]
    wrong = [[token, 0, count, 0] for token in (-1, 3, INT32_MAX, INT32_MIN) for count in (1, 2)]
    wrong += [[2, split, 2, 0] for split in (-1, 2, INT32_MAX, INT32_MIN)]
    wrong += [[2, split, 1, 0] for split in (-1, 1)]
    wrong += [[2, 0, count, 0] for count in (0, -1, INT32_MIN, INT32_MAX)]
    room = 2 * (len(wrong) + 4)
    wrong += [[2, 0, 2, first] for first in (-1, INT32_MIN, room - 1, room)]
    case = case_of(name, 5, 3, 9)
    expected = kernel(name, with_plan(case, i32(good + [[-1] * 4] * len(wrong))))
    want = [[False, False, True]] * 2
    assert [result.isnan().flatten(1).all(1).tolist() for result in expected] == want
    assert all(map(equal, kernel(name, with_plan(case, i32(good + wrong))), expected))


LISTS = pytest.mark.nightly("test_the_last_selected_row_counts; short ones of C4")


@pytest.mark.usefixtures("emulates")
def test_short_prefills_and_tokens_by_themselves():
    if NIGHTLY:
        interpret_mla.prefills()
    interpret_mla.chunks()


@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=LISTS) if each == "C4" else each for each in MODES]
)
def test_long_prefills(mode):
    check(PREFILL, prefill_case(0, 12, 8, mode, max_reqs=2))
    check(PREFILL, prefill_case(1, 3, 128, mode, topk=600, window=100, max_reqs=1))
    check(PREFILL, prefill_case(2, 3, 8, mode, topk=70, window=300, max_reqs=1))


def test_positions_that_no_token_has():
    """Some positions out of range equal a valid position in their lower 32 bits."""
    far = [-1, -200, 2**32 + 70, 70 - 2**32, INT32_MAX, 2**63 - 1, -(2**63), 70]
    case = prefill_case(5, len(far), 8, "C128", longest=300, max_reqs=1)
    case = with_tensors(case, {2: i64(far), 3: i32([0] * len(far))})
    _, lse = check(PREFILL, case)
    assert lse.isfinite().all(1).tolist() == [False] * 7 + [True]


def test_the_last_selected_row_counts():
    """The row is anywhere in the list, and it is alone, because no block of the window exists."""
    case, places = prefill_case(6, 6, 8, "C4", max_reqs=1), [0, 63, 64, 511, 512, 599]
    rows = torch.full((6, 600), -1, dtype=torch.int32)
    rows[torch.arange(6), places] = i32([7, 70, 130, 255, 300, 500])
    window, extra = torch.full_like(case.tensors[4], -1), case.tensors[6]
    exists = (extra >= 0) & (extra < len(case.tensors[5]))
    changed = {4: window, 6: torch.where(exists, extra, extra[exists][0]), 7: rows}
    case = with_tensors(case, {2: i64([2400] * 6), 3: i32([0] * 6), **changed})
    _, lse = check(PREFILL, case)
    assert lse.isfinite().all()


@each_op
def test_every_schedule_gives_the_same_bits(name):
    cases = [with_inverse_rope(case_of(name, 5, 3, 8, num_splits=3))] if name != PREFILL else []
    if name == PREFILL:
        cases += [prefill_case(2, 4, 8, "C4")]
        cases += [unsplit(cases[0])] if NIGHTLY else []
    for case in cases:
        results = [kernel(name, case, seed) for seed in range(6 if NIGHTLY else 2)]
        for other in results[1:]:
            assert all(map(equal, results[0], other))


LENS = [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, -1, INT32_MIN, INT32_MAX]


def listing(seed, tokens, heads=8, extra=130, **changed):
    """Return a call in which every index names a row."""
    case = decode_case(seed, tokens, heads, extra, adversarial=False, **changed)
    lists = {"swa_indices": case.tensors[2], "extra_indices": case.tensors[5]}
    given = {name: rows for name, rows in lists.items() if rows is not None}
    full = {name: torch.where(rows < 0, rows.max(), rows) for name, rows in given.items()}
    return replaced(case, **full)


def lens_of(tokens, swa, extra):
    return {"swa_lens": i32([swa] * tokens), "extra_lens": i32([extra] * tokens)}


@pytest.mark.parametrize(("splits", "seed"), [(3, 2), *nightly("3 splits", (0, 0), (1, 1))])
def test_lens_at_the_edges_of_blocks(splits, seed):
    """Lengths of the window and of the extra list are at edges of blocks, in shuffled pairs."""
    order = torch.randperm(len(LENS), generator=torch.Generator().manual_seed(seed))
    swa, extra = i32(LENS), i32(LENS)[order]
    case = listing(seed, len(LENS), num_splits=splits)
    case = replaced(case, swa_lens=swa, extra_lens=extra)
    check(DECODE, case)
    finite = kernel(DECODE, case)[1].isfinite().all(1)
    assert torch.equal(finite, (swa > 0) | (extra > 0))


@each_split
def test_blocks_none_of_whose_keys_exist(splits):
    """Blocks without keys come before, between or after blocks with keys, or are the only ones."""
    case = listing(2, 4, num_splits=splits)
    swa, extra = (case.tensors[place].clone() for place in (2, 5))
    swa[0], swa[1, 64:], extra[1] = -1, 10**6, INT32_MAX
    extra[2, :64], extra[2, 70:] = -1, INT32_MIN
    swa[3], extra[3] = -1, -1
    case = replaced(case, swa_indices=swa, extra_indices=extra, **lens_of(4, 128, 130))
    check(DECODE, case)
    assert kernel(DECODE, case)[1].isfinite().all(1).tolist() == [True, True, True, False]


@each_split
def test_a_slot_that_is_listed_often_counts_as_often(splits):
    """The log of the sum of 128 equal weights is that of one weight plus log 128."""
    case = listing(3, 2, extra=None, num_splits=splits)
    case = replaced(case, swa_indices=case.tensors[2][:, :1].expand(-1, 128), attn_sink=None)
    (out, lse), (same, logs) = (
        kernel(DECODE, replaced(case, swa_lens=i32([length] * 2))) for length in (1, 128)
    )
    torch.testing.assert_close(same, out)
    torch.testing.assert_close(logs, lse + math.log(128))


def spoiled(seed, splits):
    """Return a call, a cache to spoil, and a slot of it that only the first token lists."""
    case = listing(seed, 3, num_splits=splits)
    extra = case.tensors[5].clone()
    slot = int(extra[0, 69])
    extra[1:][extra[1:] == slot] = -1
    case = replaced(case, extra_indices=extra, **lens_of(3, 100, 70))
    return case, case.tensors[4].clone(), slot


@pytest.mark.parametrize(
    ("place", "value", "splits"),
    [
        (0, 0x7F, 1),
        (575, 0xFF, 3),
        *nightly("those before", (255, 0xFF, 3), (300, 0x7F, 3), (447, 0xFF, 1), (449, 0x7F, 1)),
    ],
)
def test_nan_is_seen_by_those_that_list_it(splits, place, value):
    """One byte makes a code or a RoPE value NaN."""
    case, cache, slot = spoiled(4, splits)
    start = MainLayout(64).data_offset(slot)
    cache.view(-1)[start + place] = value
    if place > 448:
        cache.view(-1)[start + place - 1] = 0xFF
    near(DECODE, replaced(case, extra_cache=cache))
    out, lse = kernel(DECODE, replaced(case, extra_cache=cache))
    assert lse.isnan().all(1).tolist() == [True, False, False]
    assert out[0].isnan().all(0).any()
    assert not out[1:].isnan().any()


@pytest.mark.parametrize(
    ("byte", "splits"), [(0, 1), (254, 3), *nightly("those before", (1, 3), (255, 1))]
)
def test_scale_bytes_that_no_insert_writes(splits, byte):
    """Byte 0 makes all values zero and byte 255 makes them infinite; 254 is 2^127."""
    case, cache, slot = spoiled(5, splits)
    start = MainLayout(64).scale_offset(slot)
    cache.view(-1)[start : start + 7] = byte
    near(DECODE, replaced(case, extra_cache=cache))


@pytest.mark.parametrize("splits", [2, *nightly("2 splits", 1, 3)])
def test_sums_that_overflow_are_infinite_beside_those_that_do_not(splits):
    """64 or more keys have equal weights and values of 3e38 in one dimension."""
    case = listing(6, 2, 9, num_splits=splits)
    caches, huge = {}, torch.tensor([3e38]).bfloat16().view(torch.uint8)
    for name, place in (("swa_cache", 1), ("extra_cache", 4)):
        cache = caches[name] = case.tensors[place].clone()
        rows = cache[:, : 64 * 576].unflatten(1, (64, 576))
        rows[..., 448 + 20 : 448 + 22] = huge
    q = torch.zeros_like(case.tensors[0])
    case = replaced(case, q=q, attn_sink=None, **caches, **lens_of(2, 128, 130))
    near(DECODE, case)
    out = kernel(DECODE, case)[0]
    assert out[..., 458].isposinf().all()
    assert out.isfinite().sum() == 2 * 9 * 511


@pytest.mark.parametrize(
    ("name", "exponent"),
    [(DECODE, -85), (PAGED, 60), *nightly("those before", (PAGED, -20), (DECODE, 118))],
)
def test_partial_results_of_any_magnitude(name, exponent):
    """Other splits have ordinary results: the heads and splits of a token have their own scales."""
    check(name, batches.magnified(case_of(name, 6, 2, 8, num_splits=3), exponent))


@pytest.mark.parametrize("large", [slice(0, 2), slice(5, 7)], ids=["left", "right"])
def test_partial_results_much_larger_in_one_half(large):
    """One half is larger by 2^40, which exceeds the range of float16."""
    case, caches = listing(7, 2, num_splits=3), {}
    for name, place in (("swa_cache", 1), ("extra_cache", 4)):
        caches[name] = case.tensors[place].clone()
        scales = caches[name][:, 64 * 576 : 64 * 584].unflatten(1, (64, 8))
        scales[..., large] += 40
    q = case.tensors[0].clone()
    q[..., large.start * 64 : large.stop * 64] = 0
    check(DECODE, replaced(case, q=q, **caches))


@pytest.mark.parametrize(
    ("mode", "more"), [("C4", 100), ("C128", 0), *nightly("those before", ("C4", 0), ("C128", 100))]
)
def test_every_third_page_of_either_table_is_none(mode, more):
    """Every third entry names a block past the cache, whichever cache has more blocks."""
    case = prefill_case(3, 6, 8, mode, longest=1500, max_reqs=1, topk=130)
    tensors = list(case.tensors)
    for cache, table, pages in ((1, 4, more), (5, 6, 100 - more)):
        further = tensors[cache][:1].expand(pages, -1)
        tensors[cache] = torch.cat([tensors[cache], further])
        tensors[table] = tensors[table].clone()
        tensors[table][:, 1::3] = len(tensors[cache])
    check(PREFILL, Case(mode, tuple(tensors), case.settings))


@each_op
def test_tensors_with_gaps_between_their_values(name):
    """The two caches have different gaps."""
    if name == PREFILL:
        case = prefill_case(4, 5, 9, "C4", topk=70, longest=1500, max_reqs=2)
    else:
        case = with_inverse_rope(case_of(name, 4, 3, 9, num_splits=1 if name == PAGED else 2))
    tensors = [tensor if tensor is None else strided_copy(tensor) for tensor in case.tensors]
    for place in (2, 3, 4):
        if tensors[place] is not None and tensors[place].dtype in (torch.int32, torch.int64):
            tensors[place] = strided(case.tensors[place])
    check(name, Case("gaps", tuple(tensors), case.settings))
    tensors[0] = case.tensors[0].mT.contiguous().mT
    check(name, Case("gaps in the queries", tuple(tensors), case.settings))

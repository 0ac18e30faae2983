"""The Gluon kernel of dense MLA decode and of selected rows. The emulator runs its Python source
over numpy, and raises if its partitions race or deadlock."""

import math

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS
from dsv4_ops.core.target import HOPPER
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import INT32_MAX, INT32_MIN, nightly
from tests.support import mla_batches
from tests.support.mla_batches import DENSE, DS_FP8, FP8, SPARSE, assert_exact, mla_case, planned

pytest.importorskip("triton", reason="published for Linux only")
from tests.support.launches import Launches

emulated = pytest.importorskip("tests.gluon_emulator.emulate", reason="published for Linux only")

KERNEL, IN_TRITON = "hopper_mla_decode_kernel", "mla_decode_kernel"
CASES = mla_batches.kernel_cases()


def kernel(case, seed=0, op=DENSE):
    results, launched = emulated.results_of(op, case, seed)
    assert launched[0] == KERNEL
    assert IN_TRITON not in launched
    return results


@pytest.mark.parametrize("name", CASES)
def test_ragged_batches(name):
    assert_exact(kernel(CASES[name]), CASES[name])


@pytest.mark.parametrize(
    ("layout", "made"),
    [
        (FP8, {"query_lens": [2, 1, 4], "heads": 16, "longest": 150}),
        (FP8, {"query_lens": [3, 2], "heads": 8, "longest": 100, "block_size": 7, "codes": True}),
        (DS_FP8, {"query_lens": [3, 2], "heads": 8, "longest": 100, "block_size": 7}),
        *nightly(
            "these; tiles of heads and blocks: test_ragged_batches",
            (DS_FP8, {"query_lens": [2, 1, 4], "heads": 16, "longest": 150}),
            (DS_FP8, {"query_lens": [1, 2], "heads": 65, "longest": 300, "num_splits": 2}),
            (FP8, {"query_lens": [1, 2], "heads": 8, "longest": 600, "block_size": 128}),
            (DS_FP8, {"query_lens": [2], "heads": 8, "longest": 300, "block_size": 96}),
        ),
    ],
)
def test_rows_of_codes(layout, made):
    """The kernel dequantises codes; if the cache has one scale, queries may be codes too."""
    case = mla_case(8, layout=layout, **made)
    assert_exact(kernel(case, seed=1), case)


@pytest.mark.parametrize("exponent", [60, *nightly("a large one", -100)])
def test_queries_that_float16_does_not_hold(exponent):
    """With rows of codes, queries are float16: the kernel multiplies a query row by a power of two,
    and divides its logits by it. Here rows differ by 2^30, and the cache's scale compensates."""
    case = mla_case(8, [2, 1, 4], 16, longest=150, layout=FP8, adversarial=False)
    q, *rest, _ = case.tensors
    rows = torch.arange(q.shape[0] * q.shape[1]).view(*q.shape[:2], 1) % 2
    factors = 2.0 ** (exponent - 30 * rows)
    scale = torch.tensor([1.5 * 2.0**-exponent])
    case = Case("far", ((q * factors).bfloat16(), *rest, scale), case.settings)
    assert_exact(kernel(case), case)


def test_a_query_of_infinity_or_nan_spoils_its_row_alone():
    case = mla_case(8, [2, 1, 4], 16, longest=150, layout=FP8, adversarial=False)
    whole = kernel(case)
    q = case.tensors[0].clone()
    q[0, 3, 5], q[1, 0, 570] = math.inf, math.nan
    spoiled = torch.zeros(q.shape[:2], dtype=torch.bool)
    spoiled[0, 3] = spoiled[1, 0] = True
    found = kernel(Case("spoiled", (q, *case.tensors[1:]), case.settings))
    for left, right in zip(found, whole, strict=True):
        assert equal(left[~spoiled], right[~spoiled])
        assert left[spoiled].isnan().all()


@pytest.mark.parametrize("seed", [0, *nightly("seed 0", 1, 2)])
def test_schedules(seed):
    """Partitions run in other orders, over several pairs of blocks in two splits."""
    case = mla_case(seed, [1, 1], 8, longest=700, num_splits=2)
    assert_exact(kernel(case, seed), case)


@pytest.mark.parametrize("op", [DENSE, SPARSE])
def test_a_batch_is_scheduled_by_its_lengths(op):
    """One long request among short ones has several splits, which the combine finds in its list.
    For selected rows, the number of rows decides the splits."""
    lens = [900, *range(40)]
    case = mla_case(1, [1] * 41, 4, longest=900, hint=False, adversarial=False, context_lens=lens)
    case = case if op == DENSE else mla_batches.sparse_case(case, topk=2048)
    results, launched = emulated.results_of(op, case)
    assert launched == [KERNEL, "combine_listed_kernel"]
    assert_exact(results, case, op=op)


@pytest.mark.parametrize(
    "made",
    [
        {"query_lens": [2, 1, 4], "heads": 16, "longest": 150},
        {"query_lens": [1, 2], "heads": 65, "longest": 300, "num_splits": 2, "layout": DS_FP8},
        {"query_lens": [3, 2], "heads": 8, "longest": 100, "block_size": 7, "layout": DS_FP8},
        *nightly("those before", {"query_lens": [2, 2], "heads": 8, "longest": 200}),
    ],
)
def test_selected_rows(made):
    case = mla_batches.sparse_case(mla_case(9, **made))
    assert_exact(kernel(case, op=SPARSE), case, op=SPARSE)


@pytest.mark.parametrize("which", ["stale", "adversarial", *nightly("a stale one", "own")])
def test_plans(which):
    case = mla_case(2, [1] * 5, 8, longest=400, hint=False)
    seq_lens = case.tensors[2]
    plan = ops.sparse_mla_plan(
        seq_lens.flip(0) if which == "stale" else seq_lens, None, num_heads=8, num_programs=6
    )
    if which == "adversarial":
        plan[1:3] = torch.tensor([[INT32_MAX, 0, 1, 0], [0, INT32_MIN, 2, INT32_MAX]]).int()
        kernel(planned(case, plan))  # the emulator raises if an access is out of bounds
        return
    assert_exact(kernel(planned(case, plan)), case)


def test_tokens_have_the_same_bits_in_every_batch():
    case = mla_case(3, [1, 2, 1], 8, longest=200, batch_invariant=True)
    whole = kernel(case)
    q, cache, seq_lens, requests, table, *_ = case.tensors
    for chosen in (slice(0, 1), slice(1, 4)):
        tokens = (q[chosen], cache, seq_lens[chosen], requests[chosen], table)
        some = kernel(Case("some", tokens, case.settings))
        assert all(equal(left[chosen], right) for left, right in zip(whole, some, strict=True))


def test_a_token_of_nan_stays_alone():
    case = mla_case(4, [2, 2], 8, longest=200, adversarial=False)
    whole = kernel(case)
    case.tensors[0][1] = math.nan
    others = [0, 2, 3, 4]
    for left, right in zip(kernel(case), whole, strict=True):
        assert equal(left[others], right[others])


@pytest.mark.parametrize(
    ("splits", "layout"),
    [(2, "plain"), (1, DS_FP8), *nightly("those before", (1, "plain"), (1, FP8), (2, FP8))],
)
def test_a_row_of_nan_stays_with_the_tokens_that_see_it(splits, layout):
    """Tokens of a request share a program; only the last of them see the last rows."""
    case = mla_case(4, [4, 2], 8, longest=300, layout=layout, adversarial=False, num_splits=splits)
    mla_batches.assert_spoils_what_sees_it(kernel, case)


def test_queries_and_pages_of_any_strides():
    """Queries that are not aligned to 16 bytes are copied first; blocks may have gaps."""
    case = mla_case(5, [2, 1], 8, longest=130, num_splits=2)
    expected = kernel(case)
    q, cache, *rest = case.tensors
    wide = torch.zeros(*q.shape[:2], 580).bfloat16()
    wide[..., 3:579] = q
    pages = torch.full((cache.shape[0], 65, 576), math.nan).bfloat16()
    pages[:, :64] = cache
    views = Case("views", (wide[..., 3:579], pages[:, :64], *rest), case.settings)
    assert all(map(equal, kernel(views), expected))


def test_other_rows_have_the_kernel_in_triton():
    """Rows of another width or dtype run the Triton kernel."""
    cases = [
        mla_case(6, [2], 4, longest=40, width=80, rank=64),
        mla_case(6, [2], 4, longest=40, dtype=torch.float16),
        mla_case(6, [2], 4, longest=40, width=80, rank=64, layout=FP8),
    ]
    for case in cases:
        launch = Launches(HOPPER)
        OPS[DENSE].implementation("kernels")(launch, *case.tensors, **case.settings)
        assert launch.made[0][0] == IN_TRITON

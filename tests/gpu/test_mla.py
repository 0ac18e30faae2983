"""Dense MLA decode and selected rows on a GPU: our kernels and FlashMLA against float64, in eager,
compiled and captured calls."""

import math

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.kernels.common.hopper import support
from dsv4_ops.testing.case import Case
from tests.gpu.test_packages import shifted
from tests.support import mla_batches
from tests.support.attention_batches import graph_of
from tests.support.mla_batches import DS_FP8, LAYOUTS, SPARSE, assert_exact, mla_case, sparse_case

CASES = mla_batches.kernel_cases()


@pytest.fixture(params=["", "in Triton", "of an A100"])
def each_kernel(request, monkeypatch):
    """Run this GPU's kernel, the Triton kernel, and an A100's. Compiled calls run the first."""
    if request.param == "of an A100":
        request.getfixturevalue("a100")
    elif request.param:
        monkeypatch.setattr(support, "runs", lambda *call: False)


def called(case, **settings):
    moved = case.on("cuda")
    op = ops.mla_sparse if case.name == "sparse" else ops.mla_decode
    return op(*moved.tensors, **{**moved.settings, **settings})


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("name", CASES)
def test_bf16_rows(name):
    assert_exact(called(CASES[name]), CASES[name])


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_ragged_batches_of_all_layouts(layout, heads):
    for seed in range(3):
        case = mla_case(seed, [1, 3, 2, 1, 4], heads, longest=700, layout=layout)
        assert_exact(called(case), case)


@pytest.mark.usefixtures("each_kernel")
def test_other_dtypes():
    for case in (
        mla_case(1, [3, 2], 16, longest=300, layout=mla_batches.FP8, codes=True),
        mla_case(2, [3, 2], 16, longest=300, layout=DS_FP8, num_splits=3),
        mla_case(3, [3, 2], 16, longest=300, dtype=torch.float16),
        mla_case(4, [3, 2], 8, longest=300, dtype=torch.float32),
    ):
        assert_exact(called(case), case)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", [mla_batches.FP8, DS_FP8])
def test_a_row_of_nan_codes_stays_with_the_tokens_that_see_it(layout):
    case = mla_case(4, [4, 2], 8, longest=300, layout=layout, adversarial=False, num_splits=2)
    mla_batches.assert_spoils_what_sees_it(lambda each: [part.cpu() for part in called(each)], case)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_scheduled_by_its_lengths(layout):
    lens = [3000, 1, 0, 64, 128, 129, 127, 63, *range(60)]
    case = mla_case(5, [1] * 68, 16, longest=3000, layout=layout, hint=False, context_lens=lens)
    assert_exact(called(case), case)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans(layout):
    case = mla_case(6, [1] * 9, 64, longest=900, layout=layout, hint=False)
    plan = ops.sparse_mla_plan(case.tensors[2], None, num_heads=64, num_programs=40)
    assert_exact(called(mla_batches.planned(case, plan)), case)


SELECTING = ["plain", DS_FP8]
"""Layouts of which rows can be selected."""


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", SELECTING)
@pytest.mark.parametrize(
    ("heads", "changed"),
    [(16, {}), (128, {"num_splits": 3}), (64, {"batch_invariant": True, "block_size": 7})],
)
def test_selected_rows(heads, changed, layout):
    for seed in range(3):
        case = mla_case(seed, [1, 3, 2, 1, 4], heads, longest=700, layout=layout, **changed)
        assert_exact(called(sparse_case(case)), sparse_case(case), op=SPARSE)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("layout", SELECTING)
def test_selected_rows_are_scheduled_by_their_number(layout):
    lens = [2000, 1, 0, 64, 128, 129, 127, 63, *range(60)]
    made = {"longest": 2000, "layout": layout, "context_lens": lens}
    case = sparse_case(mla_case(5, [1] * 68, 16, **made), topk=2048)
    assert_exact(called(case), case, op=SPARSE)


@pytest.mark.parametrize("layout", SELECTING)
def test_a_graph_takes_other_rows_compiled_for_any_size(layout):
    made = {"layout": layout, "adversarial": False}
    case = sparse_case(mla_case(9, [1] * 40, 16, longest=600, **made), topk=700).on("cuda")
    q, cache, lists, lens = case.tensors
    call = torch.compile(
        lambda *tensors: ops.mla_sparse(*tensors, **case.settings), fullgraph=True, dynamic=True
    )
    for tokens in (40, 7):
        some = (q[:tokens], cache, lists[:tokens], lens[:tokens])
        expected = ops.mla_sparse(*some, **case.settings)
        assert all(map(torch.equal, call(*some), expected))
    none = torch.full_like(lists, -1)
    graph, results = graph_of(lambda: ops.mla_sparse(q, cache, none, lens, **case.settings))
    none.copy_(lists)
    graph.replay()
    assert all(map(torch.equal, results, ops.mla_sparse(*case.tensors, **case.settings)))


def test_flash_mla(flash_mla_or_skip):
    for heads in (16, 128):
        case = mla_case(7, [1, 3, 2], heads, longest=700)
        assert_exact(called(case, impl="flash_mla"), case)


@pytest.mark.parametrize("layout", SELECTING)
@pytest.mark.parametrize("heads", [64, 128])
def test_flash_mla_over_selected_rows(heads, layout, flash_mla_or_skip):
    for block_size in (64, 7):
        made = {"longest": 700, "layout": layout, "block_size": block_size}
        case = mla_batches.flash_mla_case(mla_case(7, [1, 3, 2], heads, **made))
        assert_exact(called(case, impl="flash_mla"), case, op=SPARSE)


@pytest.fixture
def flash_mla_or_skip():
    from dsv4_ops.dispatch.choice import unusable

    if reason := unusable("flash_mla"):
        pytest.skip(reason)


def test_a_graph_takes_other_lengths():
    """The lengths at a replay decide the schedule."""
    case = mla_case(8, [1] * 40, 16, longest=1200, hint=False, adversarial=False).on("cuda")
    tensors = list(case.tensors)
    lens, tensors[2] = tensors[2], torch.zeros_like(tensors[2])
    graph, (out, lse) = graph_of(lambda: ops.mla_decode(*tensors, **case.settings))
    graph.replay()
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())
    tensors[2].copy_(lens)
    graph.replay()
    expected = ops.mla_decode(*case.tensors, **case.settings)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_for_any_size(layout):
    made = {"layout": layout, "hint": False, "adversarial": False}
    case = mla_case(9, [1] * 40, 16, longest=600, **made).on("cuda")
    call = torch.compile(
        lambda *tensors: ops.mla_decode(*tensors, **case.settings), fullgraph=True, dynamic=True
    )
    for tokens in (40, 7):
        q, cache, lens, requests, table, *rest = case.tensors
        some = (q[:tokens], cache, lens[:tokens], requests[:tokens], table, *rest)
        expected = ops.mla_decode(*some, **case.settings)
        assert all(map(torch.equal, call(*some), expected))


def test_a_cache_at_any_address():
    """If rows are not aligned to 16 bytes, the Triton kernel reads them, also in compiled code."""
    case = mla_case(10, [2, 1], 16, longest=200)
    q, cache, *rest = case.on("cuda").tensors
    made = Case("odd", (q, shifted(cache), *rest), case.settings)
    assert_exact(ops.mla_decode(*made.tensors, **made.settings), case)
    call = torch.compile(lambda *each: ops.mla_decode(*each, **made.settings), fullgraph=True)
    assert_exact(call(*made.tensors), case)

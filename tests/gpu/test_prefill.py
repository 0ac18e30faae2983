"""Sparse MLA for prefill on a GPU: the kernel against the reference, the same bits in every batch,
CUDA graphs. Run there with ``pytest -m gpu tests``; plans of decode: test_mla_plan.py."""

import math

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import assert_agrees, equal
from tests.helpers import assert_right
from tests.support.attention_batches import DECODE, DEVICE, PAGED, generator, kernel, some_tokens
from tests.support.prefill_batches import MODES, PLACES, PREFILL, plain_case, prefill_case, unsplit

each_mode = pytest.mark.parametrize("mode", MODES)


def on_device(case: Case, actual: tuple[Tensor, ...] | None = None) -> None:
    """Compare results with the reference on the device, for 300 tokens at most. If no results are
    passed, compare the kernel's, with splits and without."""
    found = [actual] if actual else [kernel(PREFILL, each) for each in (case, unsplit(case))]
    for each in found:
        assert_right(PREFILL, case.on(DEVICE), each)
        assert not each[0].isnan().any()


@each_mode
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_batches(mode: str, tokens: int, heads: int) -> None:
    on_device(prefill_case(7 * tokens + heads, tokens, heads, mode))


@each_mode
@pytest.mark.parametrize("heads", [1, 12, 65])
def test_head_counts_of_no_whole_tile(mode: str, heads: int) -> None:
    on_device(prefill_case(heads, 9, heads, mode))


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 511, 513, 1024])
def test_selections_of_any_width(topk: int) -> None:
    on_device(prefill_case(topk, 12, 64, "C4", topk=topk))


@pytest.mark.parametrize("window", [1, 63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("block", [1, 53, 64, 256])
def test_windows_and_page_sizes(window: int, block: int) -> None:
    on_device(prefill_case(window, 12, 64, "C4", window=window, block=block, topk=70))


def test_all_rows_of_a_long_request() -> None:
    """C128 at a million tokens: tokens see 8192, 8191, 1 and 4096 rows."""
    case = prefill_case(1, 4, 64, "C128", longest=2**15, max_reqs=1)
    tensors = list(case.tensors)
    for place in (4, 6):
        tensors[place] = tensors[place].repeat(1, 32)
    case = Case(case.name, tuple(tensors), case.settings)
    case.tensors[2][:] = torch.tensor([2**20 - 1, 2**20 - 2, 127, 2**19])
    case.tensors[3].fill_(0)
    on_device(case)


@each_mode
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_a_token_has_the_same_bits_in_every_batch(mode: str, heads: int) -> None:
    """A token is computed alone, in chunks, in another order, in another call, and beside tokens of
    NaN. "auto" may read a copy of the rows for many tokens, and splits the keys of few."""
    case = unsplit(prefill_case(9, 200, heads, mode))
    whole = kernel(PREFILL, case)
    assert all(map(equal, whole, kernel(PREFILL, case)))
    order = torch.randperm(200, generator=generator(1)).tolist()
    shuffled = kernel(PREFILL, some_tokens(case, order, PLACES))
    assert all(equal(left, right[order]) for left, right in zip(shuffled, whole, strict=True))
    for start, stop in ((0, 1), (1, 64), (64, 199), (199, 200)):
        chunk = kernel(PREFILL, some_tokens(case, slice(start, stop), PLACES))
        assert all(equal(left, right[start:stop]) for left, right in zip(chunk, whole, strict=True))
    case.tensors[0][7], case.tensors[0][20] = math.nan, math.inf
    others = [token for token in range(200) if token not in (7, 20)]
    for left, right in zip(kernel(PREFILL, case), whole, strict=True):
        assert equal(left[others], right[others])


@each_mode
def test_arguments_of_any_strides(mode: str) -> None:
    case = prefill_case(3, 40, 64, mode)
    expected, tensors = kernel(PREFILL, case), list(case.on(DEVICE).tensors)
    tensors[0] = tensors[0].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for place in (2, 3):
        tensors[place] = torch.stack([tensors[place]] * 3, 1)[:, 1]
    for place in (4, 6, 7):
        if tensors[place] is not None:
            tensors[place] = torch.stack([tensors[place].T] * 2, 2)[..., 1].T
    actual = OPS[PREFILL].op(*tensors, **case.settings)
    assert all(map(equal, actual, expected))


@pytest.mark.parametrize("name", [DECODE, PAGED, PREFILL])
def test_plain_rows_with_gaps_between_them(name: str) -> None:
    """Only compressed rows have gaps. The kernel needs dense rows, so the reference runs."""
    dense, gaps = plain_case(name)
    assert gaps.tensors[5 if name == PREFILL else 4].stride(1) == 1024
    spec = OPS[name]
    expected = [tensor.to(DEVICE) for tensor in dense.on("cpu").run(spec.reference)]
    for case in (dense, gaps):
        actual = tuple(spec.op(*case.tensors, **case.settings))
        assert_agrees(name, spec.implementation("testing"), dense, actual, expected)


@each_mode
def test_one_graph_for_batches_of_any_size(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ops.sparse_mla_prefill, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 64, 2, 300):
            case = prefill_case(tokens, tokens, 64, mode)
            moved = case.on(DEVICE)
            on_device(case, tuple(compiled(*moved.tensors, **moved.settings)))

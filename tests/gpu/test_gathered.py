"""Hopper's kernel over listed bf16 rows on a GPU: ``sparse_mla_gathered``, and prefills by way of a
copy of their rows. Run there with ``pytest -m gpu tests``."""

import functools
import math

import pytest
import torch
from torch import Tensor

from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.gpu.test_prefill import on_device
from tests.support import attention_batches as batches
from tests.support.attention_batches import DEVICE, GATHERED, agrees, gathered_case, kernel
from tests.support.prefill_batches import MODES, PREFILL, captured, prefill_case, replayed


def ours(case: Case) -> tuple[Tensor, ...]:
    """Return the results of our kernel, or raise if another implementation would run."""
    return kernel(GATHERED, Case(case.name, case.tensors, {**case.settings, "impl": "triton"}))


@pytest.mark.parametrize("topk", [1, 64, 65, 300, 640, 1153])
@pytest.mark.parametrize("heads", [1, 8, 64, 65, 128])
@pytest.mark.parametrize("tokens", [1, 3, 140])
def test_lists_and_heads_of_any_size(tokens: int, heads: int, topk: int) -> None:
    """Programs have one or several items; blocks, and pairs of blocks, are not full."""
    case = gathered_case(tokens + topk, tokens, heads, topk)
    agrees(GATHERED, case, ours(case))


@pytest.mark.parametrize("heads", [9, 64, 128])
@pytest.mark.parametrize("topk", [100, 640])
def test_adversarial_values(topk: int, heads: int) -> None:
    """Entries are absent, lengths out of range, unlisted rows NaN, and some tokens have no key."""
    case = batches.adversarial_gathered(heads, 300, heads, topk)
    agrees(GATHERED, case, ours(case))


def test_many_items_of_a_program() -> None:
    """Each barrier passes many phases; every result is compared on the device."""
    case = gathered_case(1, 3000, 128, 260).on(DEVICE)
    actual = ours(case)
    expected = case.run(OPS[GATHERED].reference)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=2**-6, atol=2**-8)
    for _ in range(20):
        assert all(map(equal, ours(case), actual))


@pytest.mark.parametrize("heads", [8, 128])
def test_a_token_has_the_same_bits_in_every_batch(heads: int) -> None:
    case = gathered_case(2, 400, heads, 300)
    whole = ours(case)
    order = torch.randperm(400, generator=batches.generator(1)).tolist()
    for chosen in (order, slice(0, 1), slice(1, 64), slice(399, 400)):
        found = ours(batches.some_tokens(case, chosen, (0, 2, 3)))
        assert all(equal(a, b[chosen]) for a, b in zip(found, whole, strict=True))
    case.tensors[0][7], case.tensors[0][20] = math.nan, math.inf
    others = [token for token in range(400) if token not in (7, 20)]
    for left, right in zip(ours(case), whole, strict=True):
        assert equal(left[others], right[others])


def test_rows_and_queries_of_any_strides() -> None:
    case = gathered_case(3, 20, 9, 130).on(DEVICE)
    expected, (q, kv, indices, lens, sink) = ours(case), case.tensors
    wide, rows = (torch.zeros(*each.shape[:-1], 525, device=DEVICE) for each in (q, kv))
    wide, rows = wide.bfloat16()[..., 5:517], rows.bfloat16()[..., 1:513]
    wide.copy_(q)
    rows.copy_(kv)
    lists = (indices.t().contiguous().t(), torch.stack([lens, lens], 1)[:, 0])
    strided = (wide, rows, *lists, torch.stack([sink, sink], 1)[:, 0])
    assert all(map(equal, ours(Case("strided", strided, case.settings)), expected))


def test_no_token_and_no_row() -> None:
    q, kv, indices, lens, sink = gathered_case(4, 5, 64, 70).on(DEVICE).tensors
    scale = {"softmax_scale": 0.1}
    assert ours(Case("none", (q[:0], kv, indices[:0], lens[:0], sink), scale))[0].shape[0] == 0
    out, row_max, lse = ours(Case("no row", (q, kv[:0], indices, lens, sink), scale))
    assert (out == 0).all()
    assert (row_max == -math.inf).all()
    assert (lse == -math.inf).all()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_ops.kernels.sparse_mla.prefill.gathers", lambda values: True)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [8, 64, 65, 128])
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_prefills_by_way_of_a_copy(tokens: int, heads: int, mode: str) -> None:
    """Positions, requests, blocks and selections are adversarial."""
    case = prefill_case(7 * tokens + heads, tokens, heads, mode)
    moved, launch = case.on(DEVICE), OPS[PREFILL].implementation("kernels")
    on_device(case, tuple(launch(EAGER, *moved.tensors, **moved.settings, impl="auto")))


def test_a_graph_of_any_size_decides_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the eager op, few tokens read the blocks and many read a copy, with the same bits."""
    made = []
    launch = "dsv4_ops.kernels.sparse_mla.prefill.launch_gathered_keys"
    from dsv4_ops.kernels.sparse_mla import gathered

    def counted(*args, **named):
        made.append(args[1].shape[0])
        return gathered.launch_gathered_keys(*args, **named)

    monkeypatch.setattr(launch, counted)
    torch._dynamo.reset()
    compiled = torch.compile(OPS[PREFILL].op, fullgraph=True, dynamic=True)
    for tokens in (40, 700, 41, 1100):
        case = prefill_case(tokens, tokens, 64, "C4", max_reqs=2)
        eager = kernel(PREFILL, case)
        moved = case.on(DEVICE)
        assert all(map(equal, compiled(*moved.tensors, **moved.settings), eager))
    assert made == [700, 700, 1100, 1100]


def test_a_captured_prefill_by_way_of_a_copy() -> None:
    """The replay gets other positions and selections in the same memory."""
    cases = [prefill_case(seed, 700, 64, "C4", max_reqs=2) for seed in (1, 2, 3)]
    static = list(cases[0].on(DEVICE).tensors)
    op = functools.partial(OPS[PREFILL].op, **cases[0].settings)
    op(*static)
    replay = captured(lambda *tensors: op(*tensors), static, "torch")
    for case in (*cases, cases[0]):
        expected = kernel(PREFILL, case)
        assert all(map(equal, replayed(replay, static, list(case.on(DEVICE).tensors)), expected))

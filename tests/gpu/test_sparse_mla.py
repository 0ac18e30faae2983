"""Sparse MLA on a GPU: kernels against the reference on the CPU, batch invariance, CUDA graphs. Run
there with ``pytest -m gpu tests``. Without a GPU the same code runs the reference."""

import math

import pytest
import torch

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.sparse_mla import BARE
from dsv4_ops.testing.contract.compare import equal
from tests.support import attention_batches as batches
from tests.support.attention_batches import DECODE, DEVICE, PAGED, agrees, case_of, kernel

both_ops = pytest.mark.parametrize("name", [DECODE, PAGED])


@both_ops
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 64, 300])
def test_batches(name: str, tokens: int, heads: int) -> None:
    agrees(name, case_of(name, 7 * tokens + heads, tokens, heads))


@both_ops
@pytest.mark.parametrize("heads", [1, 12, 65])
def test_head_counts_of_no_whole_tile(name: str, heads: int) -> None:
    agrees(name, case_of(name, heads, 5, heads))


@both_ops
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_splits", [0, 1, 7, 40])
@pytest.mark.parametrize("tokens", [2, 40])
def test_splits(name: str, tokens: int, num_splits: int, batch_invariant: bool) -> None:
    """Some calls have more splits than blocks of keys."""
    settings = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    agrees(name, case_of(name, 3, tokens, 64, **settings))


@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (3, 128), (64, 8), (300, 64)])
def test_window_only(tokens: int, heads: int, num_splits: int) -> None:
    agrees(DECODE, batches.decode_case(tokens, tokens, heads, None, num_splits=num_splits))


@pytest.mark.parametrize("sizes", [(256, 64), (64, 2), (1, 3), (53, 61)])
@pytest.mark.parametrize("extra", [1, 63, 65, 1024])
def test_page_sizes_and_widths(sizes: tuple[int, int], extra: int) -> None:
    agrees(DECODE, batches.decode_case(5, 9, 64, extra, block=sizes[0], extra_block=sizes[1]))


@pytest.mark.parametrize("heads", [64, 128])
def test_one_token_of_a_million(heads: int) -> None:
    """The token sees 8192 compressed rows of one request: every SM has a split."""
    case = batches.paged_case(1, 1, heads, columns=4096)
    case.tensors[5].fill_(8190)
    case.tensors[6].fill_(0)
    agrees(PAGED, case)
    for num_splits in (1, 100, 200):
        agrees(PAGED, batches.with_settings(case, num_splits=num_splits))


@both_ops
@pytest.mark.parametrize("how", ["transposed", "gaps", "one for all"])
def test_queries_of_any_strides(name: str, how: str) -> None:
    case = case_of(name, 11, 6, 64)
    q = case.tensors[0].to(DEVICE)
    if how == "transposed":
        view = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    elif how == "gaps":
        view = torch.full((6, 65, 1025), math.nan, dtype=q.dtype, device=DEVICE)[:, 1:, 1::2]
        view.copy_(q)
    else:
        view = q[:1].expand(6, 64, 512)
    case = Case(case.name, (view.cpu().contiguous(), *case.tensors[1:]), case.settings)
    rest = case.on(DEVICE)
    agrees(name, case, tuple(OPS[name].op(view, *rest.tensors[1:], **rest.settings)))


@both_ops
def test_nothing_to_attend_with(name: str) -> None:
    """There are no tokens, or no heads."""
    case = case_of(name, 2, 4, 8).on(DEVICE)
    no_heads = (case.tensors[0][:, :0], *case.tensors[1:-4], case.tensors[-4][:0], *BARE)
    for tensors in (no_heads, batches.some_tokens(case, slice(0, 0)).tensors):
        out, lse = OPS[name].op(*tensors, **case.settings)
        assert out.shape == tensors[0].shape
        assert lse.shape == out.shape[:2]


@both_ops
@pytest.mark.parametrize("exponent", [-90, -30, 20, 110])
def test_magnitudes_of_values(name: str, exponent: int) -> None:
    """Partial results have less range than float32. If keys are multiplied by a power of two,
    outputs change by exactly this factor, with any number of splits."""
    for tokens, num_splits in ((1, 0), (5, 0), (5, 3), (5, 1)):
        case = case_of(name, 8, tokens, 64, num_splits=num_splits)
        out, lse = kernel(name, case)
        assert out.count_nonzero() > out.numel() // 2 * (tokens > 1)
        scaled, same = kernel(name, batches.magnified(case, exponent))
        assert torch.equal(scaled, out * 2.0**exponent)
        assert torch.equal(same, lse)


def test_an_infinite_value_leaves_the_other_dimensions_alone() -> None:
    """All heads see the key, half of them with a weight of 0. One split rounds float32 sums once.
    With one split and with two, weights are rounded to bf16 relative to different maxima."""
    case = batches.decode_case(4, 6, 64, None, adversarial=False)
    layout = MainLayout(64)
    slot = int(case.tensors[2][1, 0])
    start = layout.data_offset(slot % 64) + layout.code_dim
    case.tensors[1][slot // 64, start : start + 2] = torch.tensor([0x80, 0x7F]).byte()  # inf
    whole, parts = (
        kernel(DECODE, batches.with_settings(case, num_splits=splits))[0][1] for splits in (1, 2)
    )
    code_dim = layout.code_dim
    assert not parts[:, code_dim].isfinite().any()
    others = [dim for dim in range(512) if dim != code_dim]
    finite = whole[:, others].isfinite()
    assert finite.any()
    found, want = (each[:, others][finite] for each in (parts, whole))
    torch.testing.assert_close(found, want, atol=2**-7, rtol=2**-6)


@both_ops
def test_a_token_of_nan_leaves_the_others_alone(name: str) -> None:
    case = case_of(name, 6, 40, 64).on(DEVICE)
    before = kernel(name, case)
    case.tensors[0][7], case.tensors[0][20] = math.nan, math.inf
    after = kernel(name, case)
    others = [token for token in range(40) if token not in (7, 20)]
    for left, right in zip(before, after, strict=True):
        assert torch.equal(left[others], right[others])


@both_ops
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize(
    "fixed", [{"batch_invariant": True}, {"num_splits": 1}, {"num_splits": 3}], ids=str
)
def test_a_token_has_the_same_bits_in_every_batch(name: str, heads: int, fixed: dict) -> None:
    """A token is computed alone, in a batch of 200, in another order, and in another call."""
    case = case_of(name, 9, 200, heads, **fixed)
    whole = kernel(name, case)
    assert all(map(equal, whole, kernel(name, case)))
    order = torch.randperm(200, generator=batches.generator(1)).tolist()
    shuffled = kernel(name, batches.some_tokens(case, order))
    assert all(equal(left, right[order]) for left, right in zip(shuffled, whole, strict=True))
    for token in (*range(9), 57, 128, 131, 132, 198, 199):
        alone = kernel(name, batches.some_tokens(case, slice(token, token + 1)))
        for left, right in zip(alone, whole, strict=True):
            assert equal(left[0], right[token]), token

"""Sparse MLA with an inverse RoPE of its output, on a GPU: it has the bits of the two ops in
sequence. Run these tests with ``pytest -m gpu tests``."""

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.support import attention_batches as batches, prefill_batches
from tests.support.attention_batches import DECODE, DEVICE, case_of, kernel, with_inverse_rope
from tests.support.prefill_batches import compiled_and_captured, plan_of, replayed, stale_plan

both_ops = pytest.mark.parametrize("name", [DECODE, batches.PAGED])


def sequence(name: str, case: Case) -> tuple[Tensor, Tensor]:
    """Run the op without the rotation, then ``inverse_rope_group``, both eagerly."""
    positions, table = (tensor.to(DEVICE) for tensor in case.tensors[-2:])
    out, lse = kernel(name, Case(case.name, (*case.tensors[:-2], None, None), case.settings))
    back = ops.inverse_rope_group(out, positions, table, num_groups=1).view(out.shape)
    assert not equal(back, out)
    return back, lse


def assert_fused(name: str, case: Case) -> None:
    case = with_inverse_rope(case)
    expected = sequence(name, case)
    assert all(map(equal, kernel(name, case), expected))


@both_ops
@pytest.mark.parametrize("num_splits", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("heads", [8, 12, 64, 65, 128])
@pytest.mark.parametrize("tokens", [2, 40, 300])
def test_batches(name: str, tokens: int, heads: int, num_splits: int) -> None:
    assert_fused(name, case_of(name, tokens + heads, tokens, heads, num_splits=num_splits))


@both_ops
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_batch_invariant_calls(name: str, heads: int) -> None:
    assert_fused(name, case_of(name, heads, 33, heads, batch_invariant=True))


@pytest.mark.parametrize("num_splits", [0, 1, 2])
@pytest.mark.parametrize(("tokens", "heads"), [(2, 64), (64, 128), (300, 8)])
def test_window_only(tokens: int, heads: int, num_splits: int) -> None:
    assert_fused(DECODE, batches.decode_case(tokens, tokens, heads, None, num_splits=num_splits))


@both_ops
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("tokens", [2, 40, 200])
def test_plans(name: str, tokens: int, heads: int) -> None:
    """One launch has tokens of one split and of several."""
    case = case_of(name, tokens, tokens, heads)
    for plan in (plan_of(case), stale_plan(case, 5), plan_of(case, 1), plan_of(case, 5000)):
        assert_fused(name, prefill_batches.with_plan(case, plan))


@pytest.mark.parametrize("num_splits", [0, 1, 100])
def test_one_token_of_a_million(num_splits: int) -> None:
    case = batches.paged_case(1, 1, 64, columns=4096)
    case.tensors[5].fill_(8190)
    case.tensors[6].fill_(0)
    assert_fused(batches.PAGED, batches.with_settings(case, num_splits=num_splits))


@both_ops
@pytest.mark.parametrize("num_positions", [0, 1, 16, 17])
def test_small_tables(name: str, num_positions: int) -> None:
    case = with_inverse_rope(case_of(name, 6, 20, 64), num_positions=max(num_positions, 1))
    tensors = (*case.tensors[:-1], case.tensors[-1][:num_positions])
    case = Case(case.name, tensors, case.settings)
    batches.agrees(name, case)
    if num_positions > 1:
        assert all(map(equal, kernel(name, case), sequence(name, case)))


@both_ops
def test_strides_of_positions_and_tables(name: str) -> None:
    case = with_inverse_rope(case_of(name, 7, 12, 64)).on(DEVICE)
    *rest, positions, table = case.tensors
    expected = OPS[name].op(*rest, positions, table, **case.settings)
    apart = torch.stack([positions, positions * 0 - 1], 1).flatten()[::2]
    wide = torch.cat([table, table * float("nan")], 1)[:, :64]
    for tensors in ((apart, table), (positions, wide)):
        actual = OPS[name].op(*rest, *tensors, **case.settings)
        assert all(map(equal, actual, expected))


@both_ops
def test_tables_of_other_widths_go_to_the_reference(name: str) -> None:
    case = with_inverse_rope(case_of(name, 8, 5, 8))
    tensors = (*case.tensors[:-1], case.tensors[-1][:, :32].contiguous())
    batches.agrees(name, Case(case.name, tensors, case.settings))


@both_ops
@pytest.mark.parametrize("captured_by", ["inductor", "torch.cuda.graph"])
@pytest.mark.parametrize("tokens", [4, 200])
def test_captured_steps_follow_their_positions(name: str, captured_by: str, tokens: int) -> None:
    """One compiled graph contains only our kernels. Positions change in place with the other
    inputs, and the bits are those of the eager ops."""
    case = with_inverse_rope(case_of(name, 0, tokens, 64))
    op, numbers = getattr(ops, name), case.settings
    plan = len(case.tensors) - 3

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(op(*tensors[:plan], None, *tensors[plan:], **numbers))

    def inputs(case: Case) -> list[Tensor]:
        return [tensor for place, tensor in enumerate(case.tensors) if place != plan]

    static = [tensor.to(DEVICE) for tensor in inputs(case)]
    replay, code = compiled_and_captured(step, static, captured_by)
    assert "split_keys" in code
    assert "triton_poi" not in code
    for seed in range(1, 5):
        fresh = with_inverse_rope(case_of(name, seed, tokens, 64), seed)
        results = replayed(replay, static, inputs(fresh))
        assert all(map(equal, results, sequence(name, fresh)))

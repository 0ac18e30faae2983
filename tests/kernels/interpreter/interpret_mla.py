"""Sparse MLA in Triton's interpreter over longer batches than sampled ones: prefills with several
blocks of keys of both sources; decodes with plans of these and other lengths, adversarial plans, an
inverse RoPE of the output, and keys of any scale. tests/kernels/interpreter/test_scripts.py starts
this file with TRITON_INTERPRET=1. It prints the checks that passed."""

import sys

import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS, TRITON
from dsv4_ops.dispatch import limits
from dsv4_ops.kernels.common.attention import splits as splitting
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.kernels.sparse_mla import decode
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import assert_right
from tests.kernels.interpreter.interpret_kernels import check
from tests.support import attention_batches as batches, prefill_batches
from tests.support.attention_batches import DECODE, PAGED, case_of, magnified, with_inverse_rope
from tests.support.prefill_batches import PREFILL, adversarial_plan, plan_of, stale_plan, with_plan

SMALL = {"longest": 300, "max_reqs": 2, "window": 70, "topk": 70}


def kernel(name: str, case: Case) -> tuple[Tensor, ...]:
    launch = OPS[name].implementation("kernels")
    return tuple(launch(EAGER, *case.tensors, **case.settings))


def prefills() -> None:
    for mode in prefill_batches.MODES:
        for seed, tokens, heads in ((0, 6, 8), (1, 2, 65)):
            check(PREFILL, prefill_batches.prefill_case(seed, tokens, heads, mode, **SMALL))


def chunks() -> None:
    """A token has the same bits alone and in its batch."""
    for mode in prefill_batches.MODES:
        case = prefill_batches.unsplit(prefill_batches.prefill_case(2, 4, 8, mode, **SMALL))
        whole = kernel(PREFILL, case)
        alone = batches.some_tokens(case, slice(2, 3), prefill_batches.PLACES)
        alone = kernel(PREFILL, alone)
        assert all(equal(left[0], right[2]) for left, right in zip(alone, whole, strict=True))


def plans(name: str, case: Case) -> None:
    for plan in (plan_of(case, 9), stale_plan(case, 0, 12), plan_of(case, 1)):
        check(name, with_plan(case, plan))


def adversarial(name: str, case: Case) -> None:
    """Spoiled plan rows change no bit of the other tokens."""
    tokens = case.tensors[0].shape[0]
    plan, victims = stale_plan(case, 1, 12), torch.tensor([0, 3])
    assert int((plan[:, 2] > 1).sum()) > 1
    expected = kernel(name, with_plan(case, plan))
    others = [token for token in range(tokens) if token not in victims.tolist()]
    for seed in range(2):
        spoiled = adversarial_plan(plan, victims, tokens, seed)
        actual = kernel(name, with_plan(case, spoiled))
        for left, right in zip(actual, expected, strict=True):
            assert equal(left[others], right[others])
    kernel(name, with_plan(case, adversarial_plan(plan, victims, tokens, 5, anywhere=True)))


def rotations(name: str, case: Case, thorough: bool = False) -> None:
    """The kernel rotates with the bits of a separate ``inverse_rope_group``: with one split,
    several splits, a plan, and whole and partial tiles of heads."""
    cases = [with_plan(case, stale_plan(case, 1, 12)), case_of(name, 4, 1, 65, num_splits=1)]
    if thorough:
        cases += [batches.with_settings(case, num_splits=splits) for splits in (0, 1)]
    for each in cases:
        out, expected = rotated(name, with_inverse_rope(each))
        assert not equal(out, expected)
    out, expected = rotated(name, at_zero(with_inverse_rope(case)))
    assert len(out.view(torch.int16).unique()) == 2, "zeros of both signs"


def rotated(name: str, case: Case) -> tuple[Tensor, Tensor]:
    """Check the rotation; return the output before it, and after ``inverse_rope_group``."""
    *bare, positions, table = case.tensors
    out, lse = kernel(name, Case(case.name, (*bare, None, None), case.settings))
    expected = ops.inverse_rope_group(out, positions, table, num_groups=1).view(out.shape)
    actual = kernel(name, case)
    assert equal(actual[0], expected)
    assert equal(actual[1], lse)
    return out, expected


def magnitudes(name: str, case: Case) -> None:
    """Outputs are exact multiples, because partial results are scaled to the range of float16."""
    out, lse = kernel(name, case)
    assert out.any()
    for exponent in (-90, 110):
        scaled, same = kernel(name, magnified(case, exponent))
        assert equal(scaled, out * 2.0**exponent)
        assert equal(same, lse)


def odd_units(name: str, case: Case) -> None:
    """Splits have one, three or seven half blocks: alone, and after whole blocks."""
    tokens = int(case.tensors[0].shape[0])
    many = splitting.PROGRAMS
    for splits in (20, 7, 3):
        decode.PROGRAMS = splitting.PROGRAMS = tokens * splits
        assert decode.unit_of_splits(tokens, [128, 512]) == decode.KEY_TILE // 2
        check(name, case)
    decode.PROGRAMS = splitting.PROGRAMS = many


def at_zero(case: Case) -> Case:
    """Sinks of inf make all values zero, and at position 0 all sines are zero."""
    *bare, sink, plan, positions, table = case.tensors
    tensors = (*bare, sink.new_full(sink.shape, torch.inf), plan, positions * 0, table)
    return Case(case.name, tensors, case.settings)


def gaps(name: str) -> None:
    """The kernel supports only dense rows; compressed rows with gaps are beyond its limit."""
    spec = OPS[name]
    dense, apart = prefill_batches.plain_case(name)
    for case, text in ((dense, None), (apart, "with rows that lie apart")):
        found = limits.limit(name, TRITON, spec.arguments(case.tensors, case.settings))
        assert (found and found.what) == text
    assert_right(name, dense, kernel(name, dense))


def main(thorough: bool) -> None:
    prefills()
    chunks()
    print("prefill")
    names = (DECODE, PAGED) if thorough else (DECODE,)  # after the keys, both run one kernel
    fewer = {} if thorough else {"extra": 256}  # selected rows per token
    for name in names:
        case = case_of(name, 3, 5, 8, **fewer)
        plans(name, case)
        adversarial(name, case)
        print("plans", name)
    for name in names:
        rotations(name, case_of(name, 3, 3, 8, **fewer), thorough)
        print("rotations", name)
    for name in names:
        odd_units(name, case_of(name, 3, 2, 8))
        print("units", name)
    for name in names:
        magnitudes(name, case_of(name, 3, 2, 8, **fewer))
        print("magnitudes", name)
    for name in (DECODE, PAGED, PREFILL):
        gaps(name)
        print("gaps", name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(thorough=len(sys.argv) > 1)

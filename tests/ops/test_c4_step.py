"""``insert_c4_step``, which writes all of a C4 layer before the selection, equals four ops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.c4_step import NAMES
from dsv4_ops.testing.contract.compare import equal
from dsv4_ops.testing.strategies.calls import primer, stays_determined
from tests.support.sampled import sampled

SPEC = OPS["insert_c4_step"]
CACHES = ("swa_cache", "states", "k_cache", "indexer_states", "indexer_cache")
OP_TESTING = SPEC.implementation("testing")
MODEL = OP_TESTING.settings[0]


def by_four_ops(*tensors: Tensor, **chosen: Any) -> tuple[Tensor, ...]:
    """Return the three results of the four ops, which also write the caches."""
    of = dict(zip(NAMES, tensors, strict=True))
    tokens, rotation = (of["positions"], of["req_indices"]), of["cos_sin_cache"]
    q = ops.qnorm_rope_kv_insert(
        *(of["q"], of["kv"], of["swa_cache"], of["swa_slot_mapping"], of["positions"], rotation),
        eps=chosen["eps"],
        block_size=chosen["swa_block_size"],
    )
    caches = (("", "k_cache", "v4_fp8"), ("indexer_", "indexer_cache", "v4_indexer_fp8"))
    for prefix, cache, layout in caches:
        ops.save_and_compress(
            *(of[f"{prefix}{name}"] for name in ("kv_score", "ape", "states")),
            *(of["state_block_table"], of["state_slot_mapping"], *tokens),
            *(of[f"{prefix}norm_weight"], rotation, of[cache], of["slot_mapping"]),
            overlap=True,
            layout=layout,
            **{name: chosen[name] for name in ("eps", "compress_ratio", "state_block_size")},
            block_size=chosen["block_size"],
            save_first=chosen.get("save_first", False),
        )
    query = (of["indexer_q"], of["indexer_weights"], of["positions"], rotation)
    return q, *ops.indexer_quantize_q(*query, softmax_scale=chosen["softmax_scale"])


def outcome(
    call: Callable[..., Any], case: Case, copied: Callable[[Tensor], Tensor] = torch.clone
) -> tuple[Tensor, ...]:
    """Run a call on copies; return its results and the caches."""
    return case.copy(copied).run(call, SPEC.mutated)


def assert_equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    names = ("q", "indexer_q", "indexer_weights", *CACHES)
    for name, one, other in zip(names, left, right, strict=True):
        assert one.dtype == other.dtype
        assert equal(one, other), name


def test_parameters_are_those_of_the_cases() -> None:
    assert SPEC.parameters[: len(NAMES)] == NAMES
    assert tuple(NAMES[place] for place in SPEC.mutated) == CACHES


def test_it_is_the_four_ops_one_behind_the_other() -> None:
    """The bits are equal over sampled batches, which write to each of the caches."""
    written = dict.fromkeys(CACHES, 0)

    @sampled(80)
    @given(testing.strategy("insert_c4_step"))
    def compare(case: Case) -> None:
        left = outcome(ops.insert_c4_step, case)
        assert_equal(left, outcome(by_four_ops, case))
        assert OP_TESTING.determined(case)
        for name, cache in zip(CACHES, left[3:], strict=True):
            written[name] += not equal(cache, case.tensors[NAMES.index(name)])

    compare()
    assert min(written.values()) > 3, written


def test_a_call_that_saves_a_state_where_it_reads_one_is_left_out() -> None:
    """CUDA graph tests change inputs in place, and leave this call out."""
    name = "three rows of the last window from the states"
    case = next(case for case in testing.cases_of("insert_c4_step") if case.name == name)
    assert OP_TESTING.determined(case)
    tensors = dict(zip(NAMES, case.tensors, strict=True))
    tensors["state_slot_mapping"] = torch.tensor([2])  # the slot of position 2
    assert not OP_TESTING.determined(Case(name, tuple(tensors.values()), case.settings))
    kept = primer(OP_TESTING, MODEL, keep=partial(stays_determined, SPEC))
    flipped = Case("flipped", tuple(tensor.flip(0) for tensor in kept.tensors), MODEL)
    assert all(map(OP_TESTING.determined, (kept, flipped)))


@pytest.mark.parametrize(("other", "rows"), [("k_cache", (64, 64)), ("indexer_cache", (1, 8))])
def test_one_tensor_is_not_two_caches(other: str, rows: tuple[int, int]) -> None:
    """One row of ``MainLayout`` takes as much memory as eight of ``IndexerLayout``, padded."""
    case = primer(OP_TESTING, {**MODEL, "swa_block_size": rows[0], "block_size": rows[1]})
    of = dict(zip(NAMES, case.tensors, strict=True))
    of[other] = of["swa_cache"]
    before = [tensor.clone() for tensor in of.values()]
    with pytest.raises(ValueError, match=f"^insert_c4_step: {other} must be another tensor than"):
        ops.insert_c4_step(*of.values(), **case.settings)
    assert all(map(equal, before, of.values()))


def test_the_scale_is_that_of_the_model() -> None:
    case = next(case for case in testing.cases_of("insert_c4_step") if case.name == "two windows")
    given_none = {**case.settings, "softmax_scale": None}
    *_, weights = ops.insert_c4_step(*case.copy().tensors, **given_none)
    of = dict(zip(NAMES, case.tensors, strict=True))
    names = ("indexer_q", "indexer_weights", "positions", "cos_sin_cache")
    assert torch.equal(weights, ops.indexer_quantize_q(*(of[name] for name in names)).weights)
    assert weights[0, 0] == 2.0**-7 * 128**-0.5

"""Steps with a plan for their C128 layers: which steps have one, which layers use it, and errors.
References ignore plans; tests/compile/test_compiled_plans.py and tests/gpu/test_layers.py run
kernels with the plans of layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import dsv4_ops as ops
from dsv4_ops.attention import LayerInputs, LayerSpec, StateTables, attention_layer, attention_step
from dsv4_ops.attention.metadata import BlockTables, build_decode_metadata, build_prefill_metadata
from dsv4_ops.attention.step import AttentionStep, attention_step_of_tokens, build_attention_step
from dsv4_ops.core.registry import OPS
from dsv4_ops.core.types import FlashMlaPlan, TokenMap
from tests.attention.test_layers import assert_close, each_precision, in_one_pass, layer_of, leaves
from tests.helpers import Called, i32
from tests.support import layers
from tests.support.layers import HEADS, KINDS, SPEC, Engine, SmallLayer, changed, in_chunks, poison

pytest_plugins = ("tests.support.providers_on_cpu",)

ATTENTION = ("sparse_mla_decode", "sparse_mla_decode_paged", "sparse_mla_prefill")
RAGGED = [[30, 1, 1, 2, 2], [1, 1, 1, 2, 2], [44, 1, 1, 2, 0], [7, 0, 1, 2, 2]]
"""Tokens per step: chunks, one token, none, and two tokens as in speculative decoding."""


def builders(tables: BlockTables, held: StateTables, *batch: Tensor) -> dict[str, Any]:
    """Return, by name, functions that make a step of this batch for ``plan_heads``."""
    starts, lens, slots = batch
    build = build_decode_metadata, build_prefill_metadata
    decode = build[0](SPEC.attention, starts, lens, slots, tables)
    prefill = build[1](SPEC.attention, starts, lens, slots, tables, max_chunks=4)
    tokens, rest = TokenMap(decode.req_indices, decode.positions), (slots, tables, held)
    args = (SPEC, *batch, *rest[1:])
    return {
        "build_attention_step": lambda **more: build_attention_step(*args, **more),
        "attention_step": lambda **more: attention_step(SPEC, decode, *rest, **more),
        "of prefills": lambda **more: attention_step(SPEC, prefill, *rest, **more),
        "attention_step_of_tokens": lambda **more: attention_step_of_tokens(
            SPEC, tokens, *rest, **more
        ),
    }


def made() -> dict[str, Any]:
    """Make steps: two tokens of a request of 60, one token of a request of 3, and padding."""
    table = i32([[*range(16)], [*range(16, 32)], [0] * 16])
    tables, held = BlockTables(swa=table, c4=table, c128=table), StateTables(c4=table, c128=table)
    return builders(tables, held, i32([0, 2, 3, 3]), i32([60, 3, 0]), torch.tensor([58, 59, 2, -1]))


NAMES = ("build_attention_step", "attention_step", "attention_step_of_tokens")


@pytest.mark.parametrize("name", [*NAMES, "of prefills"])
def test_a_plan_by_hand(name: str) -> None:
    """Tokens see 8, 8, 3, 0 window rows and 3, 3, 0, 0 compressed rows: 2, 2, 1, 0 blocks of 64.
    Each token has one split. From 65 heads on, a plan has half as many programs."""
    build = made()[name]
    step = build(plan_heads=4)
    assert step.swa_lens.tolist() == [8, 8, 3, 0]
    assert step.c128.lens.tolist() == [3, 3, 0, 0]
    tokens = [[token, 0, 1, 0] for token in range(4)]
    assert step.c128.plan.dtype == torch.int32
    assert step.c128.plan.tolist() == tokens + [[-1] * 4] * 132
    assert build(plan_heads=65).c128.plan.tolist() == tokens + [[-1] * 4] * 66
    assert step.c4.plan is None
    bare = build()
    assert (bare.c4.plan, bare.c128.plan) == (None, None)
    rest = [leaf for leaf in leaves(step) if leaf is not step.c128.plan]
    assert all(map(torch.equal, rest, leaves(bare)))


@pytest.mark.parametrize("name", NAMES)
def test_plan_heads_are_a_number_of_heads(name: str) -> None:
    for wrong, kind, text in (
        (-1, ValueError, "at least 0, got -1. Pass 0 or more."),
        (True, TypeError, "an int, got bool. Pass a Python int that is known on the host"),
        (None, TypeError, "an int, got NoneType. Pass a Python int"),
    ):
        with pytest.raises(kind) as caught:
            made()[name](plan_heads=wrong)
        assert str(caught.value).startswith(f"{name}: plan_heads must be {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_of_c128_go_by_the_plan_of_their_step(kind: str) -> None:
    """Other layers, and prefills, get no plan."""
    layer, inputs = layer_of(kind, SPEC)
    op = {"c128": "sparse_mla_decode_paged"}.get(kind, "sparse_mla_decode")
    for schedule, called in (("decode", op), ("prefill", "sparse_mla_prefill")):
        with changed(layer, plan_heads=HEADS, schedule=schedule), Called() as ours:
            in_chunks(layer, inputs[:2], [[5, 1], [3, 1]])
        calls = [call for call in ours.calls if call[0] in ATTENTION]
        assert [name for name, *_ in calls] == [called] * 2
        for (name, *given), tokens in zip(calls, (8, 2), strict=True):
            plan = OPS[name].arguments(*given).get("plan")
            if (kind, schedule) == ("c128", "decode"):
                assert plan is not None
                assert plan[:tokens, 0].tolist() == [*range(tokens)]
            else:
                assert plan is None


@each_precision
def test_a_plan_changes_no_result_of_the_reference(spec: LayerSpec, budget: float) -> None:
    """Ragged batches with padding give the same bits with and without a plan."""
    layer, inputs, whole = in_one_pass("c128", spec)
    bare = in_chunks(layer, inputs, RAGGED, padding=3)
    with changed(layer, plan_heads=HEADS):
        planned = in_chunks(layer, inputs, RAGGED, padding=3)
    assert all(map(torch.equal, planned, bare))
    for out, expected in zip(planned, whole, strict=True):
        assert_close(out, expected[: len(out)], budget)


def test_a_step_without_a_token() -> None:
    layer, inputs = layer_of("c128", SPEC)
    poison(layer)
    none = {name: tensor[:0] for name, tensor in inputs[0].items()}
    with changed(layer, plan_heads=HEADS):
        batch = Engine(layer).batch([0] * 4)
        assert layer.step(*batch).c128.plan.tolist() == [[-1] * 4] * 132
        assert layer.attend(none, *batch).shape == (0, 2, 2 * 512)


def a_call(layer: SmallLayer, inputs: list[dict[str, Tensor]]) -> tuple[Any, ...]:
    """Return the arguments of ``attention_layer`` after ``kind``, for 9 tokens with a plan."""
    poison(layer)
    with changed(layer, plan_heads=layers.HEADS):
        step = layer.step(*Engine(layer, 1).batch([9]))
    given = {name: tensor[:9] for name, tensor in inputs[0].items()}
    return LayerInputs(**given), layer.attention.weights, layer.attention.caches, step


def given_plan(step: AttentionStep, plan: Any) -> AttentionStep:
    return replace(step, c128=replace(step.c128, plan=plan))


def plan_for(tokens: int, heads: int = HEADS) -> Tensor:
    return ops.sparse_mla_plan(torch.full((tokens,), 9).int(), num_heads=heads)


WRONG: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "of fewer tokens": (lambda _: plan_for(8), ValueError,
     "have 141 rows for 9 tokens of 4 heads, got 140. Build each step with plan_heads=4."),
    "of three columns": (lambda plan: plan[:, :3], ValueError,
     "have shape [num_work_tiles, 4], got [141, 3]. Pass exactly 4 entries in dimension 1."),
    "of another dtype": (lambda plan: plan.long(), TypeError,
     "be torch.int32, got torch.int64. Cast it with .to(torch.int32)."),
    "of FlashMLA": (lambda plan: FlashMlaPlan(plan.flatten(), 9, HEADS, 8, 32), TypeError,
     "be a tensor, got FlashMlaPlan. Pass a torch.int32 tensor."),
}  # fmt: skip


def refused(spec: LayerSpec, layer: SmallLayer, call: tuple[Any, ...]) -> Exception:
    """Return the layer's error; its caches must not change."""
    with layers.unwritten(layer), pytest.raises((ValueError, TypeError)) as caught:
        attention_layer(spec, "c128", *call)
    return caught.value


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_of_no_such_step_is_refused_before_anything_is_written(name: str) -> None:
    change, kind, text = WRONG[name]
    layer, inputs = layer_of("c128", SPEC)
    *call, step = a_call(layer, inputs)
    error = refused(SPEC, layer, (*call, given_plan(step, change(step.c128.plan))))
    assert type(error) is kind
    assert str(error) == f"attention_layer: step.c128.plan must {text}"


def test_a_plan_with_batch_invariance_is_refused_before_anything_is_written() -> None:
    layer, inputs = layer_of("c128", SPEC)
    assert str(refused(replace(SPEC, batch_invariant=True), layer, a_call(layer, inputs))) == (
        "attention_layer: step.c128.plan must be None with batch_invariant, got a tensor. "
        "Build the step with plan_heads=0."
    )


def test_a_plan_for_flash_mla_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, flash_mla: Any
) -> None:
    """FlashMLA plans its decodes itself; a prefill ignores the plan."""
    monkeypatch.setattr(layers, "HEADS", 64)
    layer = SmallLayer("c128", SPEC)
    inputs = layers.projected(layer, layers.hidden_states()[:1])
    spec, call = replace(SPEC, impl="flash_mla"), a_call(layer, inputs)
    assert str(refused(spec, layer, call)) == (
        "attention_layer: step.c128.plan must be None for impl 'flash_mla', got a tensor. "
        "Build the step with plan_heads=0."
    )
    assert flash_mla.calls == []
    attention_layer(spec, "c128", *call, schedule="prefill")
    assert flash_mla.calls == ["prefill"]


@pytest.mark.parametrize(
    ("kind", "schedule"), [("window", "decode"), ("c4", "decode"), ("c128", "prefill")]
)
def test_what_does_not_go_by_a_plan_takes_any(kind: str, schedule: str) -> None:
    layer, inputs = layer_of(kind, replace(SPEC, batch_invariant=True))
    *call, step = a_call(layer, inputs)
    outputs = []
    for plan in (None, step.c128.plan, plan_for(3)):
        poison(layer)
        given = (*call, given_plan(step, plan))
        outputs.append(attention_layer(layer.spec, kind, *given, schedule=schedule))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("plan", [None, plan_for(9)], ids=["none", "a plan"])
def test_a_step_is_a_pytree_with_and_without_a_plan(plan: Tensor | None) -> None:
    layer, inputs = layer_of("c128", SPEC)
    step = given_plan(a_call(layer, inputs)[-1], plan)
    flat, spec = pytree.tree_flatten(step)
    assert len(flat) == 17 + (plan is not None)
    again = pytree.tree_unflatten(flat, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert isinstance(again, AttentionStep)
    assert again.c128.plan is plan
    doubled = pytree.tree_map(lambda leaf: leaf * 2, step)
    assert doubled.c128.plan is None if plan is None else torch.equal(doubled.c128.plan, plan * 2)


def test_a_step_makes_the_schedule_of_deep_gemm_once() -> None:
    """By hand: 15 tokens of 100 rows, in tables of 64 rows, have one split each, and a token
    without a request has none. One of the two SMs gets 8 splits, the other 7."""
    spec = replace(SPEC, impl="deep_gemm", schedule_sms=2)
    table = torch.zeros(16, 64 // spec.block_size("c4"), dtype=torch.int32)
    lens = torch.full((16,), 400, dtype=torch.int32)
    lens[3] = 0
    starts = torch.arange(17, dtype=torch.int32)
    args = (starts, lens, torch.arange(16), BlockTables(table, table, table))
    step = build_attention_step(spec, *args, StateTables(table, table))
    assert step.c4.schedule is not None
    assert step.c4.schedule.tolist() == [[0, 0], [9, 0], [16, 0]]
    assert step.c128.schedule is None
    assert build_attention_step(SPEC, *args, StateTables(table, table)).c4.schedule is None
    with pytest.raises(ValueError, match="LayerSpec: schedule_sms must be 0 for impl 'auto'"):
        replace(SPEC, schedule_sms=2)


@pytest.mark.parametrize("kinds", [KINDS, ("c4", "c128"), ("window",), ("c4",), ()])
def test_a_step_plans_for_the_kinds_of_the_model_alone(kinds: tuple[str, ...]) -> None:
    """The plans are FlashMLA's metadata, DeepGEMM's schedule and our own plan."""
    table = torch.arange(16, dtype=torch.int32)[None]
    args = (i32([0, 1]), i32([60]), torch.tensor([59]), BlockTables(table, table, table))
    sets = {"flash_mla": {"sm_parts": 3}, "deep_gemm": {"schedule_sms": 2}, "auto": {}}
    steps = {
        impl: build_attention_step(
            replace(SPEC, impl=impl, kinds=kinds, **sizes),
            *args,
            StateTables(table, table),
            plan_heads=4 if impl == "auto" else 0,
        )
        for impl, sizes in sets.items()
    }
    metadata = steps["flash_mla"]
    plans = {
        "window": metadata.flash_mla_plan,
        "c4": metadata.c4.flash_mla_plan,
        "c128": metadata.c128.flash_mla_plan,
    }
    assert {kind for kind, plan in plans.items() if plan is not None} == set(kinds)
    assert (steps["deep_gemm"].c4.schedule is not None) == ("c4" in kinds)
    assert (steps["auto"].c128.plan is not None) == ("c128" in kinds)


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        (["c4"], TypeError, "kinds must be a tuple, got list"),
        (("c4", "csa"), ValueError, "kinds must be 'window' or 'c4' or 'c128', got 'csa'"),
    ],
)
def test_kinds_are_those_of_layers(kinds: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^LayerSpec: {message}"):
        replace(SPEC, kinds=kinds)

"""Which implementation runs the ops of a layer that take ``impl=``."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dsv4_ops.attention import LayerSpec
from dsv4_ops.attention.impl import prefill_impl
from dsv4_ops.dispatch import choice, limits
from tests.support import layers
from tests.support.layers import LENGTH, SPEC, Engine, SmallLayer, hidden_states, poison, projected

pytest_plugins = ("tests.support.providers_on_cpu",)


def refused(spec: LayerSpec, base: LayerSpec) -> Exception:
    """Return the error of ``spec`` in a layer made for ``base``, whose caches must not change."""
    layer = SmallLayer("c4", base)
    (inputs,) = projected(layer, hidden_states()[:1])
    layer.spec = spec
    with layers.unwritten(layer), pytest.raises((RuntimeError, NotImplementedError)) as caught:
        layer.attend(inputs, *Engine(layer, 1).batch([LENGTH]))
    return caught.value


@pytest.mark.parametrize("impl", ["triton", "flash_mla", "deep_gemm"])
def test_what_runs_on_gpus_only_is_refused_before_anything_is_written(impl: str) -> None:
    error = refused(replace(SPEC, impl=impl), SPEC)
    assert type(error) is RuntimeError
    assert str(error) == (
        f"attention_layer: impl must be 'auto' or 'reference' on cpu, got {impl!r}. "
        "Move the tensors to a CUDA device."
    )


@pytest.mark.parametrize(
    ("base", "changes", "what"),
    [
        (SPEC, {"index_topk": 4097}, ("topk 4097", "select up to 4096")),
        (replace(SPEC, indexer_layout="plain"), {}, ("layout 'plain'", "read 'v4_indexer_fp8'")),
    ],
    ids=["topk", "layout"],
)
def test_what_our_selection_does_not_take_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, base: LayerSpec, changes: dict[str, int], what: tuple[str, str]
) -> None:
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    spec = replace(base, attention=replace(base.attention, **changes), impl="triton")
    error = refused(spec, base)
    assert type(error) is NotImplementedError
    assert str(error) == (
        "attention_layer: impl must be 'auto', 'deep_gemm' or 'reference' with "
        f"{what[0]}, got 'triton'. Our kernels {what[1]}."
    )


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("sm_parts", [0, 3])
@pytest.mark.parametrize("kind", ["window", "c4", "c128"])
def test_flash_mla_runs_both_schedules(
    monkeypatch: pytest.MonkeyPatch, flash_mla: Any, kind: str, sm_parts: int
) -> None:
    """If the step has metadata (``sm_parts``), FlashMLA makes no plan itself."""
    monkeypatch.setattr(layers, "HEADS", 64)
    layer = SmallLayer(kind, SPEC)
    inputs, outputs = projected(layer, hidden_states()[:1]), {}
    for impl in ("reference", "flash_mla"):
        for layer.schedule in ("decode", "prefill"):
            layer.spec = replace(SPEC, impl=impl, sm_parts=sm_parts if impl == "flash_mla" else 0)
            poison(layer)
            (outputs[impl, layer.schedule],) = layers.in_chunks(layer, inputs, [[LENGTH]])
    assert flash_mla.calls == ["decode", "prefill"]
    assert len(flash_mla.plans) == (0 if sm_parts else 1)
    for schedule in ("decode", "prefill"):
        expected = outputs["reference", schedule]
        torch.testing.assert_close(outputs["flash_mla", schedule], expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", ["window", "c4", "c128"])
def test_metadata_of_other_parts_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, flash_mla: Any, kind: str
) -> None:
    monkeypatch.setattr(layers, "HEADS", 64)
    layer = SmallLayer(kind, replace(SPEC, impl="flash_mla", sm_parts=3))
    (inputs,) = projected(layer, hidden_states()[:1])
    batch = Engine(layer, 1).batch([LENGTH])
    step = layer.step(*batch)
    monkeypatch.setattr(layer, "step", lambda *given: step)
    layer.spec = replace(layer.spec, sm_parts=4)
    name = "step.flash_mla_plan" if kind == "window" else f"step.{kind}.flash_mla_plan"
    rows = LENGTH + 1
    with layers.unwritten(layer), pytest.raises(ValueError, match="must have") as caught:
        layer.attend(inputs, *batch)
    assert str(caught.value) == (
        f"attention_layer: {name} must have {rows + 4} rows for {LENGTH} tokens, got {rows + 3}. "
        "Build each step with the layer's own LayerSpec."
    )
    assert flash_mla.calls == []


def test_plans_and_metadata_do_not_mix(monkeypatch: pytest.MonkeyPatch, flash_mla: Any) -> None:
    monkeypatch.setattr(layers, "HEADS", 64)
    layer = SmallLayer("c128", replace(SPEC, impl="flash_mla", sm_parts=3))
    (inputs,) = projected(layer, hidden_states()[:1])
    batch = Engine(layer, 1).batch([LENGTH])
    step = layer.step(*batch)
    monkeypatch.setattr(layer, "plan_heads", 64)
    with pytest.raises(ValueError, match="plan_heads must be 0 with sm_parts, got 64"):
        layer.step(*batch)
    monkeypatch.setattr(layer, "step", lambda *given: step)
    layer.spec = replace(layer.spec, sm_parts=0)
    with pytest.raises(ValueError, match="flash_mla_plan must be None without sm_parts"):
        layer.attend(inputs, *batch)
    assert flash_mla.calls == []


def test_only_flash_mla_goes_by_its_metadata() -> None:
    with pytest.raises(ValueError, match="LayerSpec: sm_parts must be 0 for impl 'auto', got 3"):
        replace(SPEC, sm_parts=3)


def test_a_prefill_of_no_workspace_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, flash_mla: Any
) -> None:
    monkeypatch.setattr(layers, "HEADS", 64)
    monkeypatch.setattr(limits, "MOST_GATHERED", 100)
    monkeypatch.setattr(SmallLayer, "schedule", "prefill")
    error = refused(replace(SPEC, impl="flash_mla"), SPEC)
    assert type(error) is NotImplementedError
    assert "FlashMLA takes up to 100 rows of all requests." in str(error)
    assert flash_mla.calls == []


def test_what_does_not_depend_on_the_batch_is_no_choice_of_auto() -> None:
    """On a GPU, "auto" chooses by the batch size, so batch-invariant V4 layers run "triton"."""
    q = torch.empty(600, 64, 512, device="meta")
    invariant = replace(SPEC, batch_invariant=True)
    assert prefill_impl(invariant, q) == "auto"
    cuda = SimpleNamespace(device=torch.device("cuda"))
    for name in ("auto", "deep_gemm"):  # DeepGEMM runs no attention
        assert prefill_impl(replace(invariant, impl=name), cast(Any, cuda)) == "triton"
    for spec in (SPEC, replace(invariant, layout="plain")):
        assert prefill_impl(spec, cast(Any, cuda)) == "auto"
    for name in ("triton", "reference"):
        assert prefill_impl(replace(invariant, impl=name), cast(Any, cuda)) == name


def test_specs_of_layers_that_flash_mla_does_not_take_are_refused() -> None:
    for name, value, other in (("layout", "plain", "v4_fp8"), ("batch_invariant", True, False)):
        with pytest.raises(NotImplementedError) as caught:
            LayerSpec(impl="flash_mla", **{name: value})
        assert str(caught.value) == (
            f"LayerSpec: {name} must be {other!r} for impl 'flash_mla', got {value!r}. "
            "FlashMLA runs nothing else."
        )

"""The registry refuses an incomplete op, and knows every public function."""

import dataclasses
import inspect
import types

import pytest

import dsv4_ops
from dsv4_ops.core import registry
from dsv4_ops.core.registry import OPS, OpSpec
from dsv4_ops.dispatch.define import register
from dsv4_ops.testing.case import OpTesting
from dsv4_ops.testing.contract.audit import audit

HOST_FUNCTIONS = {  # and functions around collectives of torch
    "cp_combine", "cp_gather_heads", "cp_gather_rows", "max_context_chunks",
    "max_prefill_chunks", "mla_workspace_rows", "plan_context_chunks", "plan_prefill_chunks",
    "rope_cos_sin_cache", "split_kv_b_proj",
}  # fmt: skip
SPEC = OPS["prefill_gather_lens"]


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_complete(name):
    assert audit(OPS[name]) == []


def test_public_functions_and_ops_are_the_same_set():
    public = {name for name in dsv4_ops.__all__ if inspect.isfunction(getattr(dsv4_ops, name))}
    assert public - HOST_FUNCTIONS == set(OPS)


def broken(monkeypatch, layer: str, held) -> list[str]:
    """Return the audit of a copy of SPEC with ``held`` in ``layer``."""
    layers = ("ops", "lowering", "testing")
    found = {name: SPEC.implementation(name) for name in layers} | {layer: held}
    monkeypatch.setattr(OpSpec, "implementation", lambda self, name: found[name])
    return audit(SPEC)


def test_audit_reports_a_missing_implementation(monkeypatch):
    def missing(self, layer):
        raise AttributeError("module has no attribute")

    monkeypatch.setattr(OpSpec, "implementation", missing)
    problems = audit(SPEC)
    for layer in ("ops", "lowering", "testing"):
        assert any(problem.startswith(f"no {layer} implementation") for problem in problems)


def test_audit_reports_other_parameter_names(monkeypatch):
    def renamed(query_start_loc, seq_lens, *, window):
        """Wrong."""

    wrong = types.SimpleNamespace(kind="decompose", function=renamed)
    problems = broken(monkeypatch, "lowering", wrong)
    assert any(problem.startswith("parameters of lowering are") for problem in problems)
    assert audit(dataclasses.replace(SPEC, meta=renamed))[0].startswith("parameters of meta are")
    (problem, *_) = audit(dataclasses.replace(SPEC, reference=renamed))
    assert problem.startswith("parameters of reference are")


def test_audit_reports_a_missing_docstring_section(monkeypatch):
    def prefill_gather_lens(query_start_loc, seq_lens, *, window_size):
        """Says nothing."""

    problems = broken(monkeypatch, "ops", prefill_gather_lens)
    assert "docstring has no 'Returns:'" in problems
    assert "docstring has no 'Source:'" in problems


def test_audit_reports_missing_cases_strategy_and_kind(monkeypatch):
    empty = OpTesting(cases=list, settings=(), make=None)
    problems = broken(monkeypatch, "testing", empty)
    assert "no case with a hand-computed result" in problems
    assert "no hypothesis strategy" in problems
    only_cpu = dataclasses.replace(SPEC, lowering={"cpu": "decompose"})
    assert "no lowering kind for cuda" in audit(only_cpu)


def test_define_op_refuses_a_second_op_of_that_name():
    with pytest.raises(ValueError, match=r"define_op: name must be new, got 'prefill_gather_lens'"):
        register(SPEC)


def test_define_op_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match=r"^define_op: lowering kind must be one of"):
        dataclasses.replace(SPEC, lowering={"cpu": "magic"})


def test_op_without_schema_or_fake_cannot_be_defined():
    given = (each for each in dataclasses.fields(OpSpec) if each.init)
    fields = {each.name for each in given if each.default is dataclasses.MISSING}
    assert {"schema", "meta", "reference", "stem"} <= fields
    assert registry.NAMESPACE == "dsv4_ops"

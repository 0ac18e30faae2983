"""``tests/support/once.py`` saves torch's repeated work, and changes nothing else."""

import pytest
import torch
from torch._dynamo import config
from torch._inductor import dtype_propagation, lowering, utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import tests.support.once


def test_fake_tensors_of_the_cache_are_those_that_dispatch_makes():
    """Torch compares each tensor: views, writes, promoted types, with symbolic sizes."""
    with config.patch(fake_tensor_cache_crosscheck_enabled=True):
        mode = FakeTensorMode(shape_env=ShapeEnv())
    FakeTensorMode.cache_clear()
    for rows, columns in ((3, 4), (5, 6)):
        values = mode.from_tensor(torch.zeros(rows, columns), static_shapes=False)
        counts = mode.from_tensor(torch.zeros(columns, dtype=torch.int32), static_shapes=False)
        with mode:
            for _ in range(3):
                tail = (values + counts).t()[1:]
                tail.add_(1)
                torch.where(tail > 0, tail, -tail).to(torch.bfloat16).sum(-1)
    assert FakeTensorMode.cache_info().hits > 20


def test_outputs_are_compared_until_one_has_the_keys(monkeypatch):
    """A tensor that torch cannot cache does not count as seen, so each size is compared."""
    mode = FakeTensorMode()
    FakeTensorMode.cache_clear()
    real = torch.zeros(())  # other keys than a fake tensor
    monkeypatch.setattr(FakeTensorMode, "_output_from_cache_entry", lambda *call: real)
    monkeypatch.setattr(tests.support.once, "_seen", set())
    for size in (3, 5):
        values = mode.from_tensor(torch.zeros(size))
        with mode:
            assert (values + values).shape == (size,)
    assert FakeTensorMode.cache_info().bypasses["dispatch_key_set mismatch"] == 2


def test_a_new_rule_of_dtypes_is_in_the_table(monkeypatch):
    handler = dtype_propagation.DtypePropagationOpsHandler
    assert lowering.lowerings
    rule = next(iter(utils.op_dtype_propagation_rules.values()))
    handler()
    monkeypatch.setitem(utils.op_dtype_propagation_rules, "of_this_test", rule)
    assert callable(handler().of_this_test)
    del handler().of_this_test


def test_the_table_is_made_once(monkeypatch):
    handler = dtype_propagation.DtypePropagationOpsHandler
    made = handler()
    monkeypatch.setattr(tests.support.once, "_make_rules", pytest.fail)
    assert handler() is made


def test_shapes_of_a_traced_graph_are_kept_but_not_those_of_a_node_that_a_pass_made():
    """A run on fake tensors finds the same shapes."""

    def call(values):
        return (values.t() + 1).contiguous().view(-1)[1:].to(torch.float16)

    graph = make_fx(call, tracing_mode="symbolic")(torch.zeros(3, 4))
    nodes = list(graph.graph.nodes)
    given, mode = nodes[0].meta["val"], nodes[0].meta["val"].fake_mode
    sizes = [(each.shape, each.stride(), each.dtype) for each in _values(nodes)]
    del nodes[-2].meta["val"]
    for kind in (tests.support.once._Known, FakeTensorProp):
        before = _values(nodes[:-2])
        kind(graph, mode=mode).propagate_dont_convert_inputs(given)
        after = _values(nodes)
        assert [(each.shape, each.stride(), each.dtype) for each in after] == sizes
        kept = [one is other for one, other in zip(before, after, strict=False)]
        assert any(kept) == (kind is tests.support.once._Known)


def _values(nodes):
    found = [node.meta.get("val") for node in nodes if node.op == "call_function"]
    return [value for value in found if isinstance(value, torch.Tensor)]

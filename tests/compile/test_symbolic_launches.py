"""What graphs of CUDA hold of an op with a kernel: its launches, or under ``run_time_launches`` a
call of the op where sizes are symbols. Traced over fake tensors, which need no GPU."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import dsv4_ops as ops
from dsv4_ops.dispatch.run_time_launches import run_time_launches
from dsv4_ops.lowering import external

LAUNCH = "triton_kernel_wrapper"


def insert(k, cache, slots):
    ops.insert_k_cache(k, cache, slots)
    return ()


CALLS = {
    "indexer_topk": (
        lambda logits, lens: (ops.indexer_topk(logits, lens, topk=64),),
        lambda tokens: [((tokens, 4096), torch.float32), ((tokens,), torch.int32)],
    ),
    "grouped_topk": (
        lambda scores, bias: ops.grouped_topk(
            scores, bias, top_k=8, num_groups=8, kept_groups=4, scale=2.5, normalize=True
        ),
        lambda tokens: [((tokens, 256), torch.float32), ((256,), torch.float32)],
    ),
    "insert_k_cache": (
        insert,
        lambda tokens: [
            ((tokens, 512), torch.bfloat16),
            ((16, 64, 512), torch.bfloat16),
            ((tokens,), torch.int64),
        ],
    ),
}


def targets(name, *, symbolic):
    """What the nodes of the graph of a call of 8 tokens on CUDA call."""
    function, arguments = CALLS[name]
    shapes = ShapeEnv()
    tokens = 8
    if symbolic:
        symbol = shapes.create_symbol(8, ConstantSource("tokens"), DimDynamic.DYNAMIC)
        tokens = shapes.create_symintnode(symbol, hint=8)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    with FakeTensorMode(shape_env=shapes), torch.no_grad():
        made = [
            torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in arguments(tokens)
        ]
        graph, _ = aot_export_module(Call(), made, trace_joint=False)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", CALLS)
def test_known_sizes_have_their_launches_in_the_graph(name):
    with run_time_launches():
        called = targets(name, symbolic=False)
    assert any(LAUNCH in target for target in called)
    assert not any(name in target for target in called)


@pytest.mark.parametrize("name", CALLS)
def test_symbols_leave_the_launch_to_the_call(name):
    with run_time_launches():
        called = targets(name, symbolic=True)
    assert not any(LAUNCH in target for target in called)
    assert any(name in target or "auto_functionalized" in target for target in called)


@pytest.mark.parametrize("name", CALLS)
def test_packages_keep_launches_for_every_size(name, monkeypatch):
    monkeypatch.setattr(external, "packaging", lambda: True)
    with run_time_launches():
        assert any(LAUNCH in target for target in targets(name, symbolic=True))


@pytest.mark.parametrize("name", CALLS)
def test_other_graphs_hold_launches_for_every_size(name):
    assert any(LAUNCH in target for target in targets(name, symbolic=True))

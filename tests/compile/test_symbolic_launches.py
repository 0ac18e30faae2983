"""CUDA graphs contain an op's kernel launches or, under ``run_time_launches`` with symbolic sizes,
a call of the op. The graphs are traced over fake tensors, which need no GPU."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import dsv4_ops as ops
from dsv4_ops.dispatch.run_time_launches import run_time_launches
from dsv4_ops.lowering import external
from tests.support.hopper import hopper  # noqa: F401  # a fixture

LAUNCH = "triton_kernel_wrapper"


def insert(k, cache, slots):
    ops.insert_k_cache(k, cache, slots)
    return ()


ROUTER = {"top_k": 8, "num_groups": 8, "kept_groups": 4, "scale": 2.5, "normalize": True}
BF16, F32 = torch.bfloat16, torch.float32
PAGES = {"block_size": 64, "compress_ratio": 1}
# a call for N tokens, and its tensors
CALLS = {
    "indexer_topk": (lambda logits, lens: (ops.indexer_topk(logits, lens, topk=64),),
     lambda n: [((n, 4096), F32), ((n,), torch.int32)]),
    "indexer_select": (lambda *tensors: (ops.indexer_select(*tensors, **PAGES, topk=2048),),
     lambda n: [((n, 64, 128), torch.float8_e4m3fn), ((n, 64), F32), ((9, 8640), torch.uint8),
     ((n,), torch.int64), ((n,), torch.int32), ((2, 500), torch.int32)]),
    "grouped_topk": (lambda scores, bias: ops.grouped_topk(scores, bias, **ROUTER),
     lambda n: [((n, 256), F32), ((256,), F32)]),
    "fp8_linear": (lambda *tensors: (ops.fp8_linear(*tensors, activations="bf16"),),
     lambda n: [((n, 256), BF16), ((256, 256), torch.float8_e4m3fn), ((2, 2), F32)]),
    "insert_k_cache": (insert,
     lambda n: [((n, 512), BF16), ((16, 64, 512), BF16), ((n,), torch.int64)]),
}  # fmt: skip


def targets(name, *, symbolic):
    """Return the functions that the graph of a call calls, for 8 tokens on CUDA."""
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
        made = [torch.empty(size, dtype=of, device="cuda") for size, of in arguments(tokens)]
        graph, _ = aot_export_module(Call(), made, trace_joint=False)
    assert not shapes.guards
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("run_time", "packaged", "symbolic", "launched"),
    [(True, False, False, True), (True, False, True, False), (True, True, True, True),
     (False, False, True, True)],
    ids=["known sizes", "symbols", "packages", "other graphs"],
)  # fmt: skip
def test_what_graphs_hold(name, run_time, packaged, symbolic, launched, monkeypatch):
    """Graphs contain launches, except for symbolic sizes under ``run_time_launches``."""
    monkeypatch.setattr(external, "packaging", lambda: packaged)
    with run_time_launches() if run_time else nullcontext():
        called = targets(name, symbolic=symbolic)
    assert any(LAUNCH in target for target in called) == launched
    op = any(name in target or "auto_functionalized" in target for target in called)
    assert op == (not launched)

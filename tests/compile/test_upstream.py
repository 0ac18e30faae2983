"""Bugs of torch that our rules avoid. If a test fails, the bug is fixed, and the rule can go."""

import pytest
import torch

_library = torch.library.Library("dsv4_ops_tests", "DEF")
_library.define("fill_row(Tensor(a!) cache, Tensor rows, float value) -> ()")


def _fill_row(cache, rows, value):
    cache[rows] = value


_library.impl("fill_row", _fill_row, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dsv4_ops_tests::fill_row", lambda cache, rows, value: None, lib=_library
)
fill_row = torch.ops.dsv4_ops_tests.fill_row.default


@pytest.mark.slow
def test_mutating_op_on_a_layer_of_a_graph_input_writes_layer_0():
    """With symbolic sizes, `op(cache[layer])` on a graph input writes to layer 0. So caches are
    registered buffers, or one tensor per layer (test_compiled_cache.py)."""
    torch._dynamo.reset()
    caches, rows = torch.zeros(3, 8, 6), torch.tensor([2, 5])
    compiled = torch.compile(
        lambda caches, rows: fill_row(caches[1], rows, 1.0), fullgraph=True, dynamic=True
    )
    compiled(caches, rows)
    written = [layer for layer in range(3) if caches[layer].any()]
    assert written == [0], "fixed upstream: allow cache[layer] of graph inputs"

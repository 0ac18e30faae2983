"""A group of one rank costs nothing: the graph of a step is that of a model without ranks."""

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import SPARSE, small_mla_model, small_model
from tests.helpers import i32


@pytest.mark.parametrize(
    ("made", "settings"),
    [(small_mla_model, {"num_hidden_layers": 1}), (small_model, {"layer_types": [SPARSE]})],
    ids=["v3", "v4"],
)
def test_the_graph_is_that_of_no_ranks(made, settings):
    graphs, caches = [], []

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    for parallel in (None, ContextParallel(group="none", world_size=1)):
        model = v4.patch(made(**settings), kv="fp32", precision="reference", parallel=parallel)
        cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=64)
        batch = v4.StepBatch(torch.tensor([1, 2]), i32([0, 2]), i32([2]), i32([0]))
        torch._dynamo.reset()
        torch.compile(v4.decode_step, backend=keep, fullgraph=True)(model, batch, cache.tensors)
        caches.append(repr(cache))
    assert graphs[0] == graphs[1]
    assert caches[0] == caches[1]
    assert "c10d" not in graphs[0]
    assert "dsv4_ops.cp_" not in graphs[0]

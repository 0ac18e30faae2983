"""A patched step, partitioned into engines and PyTorch segments, equals PyTorch's step."""

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch_tensorrt
from torch import Tensor

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.tensorrt import enable, register_plugins
from dsv4_ops.integrations.transformers.steps.export import (
    DecodeModule,
    PrefillModule,
    decode_inputs,
    padding_batch,
    prefill_shapes,
)
from dsv4_ops.testing import models
from dsv4_ops.testing.models import HEAVY, SLIDING, SPARSE, small_mla_model, small_model
from tests.helpers import EVERY

EXAMPLE = Path(__file__).parents[3] / "examples" / "10_tensorrt.py"
REQUESTS, TOKENS = 2, 4
FIRST_WRITTEN = 8
"""Earlier inputs of a step are read only."""

DS_FP8 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""Sizes of rows of 656 bytes."""


ROPE = "dsv4_ops.apply_rope.default"

OTHERS = pytest.mark.skipif(
    not EVERY, reason="in make lanes: a layer with compressed rows has a window and an indexer too"
)


def cache_for(model):
    return v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=512)


def batches(cache, count):
    """Make ragged steps of two requests whose contexts pass the compressors' boundaries."""
    generator = torch.Generator().manual_seed(1)
    rows = [cache.add(name, num_tokens=300) for name in range(REQUESTS)]
    lens = torch.zeros(REQUESTS, dtype=torch.int32)
    for step in range(count):
        counts = torch.tensor([3, 1] if step % 2 == 0 else [1, 2], dtype=torch.int32)
        lens = lens + counts
        yield v4.StepBatch(
            torch.randint(0, 256, (TOKENS,), generator=generator),
            torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32),
            lens,
            torch.tensor(rows, dtype=torch.int32),
        )


def segments(function):
    """Return the graphs of engines and of PyTorch segments, by name."""
    found = dict(function.named_children())
    engines = {name: graph for name, graph in found.items() if "_run_on_acc" in name}
    return engines, {name: graph for name, graph in found.items() if name not in engines}


def values(graph):
    """Return the tensors that enter and leave a segment."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found = [node.meta.get("val") for node in (*placeholders, *output.all_input_nodes)]
    return [each for each in found if isinstance(each, Tensor)]


@pytest.mark.parametrize(
    ("layers", "engines"),
    [
        pytest.param((SLIDING,), 4, marks=OTHERS),
        ((SPARSE,), 4),
        pytest.param((HEAVY,), 4, marks=OTHERS),
        pytest.param((SPARSE, HEAVY), 6, marks=OTHERS),
        pytest.param(models.LAYER_TYPES, 8, marks=OTHERS),
    ],
)
def test_a_decode_step_writes_the_callers_caches(layers, engines):
    model = v4.patch(small_model(layer_types=list(layers)), kv="fp8")
    kinds, cache = assert_equal_steps(model, engines)
    assert kinds["dsv4_ops_tensorrt.copy_back.default"] == 3  # of dropped, seq_lens and written
    assert all(layer.swa.any() for layer in cache.tensors.layers)


def test_a_decode_step_of_deepseek_v3_does_so_too():
    """The layer is dense, with rows of 656 bytes; in the engine, the plugin rotates the queries."""
    register_plugins(capability=(9, 0))
    model = v4.patch(small_mla_model(num_hidden_layers=1, **DS_FP8), kv="ds_fp8")
    kinds, cache = assert_equal_steps(model, 4, {ROPE: 1})
    assert kinds["dsv4_ops.mla_decode.default"] == 1
    assert cache.tensors.layers[0].kv.any()


@torch.no_grad()
def assert_equal_steps(model, engines, plugins=()):
    """Assert that a partitioned step equals PyTorch's after the same decompositions, bytes of FP8
    caches included, and that its logits are near the model's own.

    Returns:
        Ops of this package in the PyTorch segments, with counts, and the cache that was written.
    """
    enable()
    ours, plain, stock = (cache_for(model) for _ in range(3))
    inputs = decode_inputs(padding_batch(ours, REQUESTS, TOKENS), ours)
    program = torch.export.export(DecodeModule(model, ours), inputs, strict=False)
    table = torch_tensorrt.dynamo.lowering.get_decompositions()
    decomposed = program.run_decompositions(table).module()
    step = torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, dryrun=True, min_block_size=1)
    in_engines, in_torch = segments(step)
    assert (len(in_engines), len(in_torch)) == (engines, engines)
    assert ours_in(in_engines) == Counter(plugins)
    crossing = {each.dtype for graph in in_engines.values() for each in values(graph)}
    assert crossing <= {torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16}
    kinds = ours_in(in_torch)
    assert not [name for name in kinds if "auto_functionalized" in name]

    steps = zip(*(batches(cache, 4) for cache in (ours, plain, stock)), strict=True)
    for batch, same, again in steps:
        found, wanted = step(*decode_inputs(batch, ours)), decomposed(*decode_inputs(same, plain))
        assert torch.equal(found, wanted)
        written = zip(decode_inputs(batch, ours), decode_inputs(same, plain), strict=True)
        for left, right in list(written)[FIRST_WRITTEN:]:
            assert torch.equal(left, right)
        # decompositions round differently, and FP8 enlarges the difference
        assert (found - v4.decode_step(model, again, stock)).abs().max() < 0.05
    return kinds, ours


@pytest.mark.parametrize("family", ["v3", pytest.param("v4", marks=OTHERS)])
@torch.no_grad()
def test_prefill_takes_any_number_of_tokens(family):
    """The number of tokens is dynamic; int64 slots and positions pass unchanged."""
    enable()
    one = {"v3": small_mla_model(num_hidden_layers=1), "v4": small_model(layer_types=[SLIDING])}
    model = v4.patch(one[family], kv="bf16")
    ours, plain = cache_for(model), cache_for(model)
    inputs = decode_inputs(padding_batch(ours, REQUESTS, 5), ours)
    program = torch.export.export(
        PrefillModule(model, ours), inputs, dynamic_shapes=prefill_shapes(inputs, 32), strict=False
    )
    table = torch_tensorrt.dynamo.lowering.get_decompositions()
    decomposed = program.run_decompositions(table).module()
    step = torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, dryrun=True, min_block_size=1)
    rows = [[cache.add(name, num_tokens=64) for name in range(2)] for cache in (ours, plain)]
    for counts in ((7, 2), (3, 12)):
        tokens = torch.arange(sum(counts)) + 5
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        lens = torch.tensor(counts, dtype=torch.int32)
        batch = [
            v4.StepBatch(tokens, starts, lens, torch.tensor(each, dtype=torch.int32))
            for each in rows
        ]
        found = step(*decode_inputs(batch[0], ours))
        assert torch.equal(found, decomposed(*decode_inputs(batch[1], plain)))
        layers = (each.tensors.layers[0] for each in (ours, plain))
        kept = [each.kv if family == "v3" else each.swa for each in layers]
        assert torch.equal(*kept)
    assert kept[0].any()


@pytest.mark.skipif(not EVERY, reason="in make lanes: the steps above are compiled the same way")
@torch.no_grad()
def test_the_example_compares_what_it_compiled():
    enable()
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    model = v4.patch(small_model(), kv="fp32", precision="reference")
    cache = cache_for(model)
    step = example["compile_step"](model, cache, dryrun=True, min_block_size=1)
    assert example["compare"](model, step, cache, 6) < 1e-4


def ours_in(graphs):
    """Count this package's ops, and what writes have become."""
    targets = (str(node.target) for graph in graphs.values() for node in graph.graph.nodes)
    return Counter(name for name in targets if "dsv4_ops" in name or "auto_func" in name)

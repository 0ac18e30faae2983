"""Steps that vLLM recorded, run without vLLM over one pool, whose bytes all groups share."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DeepseekV3ForCausalLM, DeepseekV4ForCausalLM

from dsv4_ops.attention import AttentionStep
from dsv4_ops.integrations import transformers as hf
from dsv4_ops.integrations.vllm.steps import EngineSteps, GroupTensors, V4Family, cache_name
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.models import small_mla_model, small_model
from tests.helpers import i32, nightly
from tests.vllm.checkpoints import write_drafting_v3
from tests.vllm.record import RECORDED, SIZES

LONGEST = 512
EARLIER = 0x3B
"""The value of all bytes of a block before its first use."""
OLD_VALUE = torch.full((4,), EARLIER, dtype=torch.uint8).view(torch.float32)


class Recorded(NamedTuple):
    """The inputs that vLLM passed in a few steps.

    Attributes:
        model: A patched model.
        steps, num_blocks: As ``tests.vllm.record`` wrote them.
        alone: By request, the logits of all its tokens in a step of its own.
    """

    model: Any
    steps: list[dict[str, Any]]
    num_blocks: int
    alone: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def v4():
    return read("v4", hf.patch(small_model(), kv="fp32"))


@pytest.fixture(scope="module")
def v3():
    return read("v3", hf.patch(small_mla_model(), kv="fp32"))


@pytest.fixture(params=["v4", "v3"])
def recorded(request):
    return request.getfixturevalue(request.param)


def read(name, model):
    recording = json.loads((RECORDED / f"{name}.json").read_text())
    texts = {}
    for step in recording["steps"]:
        for name, first, (start, stop) in spans_of(step):
            before = texts.get(name) or texts.get(step["requests"][0], [])  # the shared prefix
            texts[name] = before[:first] + step["tokens"][start:stop]
    assert len(texts) == len(SIZES)
    with torch.no_grad():
        alone = {name: logits_of(model, text) for name, text in texts.items()}
    return Recorded(model, **recording, alone=alone)


def spans_of(step):
    """Yield name, first position and range of tokens of each request in a step."""
    ranges = pairwise(step["query_start_loc"])
    for name, end, (start, stop) in zip(step["requests"], step["seq_lens"], ranges, strict=True):
        yield name, end - (stop - start), (start, stop)


def logits_of(model, text):
    size = len(text)
    cache = hf.PagedCache.for_model(model, max_batch_size=1, max_cache_len=size, max_chunk=size)
    return model(torch.tensor([text]), cache=cache).logits[0]


def pool_of(steps, recorded):
    """Make caches as vLLM does: a block of the pool has the bytes of a block of any group."""
    num_blocks, offsets = recorded.num_blocks, {}
    layouts = {
        cache_name(layer, field): cache.layout
        for layer, kind in enumerate((*steps.spec.kinds, steps.spec.kinds[0]))  # and a draft layer
        for field, cache in steps.family.caches(kind).items()
    }
    sizes = []
    for group in recorded.steps[0]["groups"]:
        size = 0
        for name in group["caches"]:
            offsets[name], size = size, size + layouts[name].page_bytes
        sizes.append(size)
    pool = torch.full((num_blocks * max(sizes),), EARLIER, dtype=torch.uint8)

    def cache(layer, field):
        name = cache_name(layer, field)
        typed = pool.view(layouts[name].storage_dtype)
        shape = layouts[name].shape(num_blocks)
        strides = torch.empty(shape, device="meta").stride()
        block = max(sizes) // typed.itemsize
        return typed.as_strided(shape, (block, *strides[1:]), offsets[name] // typed.itemsize)

    return cache


def two_layers(recorded, model, kind):
    """Use the recorded layers of one kind for both layers of a model, side by side in each block.
    The first layer's windows are in the groups of the second recorded layer, and the reverse."""
    number = recorded.model.dsv4_ops_spec.kinds.index(kind)
    steps = []
    for step in recorded.steps:
        groups = []
        for group in step["groups"]:
            fields = {name.split(".")[2] for name in group["caches"] if f".{number}." in name}
            names = [cache_name(layer, field) for field in sorted(fields) for layer in (0, 1)]
            if fields == {"swa"}:
                names = names[1:]
            elif not fields and "layers.0.swa" in group["caches"]:
                names = [cache_name(0, "swa")]
            if names:
                groups.append({**group, "caches": names})
        steps.append({**step, "groups": groups})
    return recorded._replace(model=hf.patch(model, kv="fp32"), steps=steps)


def two_v4(recorded):
    changed = {"layer_types": ["compressed_sparse_attention"] * 2, "mlp_layer_types": ["moe"] * 2}
    return two_layers(recorded, small_model(num_hidden_layers=2, **changed), "c4")


def two_v3(recorded):
    small = small_mla_model(num_hidden_layers=2, first_k_dense_replace=0)
    return two_layers(recorded, small, "mla")


@torch.inference_mode(False)  # as vLLM's buffers are
def tensors_of(step):
    """Return the metadata of a step, by name of cache."""
    names = ("query_start_loc", "seq_lens")
    starts, lens = (torch.tensor(step[name], dtype=torch.int32) for name in names)
    metadata = {}
    for group in step["groups"]:
        width = max(map(len, group["block_table"]))
        rows = [blocks + [0] * (width - len(blocks)) for blocks in group["block_table"]]
        table = torch.tensor(rows, dtype=torch.int32)  # no request uses block 0
        slots = torch.tensor(group["slot_mapping"])
        tensors = GroupTensors(starts, lens, table, slots, step["max_query_len"])
        metadata |= dict.fromkeys(group["caches"], tensors)
    return metadata


@torch.no_grad()
def largest_error(recorded, caches, change=None):
    """Return the largest difference of all tokens' logits from those of their requests alone."""
    steps, errors = EngineSteps(recorded.model, max_model_len=LONGEST), []
    steps.bind(caches(steps, recorded))
    for step in recorded.steps:
        metadata = tensors_of(step)
        if change is not None:
            change(metadata)
        logits = recorded.model.lm_head(steps(torch.tensor(step["tokens"]), metadata))
        for name, first, (start, stop) in spans_of(step):
            alone = recorded.alone[name][first : first + stop - start]
            errors.append((alone - logits[start:stop]).abs().max())
    return float(max(errors))


def test_requests_that_share_blocks_get_the_logits_of_each_alone(recorded):
    assert largest_error(recorded, pool_of) < 1e-4


def test_states_that_are_saved_late_would_show(v4, monkeypatch):
    """The recorded step has a request whose prefix another request computes in that step."""
    monkeypatch.setattr(V4Family, "saves_first", lambda *call: False)
    assert largest_error(v4, pool_of) > 0.01


@torch.inference_mode()
def states_and_bytes(recorded, backend):
    """Return the hidden states of all steps, and all bytes of the pool after each step."""
    steps = EngineSteps(recorded.model, max_model_len=LONGEST, backend=backend)
    caches = pool_of(steps, recorded)
    steps.bind(caches)
    storage = caches(0, next(iter(steps.family.caches(steps.spec.kinds[0])))).untyped_storage()
    pool, found = torch.empty(0, dtype=torch.uint8).set_(storage), []
    for step in recorded.steps:
        hidden = steps(torch.tensor(step["tokens"]), tensors_of(step))
        found.append((hidden, pool.clone()))
    return found


@pytest.mark.parametrize(
    ("name", "model", "backend"),
    [
        ("v4", two_v4, "aot_eager"),
        ("v3", two_v3, "aot_eager"),
        *nightly(
            "aot_eager over other layers, and vLLM's engine",
            *(("v4", None, "aot_eager"), ("v3", None, "aot_eager"), ("v4", two_v4, "inductor")),
            *(("v3", two_v3, "inductor"), ("v4", None, "inductor")),
        ),
    ],
)
def test_every_byte_of_the_pool_is_that_of_eager_steps(name, model, backend, request):
    """One graph serves layers at other places of the pool, and steps of all sizes."""
    recorded = request.getfixturevalue(name)
    recorded = recorded if model is None else model(recorded)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    expected, found = states_and_bytes(recorded, None), states_and_bytes(recorded, counter)
    for (hidden, pool), (wanted, before) in zip(found, expected, strict=True):
        if backend == "aot_eager":
            assert torch.equal(hidden, wanted)
            assert torch.equal(pool, before)
        else:  # all caches are float32
            torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-4)
            rows, wanted = (each.view(torch.float32) for each in (pool, before))
            torch.testing.assert_close(rows, wanted, rtol=0, atol=2e-4)
            assert torch.equal(rows == OLD_VALUE, wanted == OLD_VALUE)
    kinds = 1 if model else {"v4": 3, "v3": 2}[name]
    graphs = 2 * (kinds + {"v4": 3, "v3": 2}[name])  # also metadata, norm, and V4's other windows
    if (backend, name) == ("inductor", "v3"):  # compiles again for a decode of one token
        assert graphs < counter.frame_count <= 1.5 * graphs
    else:
        assert counter.frame_count == graphs


@pytest.mark.nightly("test_every_byte_of_the_pool_is_that_of_eager_steps, in float32")
@pytest.mark.parametrize(
    ("backend", "casts"), [("aot_eager", False), ("inductor", True), ("inductor", False)]
)
def test_compiled_fp8_is_as_close_to_float32_as_eager(backend, casts, tmp_path):
    """Inductor keeps float32 between the ops of a graph. If it rounds to bfloat16 between them, as
    eager steps and ``aot_eager`` do, its results are those of eager steps."""
    kinds = {"num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 0]}
    write_checkpoint(tmp_path, {**TINY, **kinds})
    exact = DeepseekV4ForCausalLM.from_pretrained(tmp_path).float().eval()
    recorded = read("v4", hf.patch(hf.load_quantized(tmp_path), kv="fp8"))
    models = (hf.patch(exact, kv="fp32", precision="reference"), recorded.model, recorded.model)
    with torch._inductor.config.patch(emulate_precision_casts=casts):
        want, eager, compiled = (
            torch.cat([h.float() for h, _ in states_and_bytes(recorded._replace(model=model), by)])
            for model, by in zip(models, (None, None, backend), strict=True)
        )
    assert (compiled - want).norm() < 1.05 * (eager - want).norm()
    if casts or backend == "aot_eager":
        assert (compiled - eager).norm() < 0.2 * (eager - want).norm()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_drafts_are_those_of_speculative_prefill(backend, tmp_path):
    """V3's draft layer has its cache after those of the other layers in each block."""
    path = write_drafting_v3(tmp_path)
    model = DeepseekV3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = hf.load_mtp(hf.patch(model.requires_grad_(False), kv="fp32"), path)
    text, size, block = torch.arange(5, 25), 20, 2
    cache = hf.PagedCache.for_model(model, max_batch_size=1, max_cache_len=64, next_n=3)
    cache.add("a", 40)
    batch = hf.StepBatch(text, i32([0, size]), i32([size]), i32([0]))
    want = hf.speculative_prefill(model, batch, cache, num_drafts=2).batch.tokens.tolist()

    torch._dynamo.reset()
    sizes = {"max_model_len": 64, "decode_tokens": 3, "most_drafted": 64}
    steps = EngineSteps(model, backend=backend, **sizes)
    layers = [cache_name(layer, "kv") for layer in range(4)]
    recorded = SimpleNamespace(num_blocks=4, steps=[{"groups": [{"caches": layers}]}])
    caches = pool_of(steps, recorded)
    steps.bind(caches)
    steps.bind_draft(caches(3, "kv"))

    def group(first, count):
        slots = torch.arange(64 * block + first, 64 * block + first + count)
        return GroupTensors(i32([0, count]), i32([first + count]), i32([[block]]), slots, count)

    hidden = steps(text, dict.fromkeys(layers, group(0, size)))
    found = [int(model.lm_head(hidden)[-1].argmax())]
    tokens, streams = torch.cat((text[1:], torch.tensor(found))), steps.streams[:size]
    for first, count in ((0, size), (size, 1)):
        streams = steps.draft(tokens, streams, group(first, count))[-1:]
        tokens = model.lm_head(steps.draft_hidden(streams)).argmax(-1)
        found.append(int(tokens))
    assert found == want


def test_compiled_layers_refuse_caches_that_are_apart(recorded):
    steps = EngineSteps(recorded.model, max_model_len=LONGEST, backend="aot_eager")
    with pytest.raises(NotImplementedError, match=r"in the same blocks.*Pass --enforce-eager"):
        steps.bind(apart(steps, recorded))


def apart(steps, recorded):
    """Return a function that makes a separate tensor for each cache."""
    return lambda layer, field: steps.family.caches(steps.spec.kinds[layer])[field].layout.allocate(
        recorded.num_blocks
    )


def test_windows_of_another_group_have_a_table_of_their_own(v4, monkeypatch):
    """vLLM made a group for each of three layers; for released models it makes two groups."""
    monkeypatch.setattr(AttentionStep, "with_window", lambda step, *call: step)
    assert largest_error(v4, pool_of) > 0.01


def test_a_cache_with_a_table_of_its_own_is_refused(recorded):
    model = recorded.model
    name = cache_name(1, "indexer" if "c4" in model.dsv4_ops_spec.kinds else "kv")

    def change(metadata):
        metadata[name] = metadata[name]._replace(block_table=metadata[name].block_table.clone())

    with pytest.raises(NotImplementedError, match=f"{name} must share a block table"):
        largest_error(recorded, apart, change)


def test_a_profiling_run_writes_to_no_cache_of_the_engine(recorded):
    model = recorded.model
    tokens = torch.arange(70, dtype=torch.int32)  # more than the longest request
    hidden = EngineSteps(model, max_model_len=64).profiled(tokens)
    assert hidden.shape == (70, model.config.hidden_size)
    assert bool(hidden.isfinite().all())

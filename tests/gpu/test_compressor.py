"""The compressor on a GPU: kernels against the reference on the CPU, the same bytes however a
sequence is split, CUDA graphs, compiled graphs, blocks beyond 4 GiB. Run there with
``pytest -m gpu tests``."""

import math
from random import Random
from typing import Any

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout, PlainLayout, StateLayout
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import assert_agrees
from tests.support import compressor_steps
from tests.support.compressor_steps import KINDS, LAYOUTS, Engine, random_weights, together

DEVICE = "cuda"
each_kind = pytest.mark.parametrize("kind", KINDS)
LENS = {"C4": [410, 0, 193, 4, 3], "C4 indexer": [410, 0, 193, 4, 3], "C128": [300, 127, 128, 513]}


def filled(kind: str, layout: str, lens: list[int], seed: int = 2) -> tuple[Engine, list[Any]]:
    weights = random_weights(kind, 1, 8192)
    sequences = compressor_steps.random_sequences(kind, lens, seed)
    engine = Engine(kind, weights, lens, layout=layout, device=DEVICE)
    engine.step(sequences)
    return engine, sequences


@each_kind
@pytest.mark.parametrize("seed", range(4))
def test_any_cut_into_steps_gives_the_same_bytes(kind: str, seed: int) -> None:
    """The bytes are equal, not only near: a program sums the rows of a window in a fixed order."""
    whole, sequences = filled(kind, LAYOUTS[kind], LENS[kind])
    engine = Engine(kind, whole.weights, LENS[kind], layout=LAYOUTS[kind], seed=0, device=DEVICE)
    call = together() if seed % 2 else None
    compressor_steps.run_in_chunks(engine, sequences, Random(seed), (2, 9, 60, 300)[seed], call)
    assert torch.equal(engine.cache, whole.cache)
    assert whole.cache.any()


@each_kind
def test_a_long_prefill_is_the_sum_of_its_parts(kind: str) -> None:
    """16,411 tokens in one call, whose programs scan many tokens; in one call of the op that also
    saves states; and in calls of 1,000 tokens."""
    whole, (rows,) = filled(kind, LAYOUTS[kind], [16411], seed=5)
    both = Engine(kind, whole.weights, [16411], layout=LAYOUTS[kind], device=DEVICE)
    both.step([rows], call=together())
    assert torch.equal(both.cache, whole.cache)
    assert torch.equal(both.states.nan_to_num(), whole.states.nan_to_num())
    engine = Engine(kind, whole.weights, [16411], layout=LAYOUTS[kind], device=DEVICE)
    for start in range(0, 16411, 1000):
        engine.step([rows[start : start + 1000]])
    assert torch.equal(engine.cache, whole.cache)
    written = int(whole.cache.count_nonzero())
    assert written > 16411 // KINDS[kind]["ratio"] * KINDS[kind]["head_dim"] * 0.8


@each_kind
def test_every_request_of_a_decode_batch_may_finish_a_window(kind: str) -> None:
    """All of 2,000 one-token requests end a window; results equal those of one at a time."""
    spec, count = KINDS[kind], 2000
    made = torch.Generator(DEVICE).manual_seed(3)
    weights = {name: t.to(DEVICE) for name, t in random_weights(kind, 1).items()}
    width = weights["ape"].shape[1]
    layout = StateLayout(spec["state_block_size"], 2 * width)
    states = torch.randn(layout.shape(50), generator=made, device=DEVICE)
    columns = 2 * spec["ratio"] // spec["state_block_size"]
    table = torch.randint(0, 50, (count, columns), generator=made, device=DEVICE).int()
    kv_score = torch.randn(count, 2 * width, generator=made, device=DEVICE)
    positions = torch.full((count,), 2 * spec["ratio"] - 1, device=DEVICE)
    requests = torch.arange(count, device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(count, generator=made, device=DEVICE)
    cache_layout = PlainLayout(spec["block_size"], spec["head_dim"], torch.float32)
    together = cache_layout.allocate(count // spec["block_size"] + 1, DEVICE)
    alone = together.clone()

    def call(cache: torch.Tensor, part: slice) -> None:
        tensors = (kv_score[part], weights["ape"], states, table, positions[part], requests[part])
        tensors += (weights["norm_weight"], weights["cos_sin_cache"], cache, slots[part])
        ops.compress_and_insert(*tensors, **settings_of(kind, "plain"))

    call(together, slice(None))
    for token in range(0, count, 7):
        call(alone, slice(token, token + 1))
    chosen = slots[::7]
    rows = together.flatten(0, 1)[chosen]
    assert torch.equal(rows, alone.flatten(0, 1)[chosen])
    assert rows.abs().amax(-1).gt(0).all()
    assert int(together.abs().amax(-1).count_nonzero()) == count


def settings_of(kind: str, layout: str) -> dict[str, Any]:
    names = ("overlap", "state_block_size", "block_size")
    settings = {name: KINDS[kind][name] for name in names}
    return {"compress_ratio": KINDS[kind]["ratio"], "eps": 1e-6, "layout": layout, **settings}


def step(
    kind: str, weights: dict[str, torch.Tensor], inputs: tuple[Any, ...], fused: bool = False
) -> None:
    """Save states, then compress; or run one op for both."""
    spec = KINDS[kind]
    kv_score, states, table, positions, requests, cache, state_slots, slots = inputs
    first = (kv_score, weights["ape"], states, table)
    rest = (positions, requests, weights["norm_weight"], weights["cos_sin_cache"], cache, slots)
    settings = settings_of(kind, LAYOUTS[kind])
    if fused:
        ops.save_and_compress(*first, state_slots, *rest, **settings)
        return
    sizes = {"compress_ratio": spec["ratio"], "block_size": spec["state_block_size"]}
    ops.save_compressor_states(kv_score, weights["ape"], states, state_slots, positions, **sizes)
    ops.compress_and_insert(*first, *rest, **settings)


def decode_inputs(kind: str, weights: dict[str, torch.Tensor], seed: int) -> tuple[Any, ...]:
    """Sample 16 requests of one token each, some of which finish a window. States are saved to
    blocks 30 and up, which no window reads."""
    spec, made = KINDS[kind], torch.Generator().manual_seed(seed)
    width, size = weights["ape"].shape[1], spec["state_block_size"]
    layout = StateLayout(size, 2 * width)
    positions = torch.randint(0, 4, (16,), generator=made) * spec["ratio"] + spec["ratio"] - 1
    positions -= torch.randint(0, 2, (16,), generator=made)
    pages = torch.randint(-1, 31, (16, 4 * spec["ratio"] // size), generator=made)
    cache_layout = Engine(kind, weights, [1], layout=LAYOUTS[kind]).cache_layout
    cache = torch.randint(0, 256, cache_layout.shape(16), generator=made, dtype=torch.uint8)
    return (
        torch.randn(16, 2 * width, generator=made),
        torch.randn(layout.shape(40), generator=made),
        torch.where(pages < 30, pages, 40).int(),
        positions,
        torch.arange(16).int(),
        cache,
        torch.randperm(10 * size, generator=made)[:16] + 30 * size,
        torch.randperm(16 * spec["block_size"], generator=made)[:16],
    )


def agrees(kind: str, weights: Any, start: tuple[Any, ...], actual: tuple[Any, ...]) -> None:
    """Assert that ``actual`` is ``start`` after ``step``, within the budget of floats."""
    expected = tuple(tensor.clone() for tensor in start)
    cpu = {name: tensor.cpu() for name, tensor in weights.items()}
    step(kind, cpu, expected)
    assert torch.equal(actual[1].cpu(), expected[1]), "states"
    kv_score, _, table, positions, requests, cache, _, slots = start
    tensors = (kv_score, cpu["ape"], expected[1], table, positions, requests)
    tensors += (cpu["norm_weight"], cpu["cos_sin_cache"], cache, slots)
    case = Case(kind, tensors, settings_of(kind, LAYOUTS[kind]))
    op_testing = testing.op_testing("compress_and_insert")
    assert_agrees(kind, op_testing, case, (actual[5].cpu(),), (expected[5],))
    assert not torch.equal(actual[5].cpu(), cache)


@each_kind
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_compiled_steps_write_in_place(kind: str, fused: bool, dynamic: bool) -> None:
    """The graph contains our kernels, copies nothing and allocates nothing."""
    torch._dynamo.reset()
    weights = {name: t.to(DEVICE) for name, t in random_weights(kind, 1).items()}
    fresh = decode_inputs(kind, weights, 7)
    static = tuple(tensor.to(DEVICE) for tensor in fresh)
    addresses = [tensor.data_ptr() for tensor in static]
    compiled = torch.compile(
        lambda *inputs: step(kind, weights, inputs, fused), fullgraph=True, dynamic=dynamic
    )
    _, code = compile_and_get_code(compiled, *static)
    agrees(kind, weights, fresh, static)
    assert addresses == [tensor.data_ptr() for tensor in static]
    assert ("save_compressor_states_kernel" in code) != fused
    long = kind == "C128"
    assert ("insert_pooled_kernel" if long else "compress_and_insert_kernel") in code
    assert ".copy_(" not in code
    allocated = code.partition("def call(")[2].count("empty_strided_cuda((")
    assert allocated == int(long), "nothing but the pooled channels of long windows"


def test_pages_beyond_4_gib(gpu_memory_alone: None) -> None:
    """States and a cache whose last blocks are beyond 2^32 bytes and 2^31 float32 values."""
    kind = "C4"
    weights = {name: t.to(DEVICE) for name, t in random_weights(kind, 1).items()}
    states_layout, layout = StateLayout(4, 2048), MainLayout(64)
    state_blocks = math.ceil(2**31 * 1.05 / states_layout.shape(1)[1])
    cache_pages = math.ceil(5 * 2**30 / layout.page_bytes)
    small = decode_inputs(kind, weights, 3)
    states = torch.zeros(states_layout.shape(state_blocks), device=DEVICE)
    cache = layout.allocate(cache_pages, DEVICE)
    states[-40:] = small[1].to(DEVICE)
    cache[-16:] = small[5].to(DEVICE)
    first_state, first_page = state_blocks - 40, cache_pages - 16
    table = torch.where((small[2] >= 0) & (small[2] < 40), small[2] + first_state, -1).int()
    inputs = (small[0], states, table, small[3], small[4], cache)
    inputs += (small[6] + first_state * 4, small[7] + first_page * 64)
    step(kind, weights, tuple(tensor.to(DEVICE) for tensor in inputs))
    agrees(kind, weights, small, (None, states[-40:], None, None, None, cache[-16:]))
    assert not cache[:-16].any()
    del states, cache, inputs
    torch.cuda.empty_cache()

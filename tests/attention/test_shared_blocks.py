"""Requests that share blocks which one of them fills in the same step, as with vLLM's prefix cache.
Each request has the outputs that it has alone."""

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dsv4_ops.attention import LayerSpec
from tests.attention.test_layers import CUTS, layer_of
from tests.helpers import Called, assert_exact, i32, i64
from tests.support import layers
from tests.support.layers import LENGTH, PLAIN, SPEC, SmallLayer, caches_of, changed, in_chunks
from tests.support.sampled import sampled

BLOCK = 16  # a shared prefix is whole blocks of all caches, so its length is a multiple of this


def shared_step(
    layer: SmallLayer, inputs: list[dict[str, Tensor]], stops: list[int], hits: list[int], seed: int
) -> list[Tensor]:
    """Run one step and return the outputs of its requests. Request r has tokens hits[r] to
    stops[r]; its first hits[r] tokens are in blocks of request 0, which this step fills."""
    rng, spec = Random(seed), layer.spec
    layers.poison(layer)
    order = list(range(len(stops)))
    rng.shuffle(order)
    sizes = {"swa": spec.attention.swa_block_size, "compressed": BLOCK}
    sizes["states"] = 1 if layer.kind == "window" else spec.state_block_size(layer.kind)
    tables = {}
    for name, size in sizes.items():
        cache = caches_of(layer).get(name)
        free = list(range(999 if cache is None else cache.shape[0]))
        rng.shuffle(free)
        table = torch.full((len(stops), LENGTH // size + 1), -1, dtype=torch.int32)
        for number, (stop, hit) in enumerate(zip(stops, hits, strict=True)):
            table[number, : hit // size] = table[0, : hit // size]
            for column in range(hit // size, -(-stop // size)):
                table[number, column] = free.pop() if free else -1
        tables[name] = table
    size, slots, tokens = sizes["swa"], [], []
    for number in order:
        positions = range(hits[number], stops[number])
        slots += [int(tables["swa"][number, p // size]) * size + p % size for p in positions]
        span = slice(positions.start, positions.stop)
        tokens.append({name: each[span] for name, each in inputs[number].items()})
    counts = [stops[number] - hits[number] for number in order]
    joined = {name: torch.cat([part[name] for part in tokens]) for name in inputs[0]}
    starts = i64([0, *counts]).cumsum(0).int()
    batch = (starts, i32([stops[number] for number in order]), i64(slots))
    of_rows = (tables[name][order] for name in ("swa", "compressed", "states"))
    parts = layer.attend(joined, *batch, *of_rows).split(counts)
    return [parts[order.index(number)] for number in range(len(stops))]


@st.composite
def hits(draw: Any) -> tuple[list[int], list[int], int]:
    """Sample lengths of requests, and how many tokens each shares with the first."""
    first = draw(st.sampled_from([16, 17, 31, 32, 33, 48, 50]))
    stops, shared = [first], [0]
    for _ in range(draw(st.integers(1, 3))):
        hit = BLOCK * draw(st.sampled_from([first // BLOCK, 1, 0]))
        stops.append(hit + draw(st.sampled_from([1, 2, 3, 4, 5, 8, 10])))
        shared.append(hit)
    return stops, shared, draw(st.integers(0, 99))


@pytest.mark.parametrize("kind", ["window", "c4", "c128"])
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
@pytest.mark.parametrize(("spec", "budget"), [(PLAIN, 3e-6), (SPEC, 0.01)], ids=["plain", "fp8"])
def test_requests_that_share_blocks_have_the_outputs_that_they_have_alone(
    kind: str, schedule: str, spec: LayerSpec, budget: float
) -> None:
    attention = replace(spec.attention, block_tokens=BLOCK)
    layer, sources = layer_of(kind, replace(spec, attention=attention))
    errors = {True: [0.0], False: [0.0]}

    @sampled(24)
    @given(hits())
    def compare(batch: tuple[list[int], list[int], int]) -> None:
        stops, shared, seed = batch
        inputs = [
            {name: torch.cat([sources[0][name][:hit], each[hit:]]) for name, each in own.items()}
            for own, hit in zip(sources, shared, strict=False)
        ]
        with changed(layer, schedule=schedule):
            pairs = zip(inputs, stops, strict=True)
            alone = [in_chunks(layer, [own], [[stop]])[0] for own, stop in pairs]
            for save_first, worst in errors.items():
                with changed(layer, save_first=save_first):
                    found = shared_step(layer, inputs, stops, shared, seed)
                for out, expected, hit in zip(found, alone, shared, strict=True):
                    wanted = expected[hit:].float()
                    error = (out.float() - wanted).abs() / wanted.abs().amax((1, 2), keepdim=True)
                    worst.append(float(error.nan_to_num(1.0).amax()))

    compare()
    assert max(errors[True]) <= budget
    # if a prefix ends where a C128 window ends, C128 reads no state of the prefix
    assert (max(errors[False]) > 10 * budget) == (kind == "c4")


@pytest.mark.parametrize("kind", ["c4", "c128"])
@pytest.mark.parametrize("schedule", ["decode", "prefill"])
def test_saving_first_changes_no_bit_where_no_block_is_shared(kind: str, schedule: str) -> None:
    layer, inputs = layer_of(kind, SPEC)
    outputs = {}
    for save_first in (False, True):
        with changed(layer, schedule=schedule, save_first=save_first), Called() as called:
            outputs[save_first] = in_chunks(layer, inputs[:3], CUTS)
        caches = caches_of(layer).values()
        outputs[save_first] += [cache.view(torch.uint8).clone() for cache in caches]
    assert ("insert_c4_step" in called.names) == (kind == "c4" and schedule == "decode")
    assert_exact(outputs[False], outputs[True])


def test_states_in_rings_cannot_be_saved_first() -> None:
    """If a step is longer than its ring, it overwrites states that a window needs."""
    layer, inputs = layer_of("c128", PLAIN)
    message = (
        "attention_layer: save_first must be False with state_rings, got True. Pass "
        "state_rings=False, and states in blocks that no step overwrites before it has read them."
    )
    rings = changed(layer, state_rings=True, save_first=True)
    with rings, pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        in_chunks(layer, inputs[:1], [[5]])
    with changed(layer, save_first=1), pytest.raises(TypeError, match="save_first must be a bool"):
        in_chunks(layer, inputs[:1], [[5]])

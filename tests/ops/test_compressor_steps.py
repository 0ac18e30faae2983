"""The compressor over whole sequences: however they are split into steps, the cache is the same."""

from random import Random
from typing import Any

import pytest
import torch

from tests.helpers import nightly
from tests.oracles.compressor import compressed_rows
from tests.support.compressor_steps import (
    KINDS,
    SPECS,
    Engine,
    random_sequences,
    random_weights,
    run_in_chunks,
    together,
)

LENS = {
    "C4": [41, 0, 19, 4, 3],
    "C4 indexer": [41, 0, 19, 4, 3],
    "C128": [131, 127, 128, 0],
    "C128 narrow": [300, 127, 128, 0, 260],
}
each_kind = pytest.mark.parametrize("kind", KINDS)
# many steps, each of which costs the CPU a window for every token
each_narrow = pytest.mark.parametrize("kind", ["C4 indexer", "C128 narrow"])


def in_one_pass(kind: str, layout: str = "plain") -> tuple[Engine, list[torch.Tensor]]:
    weights, sequences = random_weights(kind, 1), random_sequences(kind, LENS[kind], 2)
    engine = Engine(kind, weights, LENS[kind], layout=layout)
    engine.step(sequences)
    return engine, sequences


@each_kind
def test_one_pass_is_what_the_oracle_says(kind: str) -> None:
    """A prefill of several requests, none of whose states were there before."""
    engine, sequences = in_one_pass(kind)
    spec = SPECS[kind]
    columns = [0, 1, spec["head_dim"] - 2, spec["head_dim"] - 1]
    for request, rows in enumerate(sequences):
        positions = list(range(len(rows)))
        got = engine.rows(request)
        expected = compressed_rows(
            rows.tolist(),
            engine.weights["ape"].tolist(),
            [],
            [[]],
            positions,
            [0] * len(rows),
            engine.weights["norm_weight"].tolist(),
            engine.weights["cos_sin_cache"][: len(rows)].tolist(),
            positions,
            num_slots=len(rows),
            compress_ratio=spec["ratio"],
            overlap=spec["overlap"],
            eps=engine.eps,
            state_block_size=4,
        )
        assert len(expected) == len(got) == len(rows) // spec["ratio"]
        if expected:
            want = torch.tensor(expected)
            torch.testing.assert_close(got, want, rtol=0, atol=3e-6)
            assert want[:, columns].abs().amax() > 0.1


@each_narrow
@pytest.mark.parametrize("seed", [3, *nightly("seed 3", 0, 1, 2, 4, 5)])
@pytest.mark.parametrize("call", [None, together()], ids=["two ops", "one op"])
def test_any_cut_into_steps_gives_the_same_rows(kind: str, seed: int, call: Any) -> None:
    """Chunks that straddle windows, empty ones, padding tokens; states saved before or after, all
    of them or those that are still needed; blocks used again under stale table entries."""
    whole, sequences = in_one_pass(kind)
    engine = Engine(kind, whole.weights, LENS[kind], seed=seed)
    run_in_chunks(engine, sequences, Random(seed), (2, 9, 60)[seed % 3], call)
    for request in range(len(sequences)):
        actual, expected = engine.rows(request), whole.rows(request)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@each_narrow
def test_several_tokens_per_request_and_step(kind: str) -> None:
    """Speculative decoding: three tokens a step, of which one to three are kept."""
    whole, sequences = in_one_pass(kind)
    engine, rng = Engine(kind, whole.weights, LENS[kind]), Random(5)
    while any(done < len(rows) for done, rows in zip(engine.done, sequences, strict=True)):
        before = engine.done[:]
        engine.step([rows[done : done + 3] for done, rows in zip(before, sequences, strict=True)])
        for request, (start, stop) in enumerate(zip(before, engine.done, strict=True)):
            engine.done[request] = start + min(stop - start, rng.randint(1, 3))
    for request in range(len(sequences)):
        torch.testing.assert_close(engine.rows(request), whole.rows(request), rtol=0, atol=1e-6)

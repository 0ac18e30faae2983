"""The scheduler of examples/05_continuous_batching.py, with a model that knows what it was fed."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from continuous_batching import Request, Scheduler

from dsv4_ops.integrations.transformers import PagedCache
from dsv4_ops.testing.models import small_config
from tests.helpers import NIGHTLY

ROWS, TOKENS, BLOCK = 4, 7, 256


def new_cache(num_blocks):
    sizes = {"max_batch_size": ROWS, "max_cache_len": 700, "max_chunk": TOKENS}
    return PagedCache(small_config(), num_blocks=num_blocks, kv="fp32", **sizes)


def after(tokens):
    """The model: a token that depends on all before it."""
    return hash(tuple(tokens)) % 250


def alone(request):
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_new:
        tokens.append(after(tokens))
    return tokens[len(request.prompt) :]


class Rows:
    """What each row of the cache holds; checks every step as an adversarial reader."""

    def __init__(self, cache):
        self.cache, self.stored = cache, {}

    def step(self, batch):
        tokens, starts = batch.tokens.tolist(), batch.query_start_loc.tolist()
        lens, rows = batch.seq_lens.tolist(), batch.rows.tolist()
        assert (len(tokens), len(starts), len(lens), len(rows)) == (TOKENS, ROWS + 1, ROWS, ROWS)
        used = [row for row in rows if row >= 0]
        assert len(set(used)) == len(used)
        assert (starts[0], starts) == (0, sorted(starts))
        assert starts[-1] <= TOKENS
        owned = self.cache.tensors.tables.compressed.tolist()
        taken = [block for row in owned for block in row if block >= 0]
        assert len(set(taken)) == len(taken), "a block has two owners"
        results = [-1] * TOKENS
        for row, length, (start, stop) in zip(rows, lens, pairwise(starts), strict=True):
            if row < 0:
                assert (length, stop - start) == (0, 0)
                continue
            assert sum(block >= 0 for block in owned[row]) * BLOCK >= length, "a block is missing"
            assert stop > start
            # a row is used again
            before = self.stored.get(row, []) if length > stop - start else []
            assert len(before) == length - (stop - start), "tokens were left out, or fed twice"
            self.stored[row] = before + tokens[start:stop]
            results[stop - 1] = after(self.stored[row])
        return results


def run(scheduler, arrivals):
    """Arrivals by step; returns the requests in the order in which they ended, and the names of the
    requests that were preempted."""
    rows, number, ended, preempted = Rows(scheduler.cache), 0, [], []
    arrivals = sorted(arrivals, key=lambda entry: entry[0])
    while arrivals or scheduler.running or scheduler.waiting:
        while arrivals and arrivals[0][0] <= number:
            scheduler.waiting.append(arrivals.pop(0)[1])
        decoding = [each for each in scheduler.running if each.left == 1]
        before = list(scheduler.running)
        batch = scheduler.plan()
        preempted += [each.name for each in before if each not in scheduler.running]
        if batch is not None:
            order = list(scheduler.counts)
            decodes = [each for each in order if each in decoding]
            assert order[: len(decodes)] == decodes, "decodes come first"
            ended += scheduler.commit(rows.step(batch))
        else:
            assert not scheduler.running, "a running request gets no step"
        number += 1
        assert number < 20_000, "no progress"
    cache = scheduler.cache
    assert (cache.num_free_blocks, cache.requests) == (cache.num_blocks, {})
    assert (cache.tensors.tables.compressed == -1).all()
    return ended, preempted


REQUESTS = st.tuples(
    st.integers(0, 60),
    st.one_of(st.integers(1, 30), st.sampled_from([250, 255, 256, 257, 300])),
    st.one_of(st.integers(1, 12), st.sampled_from([60])),
)


@settings(max_examples=40 if NIGHTLY else 15, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=9), st.integers(2, 6))
def test_any_traffic_gets_what_each_request_gets_alone(sampled, num_blocks):
    """Prompts around a block, and few blocks: outputs are right and no block is lost."""
    arrivals = [
        (step, Request(name, [(name * 31 + i) % 250 for i in range(prompt)], output))
        for name, (step, prompt, output) in enumerate(sampled)
    ]
    ended, _ = run(Scheduler(new_cache(num_blocks), TOKENS), arrivals)
    assert len(ended) == len(arrivals)
    assert all(request.output == alone(request) for request in ended)


def test_the_youngest_is_preempted_and_starts_again():
    """Two requests grow into their second block when there are three."""
    old, young = (Request(name, [name] * 250, 60) for name in range(2))
    ended, preempted = run(Scheduler(new_cache(3), TOKENS), [(0, old), (0, young)])
    assert (ended, preempted) == ([old, young], [young.name])


def test_a_request_waits_for_blocks_and_nobody_overtakes_it():
    """The third needs one block of the two, which the first has."""
    first, second, third = (Request(name, [name] * n, 3) for name, n in enumerate((300, 300, 5)))
    scheduler = Scheduler(new_cache(2), TOKENS)
    ended, preempted = run(scheduler, [(0, first), (0, second), (0, third)])
    assert (ended[0], set(ended), preempted) == (first, {first, second, third}, [])

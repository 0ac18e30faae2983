"""The scheduler of examples/05_continuous_batching.py, with a model that knows what it was fed."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from continuous_batching.scheduler import Request, Scheduler

from dsv4_ops.integrations.transformers import PagedCache
from dsv4_ops.testing.models import small_config
from tests.helpers import NIGHTLY

ROWS, TOKENS, BLOCK = 4, 7, 256


def new_cache(num_blocks=3, max_cache_len=700):
    return PagedCache(
        small_config(),
        max_batch_size=ROWS,
        max_cache_len=max_cache_len,
        max_chunk=TOKENS,
        num_blocks=num_blocks,
        kv="fp32",
    )


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

    def step(self, plan):
        batch = plan.batch
        tokens, starts = batch.tokens.tolist(), batch.query_start_loc.tolist()
        lens, rows = batch.seq_lens.tolist(), batch.rows.tolist()
        assert (len(tokens), len(starts), len(lens), len(rows)) == (TOKENS, ROWS + 1, ROWS, ROWS)
        used = [row for row in rows if row >= 0]
        assert len(set(used)) == len(used) == len(plan.counts)
        assert starts[0] == 0
        assert starts == sorted(starts)
        assert starts[-1] <= TOKENS
        counts = [stop - start for start, stop in pairwise(starts)]
        self.blocks(dict(zip(rows, lens, strict=True)))
        results = [-1] * TOKENS
        for row, length, start, count in zip(rows, lens, starts, counts, strict=False):
            if row < 0:
                assert (length, count) == (0, 0)
                continue
            assert count > 0
            before = self.stored.get(row, []) if length > count else []  # a row is used again
            assert len(before) == length - count, "tokens were left out, or fed twice"
            self.stored[row] = before + tokens[start : start + count]
            results[start + count - 1] = after(self.stored[row])
        return results

    def blocks(self, lens):
        owned = self.cache.tensors.tables.compressed.tolist()
        taken = [block for row in owned for block in row if block >= 0]
        assert len(set(taken)) == len(taken), "a block has two owners"
        for row, length in lens.items():
            if row >= 0:
                assert sum(block >= 0 for block in owned[row]) * BLOCK >= length, (
                    "a block is missing"
                )


def run(scheduler, arrivals, leaving=None, most=20_000):
    """Arrivals by step; returns the steps it took."""
    rows, number = Rows(scheduler.cache), 0
    arrivals = sorted(arrivals, key=lambda entry: entry[0])
    while arrivals or scheduler.running or scheduler.waiting:
        while arrivals and arrivals[0][0] <= number:
            scheduler.submit(arrivals.pop(0)[1])
        for request in (leaving or {}).get(number, []):
            scheduler.cancel(request)
        decoding = [r for r in scheduler.running if r.left == 1]
        plan = scheduler.plan()
        if plan is not None:
            order = list(plan.counts)
            decodes = [r for r in order if r in decoding]
            assert order[: len(decodes)] == decodes, "decodes come first"
            results = rows.step(plan)
            assert all(results[row] >= 0 for _, row in plan.samples)
            scheduler.commit(plan, results)
        elif not arrivals:
            assert not scheduler.running, "a running request gets no step"
        number += 1
        assert number < most, "no progress"
    cache = scheduler.cache
    assert cache.num_free_blocks == cache.num_blocks
    assert cache.requests == {}
    assert (cache.tensors.tables.compressed == -1).all()
    return number


REQUESTS = st.tuples(
    st.integers(0, 60),
    st.one_of(st.integers(1, 30), st.sampled_from([250, 255, 256, 257, 300])),
    st.one_of(st.integers(1, 12), st.sampled_from([60])),
    st.one_of(st.none(), st.integers(0, 120)),
)


@settings(max_examples=40 if NIGHTLY else 15, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=9), st.integers(2, 6))
def test_any_traffic_gets_what_each_request_gets_alone(sampled, num_blocks):
    """Prompts around a block, few blocks, cancellations: outputs are right and no block is lost."""
    scheduler = Scheduler(new_cache(num_blocks), num_tokens=TOKENS)
    arrivals, leaving = [], {}
    for name, (step, prompt, output, leaves) in enumerate(sampled):
        request = Request(name, [(name * 31 + i) % 250 for i in range(prompt)], output)
        arrivals.append((step, request))
        if leaves is not None and leaves >= step:
            leaving.setdefault(leaves, []).append(request)
    requests = [request for _, request in arrivals]
    run(scheduler, arrivals, leaving)
    for request in requests:
        assert request.status in ("finished", "cancelled")
        want = alone(request)
        assert request.output == (
            want if request.status == "finished" else want[: len(request.output)]
        )
    could_leave = {request for gone in leaving.values() for request in gone}
    assert all(r.status == "finished" for r in requests if r not in could_leave)


def test_the_youngest_is_preempted_and_starts_again():
    """Two requests grow into their second block when there are three."""
    scheduler = Scheduler(new_cache(num_blocks=3), num_tokens=TOKENS)
    old, young = (Request(name, [name] * 250, 60) for name in range(2))
    run(scheduler, [(0, old), (0, young)])
    assert (old.preempted, young.preempted, scheduler.preemptions) == (0, 1, 1)
    assert (old.output, young.output) == (alone(old), alone(young))


def test_a_request_waits_for_pages_and_nobody_overtakes_it():
    scheduler = Scheduler(new_cache(num_blocks=2), num_tokens=TOKENS)
    first, second, third = (Request(name, [name] * n, 3) for name, n in enumerate((300, 300, 5)))
    ended = []
    commit = scheduler.commit
    scheduler.commit = lambda *args: ended.extend(commit(*args))
    run(scheduler, [(0, first), (0, second), (0, third)])
    assert scheduler.waits_for_blocks > 0
    assert ended[0] is first
    assert {second, third} == set(ended[1:])


def test_a_cancelled_request_gives_everything_back_whatever_it_is_doing():
    scheduler = Scheduler(new_cache(num_blocks=2), num_tokens=TOKENS)
    decoding, prefilling, waiting = (Request(name, [1] * n, 9) for name, n in enumerate((2, 99, 9)))
    for request in (decoding, prefilling, waiting):
        scheduler.submit(request)
    rows = Rows(scheduler.cache)
    for _ in range(3):
        plan = scheduler.plan()
        scheduler.commit(plan, rows.step(plan))
    assert [decoding.left, prefilling.left > 1, waiting.stored] == [1, True, 0]
    for request in (decoding, prefilling, waiting):
        scheduler.cancel(request)
        scheduler.cancel(request)  # once is enough
        assert request.status == "cancelled"
    assert scheduler.plan() is None
    assert (scheduler.cache.num_free_blocks, scheduler.cache.requests) == (2, {})


def test_an_output_ends_at_the_stop_token():
    prompt = [1, 2, 3]
    scheduler = Scheduler(new_cache(), num_tokens=TOKENS, stop=after(prompt))
    request = Request(0, prompt, 50)
    run(scheduler, [(0, request)])
    assert request.output == [after(prompt)]


@pytest.mark.parametrize(
    ("prompt", "output"), [([], 5), ([1], 0), ([1] * 600, 169), ([1] * 600, 101)]
)
def test_what_never_fits_is_refused_at_once(prompt, output):
    scheduler = Scheduler(new_cache(num_blocks=3), num_tokens=TOKENS)
    with pytest.raises(ValueError, match="together at most 700 tokens"):
        scheduler.submit(Request(0, prompt, output))
    assert not scheduler.waiting

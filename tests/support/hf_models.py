"""Small models of Hugging Face, ragged batches of requests, and our steps over them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model
from tests.helpers import i32
from tests.support import forked

LENGTH, REQUESTS = 290, 3  # longer than the window and two windows of 128


@pytest.fixture(scope="module")
def checkpoints(request, tmp_path_factory):
    """Save the models that ``whole`` of the test's file makes, each in a folder of its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in request.module.MODELS:
        request.module.whole(family).save_pretrained(folder / family)
    return folder


@lru_cache
def text() -> Tensor:
    """Return the tokens of every request."""
    return torch.randint(0, 256, (REQUESTS, LENGTH), generator=torch.Generator().manual_seed(1))


@lru_cache
@torch.no_grad()
def expected() -> Tensor:
    """Return Hugging Face's logits of every request, in float32 and without a cache."""
    logits: Tensor = small_model()(text()).logits
    return logits


@lru_cache
def stock() -> Any:
    """Return Hugging Face's small model, unpatched."""
    return small_model()


@lru_cache
def reference() -> Any:
    """Return the patched model in the mode that follows Hugging Face."""
    return v4.patch(small_model(), kv="fp32", precision="reference")


def new_cache(model: Any = None, **sizes: Any) -> v4.PagedCache:
    return v4.PagedCache.for_model(
        model or reference(), **{"max_batch_size": REQUESTS, "max_cache_len": LENGTH, **sizes}
    )


def leaves(cache: v4.PagedCache) -> list[Tensor]:
    tensors = (cache.seq_lens, cache.written, cache.tensors)
    return [leaf.clone() for leaf in tree_leaves(tensors)]


@contextmanager
def refuses(cache: v4.PagedCache, message: str) -> Iterator[None]:
    """Assert an error that begins with the pattern ``message``, and an unchanged cache."""
    before = leaves(cache)
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
        yield
    assert re.match(message, str(raised.value)), raised.value
    assert all(map(torch.equal, before, leaves(cache)))


def first_step(
    model: Any, tokens: Sequence[int] = (7, 5), **sizes: Any
) -> tuple[v4.StepBatch, v4.PagedCache]:
    """Return a batch with the first token of each request, and an empty cache."""
    count = len(tokens)
    cache = new_cache(model, **{"max_batch_size": count, "max_cache_len": 256, **sizes})
    rows = [cache.add(request, num_tokens=3) for request in range(count)]
    starts = i32(range(count + 1))
    return v4.StepBatch(torch.tensor(tokens), starts, i32([1] * count), i32(rows)), cache


def check_states(got: Tensor, want: Tensor) -> None:
    """Assert that hidden states equal Hugging Face's within 1e-5 of the largest value."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


class Engine:
    """Runs requests in ragged steps and keeps the logits of every token.

    Args:
        model: Patched model.
        cache: The model's cache; requests take a row and blocks when they need them.
        tokens: The tokens of every request.
    """

    def __init__(self, model: Any, cache: v4.PagedCache, tokens: Tensor) -> None:
        self.model, self.cache, self.tokens = model, cache, tokens
        self.done = [0] * len(tokens)
        self.logits: list[dict[int, Tensor]] = [{} for _ in tokens]

    def batch(self, counts: dict[int, int], *, padding: int = 0) -> v4.StepBatch:
        """Return the next ``counts[request]`` tokens of each request, then padding."""
        ids, starts, lens, rows = [], [0], [], []
        for request, count in counts.items():
            if request not in self.cache.requests:
                self.cache.add(request)
            start, stop = self.done[request], self.done[request] + count
            self.cache.reserve(request, stop)
            ids += self.tokens[request, start:stop].tolist()
            starts.append(starts[-1] + count)
            lens.append(stop)
            rows.append(self.cache.requests[request])
        starts += [starts[-1]] * padding
        lens += [0] * padding
        rows += [-1] * padding
        ids += [10**9] * padding  # never read
        device = self.cache.device
        tensors = (torch.tensor(ids), i32(starts), i32(lens), i32(rows))
        return v4.StepBatch(*(tensor.to(device) for tensor in tensors))

    def decode(self, counts: dict[int, int], *, padding: int = 0, step: Any = None) -> None:
        """Run a decode step, and store the logits of every token."""
        batch = self.batch(counts, padding=padding)
        logits = (step or v4.decode_step)(self.model, batch, self.cache.tensors)
        place = 0
        for request, count in counts.items():
            for token in range(count):
                self.logits[request][self.done[request] + token] = logits[place].clone()
                place += 1
            self.done[request] += count

    def prefill(self, counts: dict[int, int], *, padding: int = 0, step: Any = None) -> None:
        """Run a prefill step, and store the logits of every request's last token. Half of the steps
        whose requests all begin know that no request has a context."""
        most = self.model.dsv4_ops_spec.most_first_tokens or sum(counts.values())
        begin = not any(self.done[each] for each in counts) and max(counts.values()) <= most
        first = partial(v4.prefill_step, has_context=not begin or sum(counts.values()) % 2 == 0)
        batch = self.batch(counts, padding=padding)
        logits = (step or first)(self.model, batch, self.cache.tensors)
        for place, (request, count) in enumerate(counts.items()):
            self.done[request] += count
            self.logits[request][self.done[request] - 1] = logits[place].clone()

    def differences(self, want: Tensor) -> Iterator[Tensor]:
        """Yield the differences of all stored logits from ``want``, on the device of ``want``."""
        for request, kept in enumerate(self.logits):
            for place, logits in kept.items():
                yield logits.to(want.device).float() - want[request, place]

    def worst(self, want: Tensor) -> float:
        return max(float(each.abs().max()) for each in self.differences(want))

    def rms(self, want: Tensor) -> float:
        squares = [each.square().mean() for each in self.differences(want)]
        return float(torch.stack(squares).mean().sqrt())


def run_randomly(engine: Engine, rng: Random, most: int = 40) -> Engine:
    """Run random prefills and decodes of several tokens until all requests are complete."""
    length = engine.tokens.shape[1]
    while min(engine.done) < length:
        waiting = [request for request, done in enumerate(engine.done) if done < length]
        counts = {
            request: min(rng.choice([1, 1, 2, 5, most]), length - engine.done[request])
            for request in rng.sample(waiting, rng.randint(1, len(waiting)))
        }
        counts = dict(sorted(counts.items(), key=lambda item: item[1]))
        run = engine.decode if rng.random() < 0.3 else engine.prefill
        run(counts, padding=rng.randrange(3))
    return engine


def run_preempted(engine: Engine, rng: Random) -> int:
    """Prefill until all requests are complete. If no block is free, the youngest request frees its
    blocks and starts again. Return the number of such preemptions."""
    cache, length, preempted = engine.cache, engine.tokens.shape[1], 0
    age = list(range(len(engine.done)))
    while min(engine.done) < length:
        counts: dict[int, int] = {}
        for each in [each for each in age if engine.done[each] < length]:
            count = min(rng.choice([1, 7, 30]), length - engine.done[each])
            try:
                if each not in cache.requests:
                    cache.add(each)
                cache.reserve(each, engine.done[each] + count)
                counts[each] = count
            except v4.OutOfBlocks:
                youngest = [other for other in age if other in cache.requests][-1]
                cache.free(youngest)
                counts.pop(youngest, None)
                preempted += engine.done[youngest] > 0
                engine.done[youngest] = 0
        engine.prefill(dict(sorted(counts.items(), key=lambda item: item[1])))
        for each in [each for each in age if engine.done[each] == length]:
            if each in cache.requests:
                cache.free(each)
    return preempted


def run_changing(engine: Engine, rng: Random, steps: int, compiled: Any) -> int:
    """Run compiled decode steps of 6 tokens, while requests pause, end, and leave their rows to
    other requests. Return the number of ended requests."""
    length, finished, requests = engine.tokens.shape[1], 0, len(engine.done)

    def step(model: Any, batch: v4.StepBatch, cache: Any) -> Tensor:
        logits: Tensor = compiled(model, padded_to(batch, 6, requests), cache)
        return logits

    for _ in range(steps):
        waiting = [request for request, done in enumerate(engine.done) if done < length]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        counts = {chosen[0]: min(rng.choice([1, 4]), length - engine.done[chosen[0]])}
        engine.decode(counts | dict.fromkeys(chosen[1:], 1), step=step)
        for request in range(requests):
            ends = engine.done[request] > min(20, length - 1) or rng.random() < 0.05
            if request in engine.cache.requests and ends:
                engine.cache.free(request)
                engine.done[request] = 0
                finished += 1
    return finished


def padded_to(batch: v4.StepBatch, num_tokens: int, num_reqs: int) -> v4.StepBatch:
    """Pad the batch to the size of a graph."""
    tokens, requests = num_tokens - len(batch.tokens), num_reqs - len(batch.rows)
    last = batch.query_start_loc[-1:]
    return v4.StepBatch(
        torch.cat([batch.tokens, batch.tokens.new_zeros(tokens)]),
        torch.cat([batch.query_start_loc, last.expand(requests)]),
        torch.cat([batch.seq_lens, batch.seq_lens.new_zeros(requests)]),
        torch.cat([batch.rows, batch.rows.new_full((requests,), -1)]),
    )


def random_counts(rng: Random, done: list[int], most: int) -> dict[int, int]:
    """Sample the numbers of tokens of requests in a step: decodes first, then chunks."""
    open_requests = [request for request, count in enumerate(done) if count < LENGTH]
    chosen = rng.sample(open_requests, rng.randint(1, len(open_requests)))
    sizes = [1, 1, 2, 3, 5, 64, 127, 129]
    counts = {each: min(rng.choice(sizes), most, LENGTH - done[each]) for each in chosen}
    return dict(sorted(counts.items(), key=lambda item: item[1]))


def run_packaged(model, cache, tokens, folder):
    """Prefill two requests; a package without our Python decodes both, then one with padding."""
    package = v4.export_decode(model, cache, path=folder / "decode.pt2")
    engine = Engine(model, cache, tokens[:2])
    engine.prefill({0: 60, 1: 9})

    def step(model, batch, tensors):
        inputs = v4.decode_inputs(batch, cache)
        torch.save(inputs, folder / "in.pt")
        forked.run_package(package, folder / "in.pt")
        found = torch.load(folder / "in.pt.out")
        for tensor, left in zip(inputs, found[-len(inputs) :], strict=True):
            tensor.copy_(left)
        return torch.stack(found[: -len(inputs)])

    for counts in ({0: 1, 1: 1}, {1: 1}):
        engine.decode(counts, padding=2 - len(counts), step=step)
    return engine

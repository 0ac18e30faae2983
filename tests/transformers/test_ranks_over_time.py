"""Ranks that share a cache over many steps of a changing batch: requests arrive, end, are cancelled
and preempted, live on one rank only, and stop around the ends of rounds and blocks. Logits and
selected rows are those of one process that runs the same steps."""

import time
from random import Random

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_mla_model, small_model
from tests.support.hf_models import padded_to
from tests.support.ranks import run_ranks
from tests.support.selected_rows import SelectedRows

CLOSE, ROWS, TOKENS, TOPK = 1e-5, 3, 64, 4
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
# most positions of a request, past a block of two ranks; the turns that blocks allow; the blocks of
# one process and of two ranks, whose blocks have as many positions twice: not all requests fit
SIZES = {"v3": (150, (1, 4, 16, 64), (4, 2)), "v4": (530, (1, 2, 8, 32), (4, 2))}


def model_of(family, **settings):
    if family == "v3":
        model = small_mla_model(num_hidden_layers=2)
    else:
        model = small_model(compress_rates=RATES, index_topk=TOPK)
    return v4.patch(model, kv="fp32", precision="reference", **settings)


class Served:
    """The same requests in one process and on the ranks, which draw the same random numbers."""

    def __init__(self, family, interleave, seed, compiles):
        self.rng, (self.longest, _, blocks) = Random(seed), SIZES[family]
        parallel = ContextParallel.of(interleave=interleave)
        models = model_of(family), model_of(family, parallel=parallel)
        sizes = {"max_batch_size": ROWS, "max_cache_len": self.longest}
        self.caches = [
            v4.PagedCache.for_model(model, **sizes, num_blocks=count)
            for model, count in zip(models, blocks, strict=True)
        ]
        self.models, self.round = models, parallel.turn
        self.counter = CompileCounter()
        compiled = {"backend": self.counter, "fullgraph": True}
        self.of_ranks = {
            step: torch.compile(step, **compiled) if compiles else step
            for step in (v4.decode_step, v4.prefill_step)
        }
        self.tokens, self.done, self.worst = {}, {}, 0.0
        self.happened = dict.fromkeys(("arrived", "short", "ended", "cancelled", "preempted"), 0)

    def change(self):
        """What a scheduler does between two steps."""
        for request, tokens in list(self.tokens.items()):
            if self.done[request] == len(tokens):
                self.leave(request, "ended")
            elif self.done[request] and self.rng.random() < 0.03:
                self.leave(request, "cancelled")
        while not self.tokens or (len(self.tokens) < ROWS and self.rng.random() < 0.4):
            # some end while all their rows are on the first rank
            short, request = self.rng.random() < 0.4, self.happened["arrived"]
            most = min(self.round, self.longest) if short else self.longest
            count = self.rng.randint(1, most) if short else most
            self.tokens[request] = [self.rng.randrange(256) for _ in range(count)]
            self.done[request] = 0
            self.happened["arrived"] += 1
            self.happened["short"] += short

    def leave(self, request, why):
        self.happened[why] += 1
        self.free(request)
        del self.tokens[request], self.done[request]

    def free(self, request):
        for cache in self.caches:
            if request in cache.requests:
                cache.free(request)

    def takes(self, request, stop, others):
        """Whether the request has blocks up to ``stop``, if need be those of one of ``others``,
        which then starts again."""
        for cache in self.caches:
            if request not in cache.requests:
                cache.add(request)
            while cache.lacking_blocks(request, stop) > cache.num_free_blocks:
                victims = [each for each in others if self.done[each]]
                if not victims:
                    return False
                victim = self.rng.choice(victims)
                self.free(victim)
                self.done[victim] = 0
                self.happened["preempted"] += 1
            cache.reserve(request, stop)
        return True

    def stop_after(self, request, most):
        """An end around that of a round of the ranks or of a block, or some tokens on."""
        done, last = self.done[request], len(self.tokens[request])
        ends = [done + 1, done + 2, done + most]
        sizes = (self.round, 4 * self.round, 64, 128, 256, 512)
        ends += [(done // size + 1) * size + self.rng.randint(-1, 1) for size in sizes]
        return min(self.rng.choice([end for end in ends if done < end <= done + most]), last)

    def step(self):
        self.change()
        waiting = self.rng.sample(sorted(self.tokens), self.rng.randint(1, len(self.tokens)))
        counts = {}
        for request in waiting:
            stop = self.stop_after(request, TOKENS // ROWS)
            others = [each for each in self.tokens if each != request and each not in counts]
            if self.takes(request, stop, others):
                counts[request] = stop - self.done[request]
        counts = dict(sorted(counts.items(), key=lambda item: item[1]))
        step = self.rng.choice((v4.decode_step, v4.prefill_step))
        logits, selected = [], []
        for rank, (model, cache) in enumerate(zip(self.models, self.caches, strict=True)):
            batch = padded_to(self.batch(counts, cache), TOKENS, ROWS + 1)
            run = self.of_ranks[step] if rank else step
            logits.append(run(model, batch, cache.tensors))
            selected.append(self.rows.take(sum(counts.values())))
        want, got = (each[: len(counts)] for each in logits)
        if step is v4.decode_step:
            want, got = (each[: sum(counts.values())] for each in logits)
        self.worst = max(self.worst, float((got - want).abs().max() / want.abs().max()))
        assert torch.equal(*selected), counts
        for request, count in counts.items():
            self.done[request] += count

    def batch(self, counts, cache):
        ids, starts, lens = [], [0], []
        for request, count in counts.items():
            done = self.done[request]
            ids += self.tokens[request][done : done + count]
            starts.append(len(ids))
            lens.append(done + count)
        rows = [cache.requests[request] for request in counts]
        ints = (torch.tensor(each, dtype=torch.int32) for each in (starts, lens, rows))
        return v4.StepBatch(torch.tensor(ids), *ints)

    def run(self, steps):
        with SelectedRows(TOPK) as self.rows:
            for _ in range(steps):
                self.step()
        for cache in self.caches:
            cache.raise_if_dropped()


def rank_serves(rank, family, seed, steps, compiles):
    """Runs the steps; what happened, the worst difference, and seconds a step."""
    interleave = Random(seed).choice(SIZES[family][1])
    served = Served(family, interleave, seed, compiles)
    began = time.monotonic()
    served.run(steps)
    seconds = (time.monotonic() - began) / steps
    assert served.worst < CLOSE, served.worst
    graphs = 2 if compiles else 0  # one of each function, whatever happens
    assert served.counter.frame_count == graphs, served.counter.frame_count
    return served.happened, interleave, served.worst, seconds


def serve(family, seed, steps, tmp_path, *, compiles):
    given = (family, seed, steps, compiles)
    found = run_ranks(2, rank_serves, tmp_path, *given, seconds=300)
    happened, interleave, worst, seconds = found[0]
    assert found[1][:2] == (happened, interleave)
    print(
        f"shown: {family} seed {seed} {steps=} {interleave=} {worst=:.1e} {seconds:.3f} {happened}"
    )
    return happened


@pytest.mark.nightly("test_context_parallel.py has V3, test_sharded_layers.py layers of V4")
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param("v3", marks=pytest.mark.nightly("the same of V4")), "v4"]
)
def test_a_few_steps(family, tmp_path):
    assert serve(family, 3, 12, tmp_path, compiles=False)["short"]


@pytest.mark.slow
@pytest.mark.nightly("ranks of fewer steps: test_context_parallel.py, test_sharded_layers.py")
@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("family", ["v3", "v4"])
def test_two_hundred_steps(family, seed, tmp_path):
    happened = serve(family, seed, 200, tmp_path, compiles=True)
    assert all(happened.values()), happened

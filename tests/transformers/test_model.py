"""A patched model has Hugging Face's logits in float32, for every split into steps."""

import functools
from random import Random

import pytest
import torch

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.integrations.transformers.steps import step as step_module
from dsv4_ops.testing.models import small_model
from tests.helpers import NIGHTLY, Called, nightly
from tests.support import hf_models
from tests.support.hf_models import LENGTH, REQUESTS, Engine, expected, new_cache, reference, text

CLOSE = 1e-4  # logits have a standard deviation of one


def test_prefill_then_decodes_as_hugging_face_calls_it():
    """The steps pass the end of the window, and two windows of 128."""
    model, cache, tokens = reference(), new_cache(max_cache_len=LENGTH), text()
    start, steps = (200, 64) if NIGHTLY else (246, 18)
    got = [model(tokens[:, :start], cache=cache, use_cache=True).logits]
    for place in range(start, start + steps):
        out = model(tokens[:, place : place + 1], cache=cache, use_cache=True)
        assert getattr(out, cache_argument()) is cache
        got.append(out.logits)
    got = torch.cat(got, 1)
    want = expected()[:, : start + steps]
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert cache.seq_lens.tolist() == [start + steps] * REQUESTS


@pytest.mark.parametrize("seed", [0, *nightly("the same with other chunks", 1)])
def test_random_chunks_of_ragged_batches(seed):
    """Decodes precede chunks, some requests pause or are padding, and blocks come from a pool."""
    rng = Random(seed)
    most = rng.choice([65, 130])
    cache = new_cache(num_blocks=6, max_chunk=most)
    engine = Engine(reference(), cache, text())
    while min(engine.done) < LENGTH:
        run = engine.decode if rng.random() < 0.5 else engine.prefill
        run(hf_models.random_counts(rng, engine.done, most), padding=rng.randrange(3))
    assert engine.worst(expected()) < CLOSE


def test_a_row_is_used_again():
    """Blocks and rings keep the values of the earlier request."""
    cache, tokens = new_cache(max_batch_size=1, num_blocks=2), text()
    for request in range(2):
        engine = Engine(reference(), cache, tokens)
        engine.prefill({request: 131})
        for _ in range(3):
            engine.decode({request: 1})
        assert engine.worst(expected()) < CLOSE
        cache.free(request)
    assert cache.num_free_blocks == 2


def test_speculative_tokens_are_taken_back():
    """A step has three tokens, two of them wrong; the next step overwrites all their values."""
    cache, tokens = new_cache(next_n=3), text().clone()
    engine = Engine(reference(), cache, tokens)
    engine.prefill({0: 126, 1: 5, 2: 60})
    rng = Random(3)
    while max(engine.done) < 145:
        engine.tokens = tokens.clone()
        for request, done in enumerate(engine.done):
            engine.tokens[request, done + 1 : done + 3] = rng.randrange(256)
        engine.decode({0: 3, 1: 3, 2: 3})
        for request in range(REQUESTS):
            engine.done[request] -= 2
            for place in (0, 1):
                del engine.logits[request][engine.done[request] + place]
    assert engine.worst(expected()) < CLOSE


def test_steps_of_no_more_tokens_than_may_be_taken_back_keep_their_states_at_once():
    """One op saves and compresses if each request has up to ``next_n`` tokens in a step."""
    model, tokens = reference(), text()
    for next_n, counts in ((1, {0: 1, 1: 1}), (2, {0: 2, 1: 1})):
        engine = Engine(model, new_cache(next_n=next_n), tokens)
        engine.prefill({0: 118, 1: 3})
        step = functools.partial(v4.decode_step, state_rings=False)
        with Called() as called:
            for _ in range(11):
                engine.decode(counts, step=step)
        assert engine.worst(expected()) < CLOSE
        assert "save_and_compress" in called.names
        assert "save_compressor_states" not in called.names


def test_too_long_a_chunk_does_not_spoil_other_requests(monkeypatch):
    """If values are not read, the last ``max_chunk`` tokens of a longer request are stored and the
    others counted; a padded batch is refused."""
    model, tokens = reference(), text()
    monkeypatch.setattr(step_module, "values_are_free", lambda *tensors: False)
    cache = new_cache(max_chunk=64)
    engine = Engine(model, cache, tokens)
    engine.prefill({0: 64})
    engine.prefill({1: 3, 2: LENGTH})
    engine.decode({0: 1, 1: 1})
    del engine.logits[2][LENGTH - 1]
    assert int(cache.tensors.dropped) == LENGTH - 65
    assert engine.worst(expected()) < CLOSE
    with pytest.raises(ValueError, match="sequence_length must be at most max_chunk of the cache"):
        model(tokens[:, :65], cache=cache)


def test_attention_is_batch_invariant():
    """In steps of one shape, a request's logits have the same bits beside any other requests."""
    model = v4.patch(small_model(), kv="fp32", precision="reference", batch_invariant=True)
    seen = []
    for neighbours in (text()[[0, 1, 2]], text()[[0, 2, 1]], text()[[0, 0, 0]]):
        cache = new_cache(model)
        engine = Engine(model, cache, neighbours.contiguous())
        engine.prefill({0: 126, 1: 10, 2: 3})
        for _ in range(4):
            engine.decode({0: 1, 1: 1, 2: 1})
        seen.append(torch.stack([engine.logits[0][place] for place in range(126, 130)]))
    torch.testing.assert_close(seen[0], expected()[0, 126:130], rtol=0, atol=CLOSE)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])

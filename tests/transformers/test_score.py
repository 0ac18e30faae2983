"""``patch(score=True)``: calls without a cache run our ops, so that a score shows our rounding."""

import functools

import pytest
import torch

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import SPARSE, small_mla_model, small_model

MAKERS = {
    "v4": functools.partial(small_model, layer_types=[SPARSE], mlp_layer_types=["moe"]),
    "v3": functools.partial(small_mla_model, num_hidden_layers=2),
}
IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(3))
LENGTHS = (40, 13)
MASK = torch.tensor([[1] * length + [0] * (40 - length) for length in LENGTHS])


def tokens(values):
    """Return the values of tokens that are not padding."""
    return values[MASK.bool()]


@pytest.mark.parametrize("name", MAKERS)
def test_a_plain_call_is_scored_by_our_ops(name, caches):
    """The values equal those of a step, and Hugging Face's up to rounding."""
    stock, model = MAKERS[name](), MAKERS[name]()
    v4.patch(model, kv="fp32", precision="reference", score=True)
    with torch.no_grad():
        want = stock(IDS).logits
        out = model(IDS)
        padded = model(IDS, attention_mask=MASK)
        loss = model(IDS, labels=IDS).loss
        want_loss = stock(IDS, labels=IDS).loss
    assert [(cache.max_batch_size, cache.max_cache_len) for cache in caches] == [(2, 40)] * 3
    torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(tokens(padded.logits), tokens(want), rtol=0, atol=1e-4)
    torch.testing.assert_close(loss, want_loss, rtol=0, atol=1e-5)
    cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=40)
    assert torch.equal(out.logits, model(IDS, cache=cache).logits)


@pytest.mark.parametrize("name", MAKERS)
def test_a_score_shows_what_fp8_costs(name):
    """Only losses with ``score`` show the rounding. Generation does not depend on ``score``."""
    losses = {}
    for score in (False, True):
        model = v4.patch(MAKERS[name](), kv="fp8", precision="reference", score=score)
        with torch.no_grad():
            losses[score] = float(model(IDS, labels=IDS).loss)
            cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=40)
            step = model(IDS, cache=cache)
    want = float(MAKERS[name]()(IDS, labels=IDS).loss)
    paged = float(model.loss_function(step.logits, IDS, vocab_size=model.config.vocab_size))
    assert losses[False] == pytest.approx(want, abs=1e-5)
    assert losses[True] == pytest.approx(paged, abs=1e-6)
    assert abs(losses[True] - want) > 1e-5


def test_calls_with_a_cache_keep_it(caches):
    model = v4.patch(MAKERS["v3"](), kv="fp32", precision="reference", score=True)
    made = model.generate(IDS[:1], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert len(caches) == 1
    own = model.generate(
        IDS[:1], max_new_tokens=2, do_sample=False, pad_token_id=0, cache_implementation="dynamic"
    )
    assert len(caches) == 1
    assert torch.equal(made, own)


def test_what_a_score_does_not_do():
    model = v4.patch(MAKERS["v3"](), kv="fp32", precision="reference", score=True)
    model.requires_grad_()
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="PagedCache"):
        model(IDS, labels=IDS).loss.backward()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"cache must be given to a compiled call of a model"):
        compiled(IDS)
    out = model(IDS[:, :3])
    with pytest.raises(ValueError, match="max_c"):
        model(IDS[:, 3:4], cache=out.past_key_values if "cache" not in out else out.cache)
    with pytest.raises(ValueError, match="model: input_ids must"):
        model()

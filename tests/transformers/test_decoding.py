"""``generate``'s loop on the device returns Hugging Face's tokens, and leaves the same cache."""

import copy
import pickle
import re

import pytest
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.generation import decoding
from dsv4_ops.integrations.transformers.generation.kept import STEPS
from dsv4_ops.integrations.transformers.steps.dry_runs import padding
from dsv4_ops.testing.models import small_mla_model, small_model
from tests.helpers import nightly
from tests.support.ranks import run_ranks

PROMPT = torch.tensor([[3, 5, 7, 11, 13, 17, 19], [2, 4, 6, 8, 10, 12, 14]])
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9}
FAMILIES = ["v3", *nightly("the loop knows no family", "v4")]


def patched(family, parallel=None, **sizes):
    made = small_model(**sizes) if family == "v4" else small_mla_model(**sizes)
    made = v4.patch(made, kv="fp32", precision="reference", parallel=parallel)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return patched(request.param)


class Same(transformers.LogitsProcessor):
    """A user's own processor, which our loop does not support: Hugging Face's loop runs."""

    def __call__(self, input_ids, scores):
        return scores


def generate(model, ids=PROMPT, *, stock=False, **settings):
    """Generate with our loop or, if ``stock``, with Hugging Face's."""
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, **settings}
    processors = transformers.LogitsProcessorList([Same()] if stock else [])
    return model.generate(ids, logits_processor=processors, **settings)


class Calls:
    """Records the calls that our loop decodes."""

    def __init__(self, monkeypatch):
        self.texts, before = [], decoding.decoded
        monkeypatch.setattr(
            decoding, "decoded", lambda *args: self.texts.append(before(*args)) or self.texts[-1]
        )


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(decoding, "_check_every", lambda device: 3)
    return Calls(monkeypatch)


def both(model, calls, ids=PROMPT, *, paged=None, **settings):
    """Return the tokens of both loops, which are equal, and the caches of the two."""
    results = []
    for stock in (False, True):
        cache = None if paged is None else v4.PagedCache.for_model(model, **paged)
        own = {} if cache is None else {"cache": cache}
        torch.manual_seed(7)
        before = len(calls.texts)
        out = generate(model, ids, stock=stock, **{"max_new_tokens": 12, **own, **settings})
        assert len(calls.texts) - before == (not stock)
        results.append((out, cache))
    (ours, cache), (stock, other) = results
    assert torch.equal(ours, stock)
    assert ours.dtype == stock.dtype
    return ours, cache, other


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_new_tokens": 1},
        {"repetition_penalty": 1.3},
        SAMPLED,
        {**SAMPLED, "repetition_penalty": 1.2, "min_p": 0.01},
        {"do_sample": True, "top_k": 0, "typical_p": 0.9, "epsilon_cutoff": 1e-4},
    ],
)
def test_tokens_are_hugging_faces(model, calls, settings):
    both(model, calls, **settings)


@pytest.mark.parametrize(
    ("row", "at"), [(0, 7), (1, 9), *nightly("those before", (0, 10), (1, 11), (0, 16))]
)
def test_texts_end_at_their_tokens(model, calls, row, at):
    """One text ends first: before, at or after a check by the host, which is every three tokens."""
    plain, _, _ = both(model, calls)
    paged = {"max_batch_size": 2, "max_cache_len": 64}
    ids, cache, other = both(model, calls, eos_token_id=int(plain[row, at]), paged=paged)
    assert ids.shape[1] <= plain.shape[1]
    assert cache.seq_lens.tolist() == other.seq_lens.tolist()
    assert (cache.text is None) == (other.text is None)
    if cache.text is not None:
        assert torch.equal(cache.text.mask, other.text.mask)


def test_all_texts_end_between_two_looks(model, calls):
    """One request's text ends with the second new token."""
    plain, _, _ = both(model, calls, PROMPT[:1])
    eos = int(plain[0, 8])
    first = plain[0, 7:].tolist().index(eos)
    paged = {"max_batch_size": 1, "max_cache_len": 64}
    ids, cache, other = both(model, calls, PROMPT[:1], eos_token_id=[eos, 1], paged=paged)
    assert ids.shape[1] == 7 + first + 1
    assert cache.seq_lens.tolist() == other.seq_lens.tolist() == [7 + first]


def test_a_conversation_goes_on(model, calls):
    """The second turn computes only what the cache lacks."""
    outs = []
    for stock in (False, True):
        cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64)
        ids = PROMPT
        for _ in range(2):
            ids = generate(model, ids, stock=stock, cache=cache, max_new_tokens=6)
            ids = torch.cat([ids, PROMPT[:, :2]], 1)
        outs.append((ids, cache.seq_lens.tolist()))
    assert torch.equal(outs[0][0], outs[1][0])
    assert outs[0][1] == outs[1][1]
    assert len(calls.texts) == 2


class Stream(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ended = True


def test_streamers_get_every_token(model, calls):
    plain, _, _ = both(model, calls, PROMPT[:1])
    eos = int(plain[0, 11])
    streams = []
    for stock in (False, True):
        streams.append(Stream())
        settings = {"max_new_tokens": 12, "eos_token_id": eos, "streamer": streams[-1]}
        generate(model, PROMPT[:1], stock=stock, **settings)
    assert streams[0].puts == streams[1].puts
    assert all(stream.ended for stream in streams)


@pytest.mark.parametrize(
    "settings",
    [
        {"return_dict_in_generate": True},
        {"bad_words_ids": [[5]]},
        {"max_time": 100.0},
        {"num_beams": 2, "cache_implementation": "dynamic"},
    ],
)
def test_other_calls_are_hugging_faces(model, calls, settings):
    generate(model, **settings)
    assert calls.texts == []


def test_another_text_in_a_used_cache_is_refused(model):
    """The first row of the second prompt differs from the cache at token 5."""
    cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64)
    out = generate(model, max_new_tokens=4, cache=cache)
    other = torch.cat([out, PROMPT[:, :2]], 1)
    other[1, 5] += 1
    text = (
        "generate: input_ids must begin with the text that the cache stores, got another token at "
        "5 of 10 in row 1. Pass the whole conversation, or call cache.reset() to begin a new one."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        generate(model, other, max_new_tokens=4, cache=cache)
    assert cache.seq_lens.tolist() == [10, 10]
    cache.reset()
    assert torch.equal(generate(model, max_new_tokens=4, cache=cache), out)


def test_caches_of_others_are_refused(model):
    other = small_mla_model() if "V4" in type(model).__name__ else small_model()
    other = v4.patch(other, kv="fp32", precision="reference")
    cache = v4.PagedCache.for_model(other, max_batch_size=2, max_cache_len=64)
    with pytest.raises((ValueError, TypeError), match=r"cache must have the (layers|model)"):
        model.generate(PROMPT, cache=cache, max_new_tokens=2)
    with pytest.raises(TypeError, match=r"PagedCache, or another Cache .*, got a CacheTensors"):
        model.generate(PROMPT, cache=cache.tensors, max_new_tokens=2)


def test_masks_are_0_or_1(model):
    mask = torch.ones_like(PROMPT) / 2
    with pytest.raises(ValueError, match=r"attention_mask must be 0 or 1, got 0\.5"):
        model.generate(PROMPT, attention_mask=mask, max_new_tokens=2, pad_token_id=0)


class Banning:
    """A model whose own forward bans most tokens."""

    def forward(self, *args, **rest):
        out = super().forward(*args, **rest)
        out.logits[..., :200] = -torch.inf
        return out


class Caseless:
    """A model whose own inputs are other tokens."""

    def prepare_inputs_for_generation(self, input_ids, **rest):
        return super().prepare_inputs_for_generation(input_ids // 2 * 2, **rest)


@pytest.mark.parametrize("mixin", [Banning, Caseless])
def test_methods_of_a_subclass_are_called(calls, mixin):
    own = small_mla_model()
    own.__class__ = type("Own", (mixin, type(own)), {})
    own = v4.patch(own, kv="fp32", precision="reference")
    texts = (generate(own, stock=stock, eos_token_id=None) for stock in (False, True))
    assert torch.equal(*texts)
    assert calls.texts == []


@pytest.mark.parametrize("name", ["", "lm_head"], ids=["the model", "its head"])
def test_hooks_are_called_and_get_their_shapes(model, calls, name):
    seen = []
    hook = model.get_submodule(name).register_forward_hook(lambda *call: seen.append(call[2]))
    try:
        generate(model)
    finally:
        hook.remove()
    assert [getattr(out, "logits", out).dim() for out in seen] == [3, 3, 3]
    assert calls.texts == []


def test_probabilities_that_are_not_finite_are_refused(model, calls):
    for stock in (False, True):
        with pytest.raises(RuntimeError, match=r"inf.*nan|probability"):
            generate(model, stock=stock, do_sample=True, top_k=0, temperature=1e-42)


def test_the_least_of_several_lengths_ends_a_text(model, calls):
    ends = [transformers.MaxLengthCriteria(length) for length in (11, 9)]
    both(model, calls, stopping_criteria=transformers.StoppingCriteriaList(ends))


def test_the_random_state_after_a_text_is_hugging_faces(model, calls, monkeypatch):
    monkeypatch.undo()
    calls = Calls(monkeypatch)
    settings = {**SAMPLED, "max_new_tokens": 12}
    torch.manual_seed(7)
    settings["eos_token_id"] = int(model.generate(PROMPT[:1], pad_token_id=0, **settings)[0, 9])
    after = []
    for stock in (False, True):
        torch.manual_seed(7)
        generate(model, PROMPT[:1], stock=stock, **settings)
        after.append(torch.rand(1).item())
    assert after[0] == after[1]
    assert len(calls.texts) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_one_compile_serves_batches_and_lengths(family, calls, tmp_path):
    check_one_compile(0, family)
    assert len(calls.texts) == 9
    run_ranks(2, check_one_compile, tmp_path, family, ContextParallel.of)


def check_one_compile(rank, family, share=lambda: None):
    """With the eager backend, another batch, prompt or length compiles nothing."""
    from transformers import CompileConfig

    single, model = (patched(family, each, num_hidden_layers=1) for each in (None, share()))
    counted = []
    config = CompileConfig(backend=lambda graph, _: counted.append(graph) or graph.forward)
    config._compile_all_devices = True
    rows = torch.cat([PROMPT, PROMPT.flip(0), PROMPT + 1])
    first = None
    for ids, count in ((rows[:3], 6), (rows[:1], 4), (rows, 3), (rows[:2, :4], 9)):
        ours = generate(model, ids, max_new_tokens=count, compile_config=config)
        assert torch.equal(ours, generate(single, ids, max_new_tokens=count))
        first = len(counted) if first is None else first
    assert len(counted) == first > 0
    assert len(getattr(model, STEPS)) == 1
    eos, streamer = int(ours[0, 6]), None if rank else Stream()
    with pytest.MonkeyPatch.context() as patch:  # ranks run the same steps if one of them streams
        patch.setattr(decoding, "_check_every", lambda _: 8)
        generate(model, ids[:1], max_new_tokens=20, eos_token_id=eos, streamer=streamer)


def test_copies_compile_their_own(model):
    steps = getattr(model, STEPS)
    assert isinstance(copy.deepcopy(steps), decoding.CompiledSteps)
    assert len(pickle.loads(pickle.dumps(steps))) == 0


def test_inputs_of_steps_share_no_memory(model, monkeypatch):
    """With one text, AOTAutograd would compile another graph if inputs were views of one tensor."""
    batches, before = [], decoding.decode_step

    def step(model, batch, *args, **rest):
        batches.append(batch)
        return before(model, batch, *args, **rest)

    monkeypatch.setattr(decoding, "decode_step", step)
    generate(model, PROMPT[:1])
    for batch in (*batches, padding(1, 1, torch.device("cpu"))):
        storages = {each.untyped_storage().data_ptr() for each in vars(batch).values()}
        assert len(storages) == 4
    assert len(batches) == 2


def test_a_prompt_has_rows(model):
    with pytest.raises(ValueError, match=r"inputs must have shape \[batch, tokens\], got \[7\]"):
        model.generate(PROMPT[0], max_new_tokens=2)

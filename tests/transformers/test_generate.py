"""``generate`` of a patched model: Hugging Face's tokens, with every kind of cache, and errors
before anything is written."""

from copy import deepcopy
from functools import lru_cache

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.testing.models import small_dsa_model, small_mla_model, small_model
from dsv4_ops.testing.text import PAD
from tests.helpers import nightly
from tests.support.hf_models import check_states, new_cache, reference, stock, text

PROMPT, NEW = 12, 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


def ids():
    return text()[:2, :PROMPT]


def cache_of(**sizes):
    return new_cache(**{"max_batch_size": 2, "max_cache_len": 64, **sizes})


def generate(model, tokens=None, **settings):
    return model.generate(ids() if tokens is None else tokens, **{**GREEDY, **settings})


@lru_cache
def wanted():
    return generate(stock())


@pytest.mark.parametrize("make", [small_model, small_mla_model, small_dsa_model])
def test_tensors_are_made_on_the_device_of_the_model(make):
    """``patch`` and ``generate`` ignore the default device."""
    model, tokens = make(), ids()
    want = generate(model, tokens)
    with torch.device("meta"):
        v4.patch(model, kv="fp32", precision="reference")
        assert torch.equal(generate(model, tokens), want)


@pytest.mark.parametrize("kind", [None, "static", "dynamic"])
def test_greedy_tokens(kind):
    settings = {"cache_implementation": kind} if kind else {}
    out = generate(reference(), return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, wanted())
    cache = getattr(out, cache_argument())
    if kind == "dynamic":
        assert type(cache) is transformers.DynamicCache
    else:
        assert isinstance(cache, v4.PagedCache)
        assert cache.seq_lens.tolist() == [PROMPT + NEW - 1] * 2


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"max_batch_size": 5, "num_blocks": 2}, {}),
        ({"max_cache_len": PROMPT + NEW - 1}, {}),  # the last token is not stored
        ({"max_chunk": 5}, {"prefill_chunk_size": 5}),
    ],
    ids=str,
)
def test_greedy_tokens_from_a_given_cache(sizes, settings):
    cache = cache_of(**sizes)
    assert torch.equal(generate(reference(), cache=cache, **settings), wanted())
    assert cache.seq_lens.tolist()[:2] == [PROMPT + NEW - 1] * 2
    assert cache.requests == {0: 0, 1: 1}


def test_requests_of_a_given_cache_get_more_pages():
    cache = cache_of(max_cache_len=600, num_blocks=5)
    for request in ("a", "b"):
        cache.add(request, 1)
    assert torch.equal(generate(reference(), cache=cache), wanted())
    assert (cache.num_free_blocks, cache.requests) == (3, {"a": 0, "b": 1})


def test_samples_with_a_seed():
    found = []
    cases = (stock(), None), (reference(), None), (reference(), cache_of(max_batch_size=6))
    for model, cache in cases:
        torch.manual_seed(5)
        sampling = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7, "top_k": 0}
        found.append(generate(model, cache=cache, **sampling))
    assert found[0].shape == (6, PROMPT + NEW)
    assert len(found[0].unique(dim=0)) == 6
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_embeddings():
    """The model has no hash routers, which need ids."""
    model = small_model(mlp_layer_types=["moe"] * 3)
    embeddings = model.get_input_embeddings()(ids())
    want = generate(model)[:, PROMPT:]
    v4.patch(model, kv="fp32", precision="reference")
    assert torch.equal(model.generate(inputs_embeds=embeddings, **GREEDY)[:, -NEW:], want)


def test_copies_of_a_cache_share_a_prompt():
    """The copies are those of Hugging Face's guide to prompt caching."""
    prompt = cache_of()
    reference()(ids(), cache=prompt)
    for _ in range(2):
        turn = torch.cat([ids(), text()[:2, 50:55]], 1)
        cache = deepcopy(prompt)
        assert torch.equal(generate(reference(), turn, cache=cache), generate(stock(), turn))
        assert cache.seq_lens.tolist() == [PROMPT + 5 + NEW - 1] * 2
        assert prompt.seq_lens.tolist() == [PROMPT] * 2


def added(*requests, **sizes):
    cache = cache_of(**sizes)
    for request in requests:
        cache.add(request)
    return cache


def short():
    return cache_of(max_cache_len=PROMPT + NEW - 2)


BEAMS = "num_beams must be 1 with a PagedCache, got 2. Pass cache_implementation='dynamic' instead."
NO_BLOCKS = "max_new_tokens must fit into the free blocks, 3 of 3, got tokens for 4 more blocks"
MOST = "batch size must be at most max_batch_size of the cache = {}, got {}"
TWO = {"do_sample": True, "num_return_sequences": 2}
FEW = {"num_blocks": 3, "max_cache_len": 600}
ALL = f"the prompt has {PROMPT} tokens, and the cache stores all tokens but the last, "
ALL += f"{PROMPT + NEW - 2} in all"
NO_ROOM = f"cache must store the {PROMPT} tokens of the prompt, got max_cache_len = {PROMPT - 1}."
REFUSED = {
    "no room": (lambda: cache_of(max_cache_len=PROMPT - 1), {}, NO_ROOM),
    "too many new": (short, {}, f"max_new_tokens must be at most {NEW - 1} here: {ALL}, got {NEW}"),
    "too long": (short, {"max_new_tokens": None, "max_length": PROMPT + NEW},
     f"max_length must be at most {PROMPT + NEW - 1} here: {ALL}, got {PROMPT + NEW}"),
    "too wide": (lambda: cache_of(max_batch_size=1), {}, MOST.format(1, 2)),
    "too many samples": (cache_of, TWO, MOST.format(2, 4)),
    "no blocks for all": (lambda: cache_of(**FEW), {"max_new_tokens": 400}, NO_BLOCKS),
    "no blocks for more": (lambda: added("a", "b", **FEW), {"max_new_tokens": 400}, NO_BLOCKS),
    "a row of nobody": (lambda: added("a", num_blocks=3), {}, "cache must have a request in each"),
    "beams": (cache_of, {"num_beams": 2}, BEAMS),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_errors_before_anything_is_written(case):
    make, settings, message = REFUSED[case]
    cache = make()

    def state():
        return [leaf.clone() for leaf in tree_leaves((cache.seq_lens, cache.tensors))]

    before, requests, free = state(), cache.requests, cache.num_free_blocks
    with pytest.raises((ValueError, v4.OutOfBlocks, NotImplementedError)) as raised:
        generate(reference(), cache=cache, **settings)
    assert str(raised.value).startswith(f"generate: {message}")
    assert all(torch.equal(old, new) for old, new in zip(before, state(), strict=True))
    assert (cache.requests, cache.num_free_blocks) == (requests, free)


def test_beams():
    beams = {"num_beams": 2, "num_return_sequences": 2}
    assert torch.equal(generate(reference(), **beams), generate(stock(), **beams))
    with pytest.raises(NotImplementedError) as raised:
        generate(reference(), cache_implementation="static", **beams)
    assert str(raised.value) == f"generate: {BEAMS}"


@pytest.mark.parametrize(
    "mask",
    [
        *[torch.ones(shape) for shape in [(2, 11), (2, 0), (3, 12), (12,)]],
        torch.zeros(2, 11),
        [[1] * PROMPT] * 2,
        {"full_attention": torch.ones(2, PROMPT)},
    ],
    ids=str,
)
def test_masks_are_of_the_prompts(mask):
    """A wrong mask is refused for prompts in every form, and with every kind of cache."""
    found = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    cache, embedded = cache_of(), reference().model.embed_tokens(ids())
    for given in (
        {"inputs": ids(), "cache": cache},
        {"input_ids": ids()},
        {"input_ids": ids(), "prefill_chunk_size": 4},
        {"inputs_embeds": embedded, "cache_implementation": "dynamic"},
    ):
        with pytest.raises(ValueError, match=r"^generate: attention_mask must have") as raised:
            reference().generate(attention_mask=mask, **given, **GREEDY)
        assert f"shape [2, 12 or more], got {found}. Pass the mask" in str(raised.value)
    assert cache.requests == {}


def test_what_hugging_face_refuses():
    cache = cache_of()
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        generate(reference(), cache=cache, cache_implementation="static")
    assert cache.requests == {}
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(reference(), prompt_lookup_num_tokens=3)
    with pytest.raises(NotImplementedError, match=r"^generate: use_mtp .*got True. Pass num_draft"):
        generate(reference(), use_mtp=True)
    with pytest.raises(NotImplementedError, match="output_attentions must be False"):
        generate(reference(), output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize(
    ("chunk", "settings"),
    [
        (5, {}),
        *nightly("chunks of the cache", (64, {}), (64, {"prefill_chunk_size": 5}),
         (5, {"prefill_chunk_size": 5})),
    ],
)  # fmt: skip
def test_hidden_states(chunk, settings):
    """A prompt's hidden states are those of one step, however many chunks it takes. If chunks are
    requested, the states are those of the last chunk."""
    record = {"output_hidden_states": True, "return_dict_in_generate": True}
    want = generate(stock(), **record, **settings).hidden_states
    got = generate(reference(), cache=cache_of(max_chunk=chunk), **record, **settings)
    assert len(got.hidden_states) == len(want) == NEW
    for ours, others in zip(got.hidden_states, want, strict=True):
        for one, other in zip(ours, others, strict=True):
            check_states(one, other)


@pytest.mark.parametrize("shape", [(1, 0), (2, 0), (0, 5), (0,)], ids=str)
def test_empty_prompts(shape):
    """Hugging Face's own errors would be about its tensors."""
    model, width = reference(), reference().config.hidden_size
    ids = torch.zeros(shape, dtype=torch.int64)
    kinds = [("inputs", ids), ("input_ids", ids)]
    if len(shape) == 2:
        kinds.append(("inputs_embeds", torch.zeros(*shape, width)))
    for name, prompt in kinds:
        for settings in ({}, {"cache_implementation": "dynamic"}, {"use_cache": False}):
            for cache in (None, cache_of()) if not settings else (None,):
                with pytest.raises(ValueError, match=f"^generate: {name} must have a row and a"):
                    model.generate(**{name: prompt}, cache=cache, **settings, **GREEDY)
    with pytest.raises(ValueError, match="must have a row and a token"):
        model.generate(ids, **GREEDY)


def test_no_prompt():
    with pytest.raises(ValueError, match="`bos_token_id` has to be defined"):
        reference().generate(bos_token_id=None, **GREEDY)
    want = stock().generate(bos_token_id=3, **GREEDY)
    assert want.shape == (1, NEW + 1)
    assert torch.equal(reference().generate(bos_token_id=3, **GREEDY), want)


@lru_cache
def mla(version, patched, **fields):
    model = small_mla_model(version=version, **fields)
    return v4.patch(model, kv="fp32", precision="reference") if patched else model


def repeated():
    """Return a text that repeats itself, in which look-ups find drafts."""
    return text()[:1, :8].repeat(1, 3)


ASSISTED = {
    "prompt_lookup_num_tokens": lambda version: 3,
    "assistant_early_exit": lambda version: 1,
    "assistant_model": lambda version: mla(version, False, num_hidden_layers=2),
    "patched assistant_model": lambda version: mla(version, True, num_hidden_layers=2),
}


@pytest.mark.parametrize(
    ("name", "version", "sampled"),
    [
        *((name, 3, False) for name in ASSISTED),
        ("prompt_lookup_num_tokens", 2, True),
        ("assistant_model", 3, True),
    ],
)
def test_assisted_decoding_of_v3_and_v2(name, version, sampled):
    drafts = {name.split()[-1]: ASSISTED[name](version)}
    found = []
    for patched in (False, True):
        torch.manual_seed(3)
        settings = {"max_new_tokens": 12, "do_sample": sampled, "top_k": 0, **drafts}
        found.append(generate(mla(version, patched), repeated(), **settings))
    assert torch.equal(*found)


def test_drafts_are_accepted_and_rejected(monkeypatch):
    """Unless drafts are accepted and rejected, the test above shows nothing."""
    crops, cropped = [], v4.PagedCache.crop

    def crop(cache, tokens_to_remove):
        crops.append(int(tokens_to_remove))
        return cropped(cache, tokens_to_remove)

    monkeypatch.setattr(v4.PagedCache, "crop", crop)
    model = mla(3, True)
    own = {"assistant_model": model, "max_new_tokens": 12}
    plain = generate(model, repeated(), max_new_tokens=12)
    assert torch.equal(generate(model, repeated(), **own), plain)
    assert len(crops) < 12  # the model accepts its own drafts
    crops.clear()
    generate(model, repeated(), prompt_lookup_num_tokens=3, max_new_tokens=12)
    assert min(crops) < 0


def test_assisted_decoding_from_a_given_cache():
    model, drafts = mla(3, True), {"prompt_lookup_num_tokens": 3}
    sizes = {"max_batch_size": 1, "max_cache_len": 128, "num_blocks": 2}
    cache = v4.PagedCache.for_model(model, **sizes)
    first = generate(model, repeated(), cache=cache, **drafts)
    assert torch.equal(first, generate(mla(3, False), repeated()))
    assert cache.seq_lens.tolist() == [24 + NEW - 1]
    turn = torch.cat([first, text()[1:2, :7]], 1)
    second = generate(model, turn, cache=cache, **drafts)
    assert torch.equal(second, generate(mla(3, False), turn))
    small = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=24 + NEW + 1)
    message = rf"max_new_tokens must be at most {NEW - 1} here: .*, and 3 drafts, 31 "
    with pytest.raises(ValueError, match=message):
        generate(model, repeated(), cache=small, **drafts)
    assert small.requests == {}


@pytest.mark.parametrize("pad", [3, *nightly("three tokens of padding", 0)])
def test_assisted_decoding_that_ends_and_of_padded_prompts(pad):
    mask = torch.cat([torch.zeros(1, pad), torch.ones(1, 24)], 1).long()
    tokens = torch.cat([torch.full((1, pad), PAD), repeated()], 1)
    plain = generate(mla(3, False), tokens, attention_mask=mask, max_new_tokens=20)
    settings = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": int(plain[0, -8])}
    want = generate(mla(3, False), tokens, **settings)
    assert want.shape[1] < plain.shape[1]
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": mla(3, True)}):
        assert torch.equal(generate(mla(3, True), tokens, **drafts, **settings), want)


def test_crop_moves_lengths_back():
    cache = v4.PagedCache.for_model(mla(3, True), max_batch_size=3, max_cache_len=64)
    cache.seq_lens.copy_(torch.tensor([9, 4, 0]))
    lens = cache.seq_lens
    cases = (0, [9, 4, 0]), (-3, [6, 1, 0]), (torch.tensor(-2), [4, 0, 0]), (3, [3, 0, 0])
    for count, want in cases:
        cache.crop(count)
        assert cache.seq_lens.tolist() == want
    assert cache.seq_lens is lens
    assert cache.is_croppable
    assert not cache_of().is_croppable
    with pytest.raises(NotImplementedError, match=r"^PagedCache: crop .*make the cache with next_"):
        cache_of().crop(-1)

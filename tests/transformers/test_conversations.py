"""Conversations through ``generate`` on one cache, and batches with any padding, against each
request alone; and which calls are refused."""

from random import Random

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.testing.text import PAD
from tests.helpers import NIGHTLY, nightly
from tests.support.hf_models import new_cache, reference, stock

NEW, CLOSE = 5, 1e-4
RECORD = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}


class Conversation:
    """Turns of a batch; it stores the tokens of every request, so that each can run alone.

    Args:
        rows: Number of requests.
        rng: Samples new tokens.
        pad: The id of padding; no prompt has it, but the model may generate it.
        sizes: Sizes of the cache.
    """

    def __init__(self, rows, rng, pad=PAD, **sizes):
        self.pad = pad
        self.rng, self.cache = rng, new_cache(max_batch_size=rows, max_cache_len=400, **sizes)
        self.ids = torch.zeros(rows, 0, dtype=torch.int64)
        self.mask = torch.zeros(rows, 0, dtype=torch.int64)
        self.ended_early = 0

    def say(self, counts, padding=0):
        """Append new tokens, padded on the left to one length or more."""
        width = max(counts) + padding
        ids = torch.full((len(counts), width), self.pad)
        for row, count in enumerate(counts):
            words = [self.rng.choice(range(256)) for _ in range(count)]
            words = [word + (word == self.pad) for word in words]
            ids[row, width - count :] = torch.tensor(words)
        self.ids = torch.cat([self.ids, ids], 1)
        self.mask = torch.cat([self.mask, (ids != self.pad).long()], 1)

    def pad_anew(self):
        """Move all padding to the left, as a tokenizer pads a conversation's text."""
        real = [row[there > 0] for row, there in zip(self.ids, self.mask, strict=True)]
        width = max(map(len, real))
        self.ids = torch.full((len(real), width), self.pad)
        self.mask = torch.zeros_like(self.ids)  # the model sometimes generates PAD itself
        for row, tokens in enumerate(real):
            self.ids[row, width - len(tokens) :] = tokens
            self.mask[row, width - len(tokens) :] = 1

    def answer(self, eos=None, **given):
        """Generate, check the logits of every token, and append the answers."""
        begin = self.ids.shape[1]
        given = {"input_ids": self.ids, "attention_mask": self.mask, **RECORD, **given}
        given |= {"eos_token_id": eos, "pad_token_id": self.pad, "max_new_tokens": NEW}
        out = reference().generate(cache=self.cache, **given)
        answers = out.sequences[:, -len(out.logits) :]
        ended = answers == (-1 if eos is None else eos)
        there = ended.cumsum(1) - ended.long() == 0
        self.ended_early += int((~there).any())
        self.ids = torch.cat([self.ids, answers], 1)
        self.mask = torch.cat([self.mask, there.long()], 1)
        logits = torch.stack(out.logits, 1)
        for row, (ids, mask) in enumerate(zip(self.ids, self.mask, strict=True)):
            count = int(there[row].sum())
            want = stock()(ids[mask > 0][None]).logits[0, -count - 1 : -1]
            torch.testing.assert_close(logits[row, :count], want, rtol=0, atol=CLOSE)
            assert torch.equal(answers[row, :count], want.argmax(-1))
        assert begin < self.ids.shape[1]
        return answers


def begun(counts, seed, padding=0, **sizes):
    """Return a conversation with its first prompts."""
    turns = Conversation(len(counts), Random(seed), **sizes)
    turns.say(counts, padding)
    return turns


def test_a_turn_after_an_early_end():
    """The longest request continues while others are padded."""
    turns = begun([9, 9], 1)
    eos = int(turns.answer()[0, 1])
    turns = begun([9, 9], 1)
    turns.answer(eos)
    assert turns.ended_early
    assert turns.cache.seq_lens.tolist() == [11, 13]
    turns.say([3, 6])
    turns.answer(eos)
    turns.say([8, 2], padding=2)
    turns.pad_anew()
    turns.answer(eos)


def test_prompts_of_a_second_turn_are_padded_to_different_lengths():
    chunk = 20
    turns = begun([30, 12, 22], 2, padding=1)
    turns.answer(prefill_chunk_size=chunk, attention_mask=None)
    turns.say([5, 117, 2])
    turns.answer(prefill_chunk_size=chunk)
    turns.pad_anew()
    turns.say([5, 1, 12])
    turns.answer(prefill_chunk_size=chunk)


@settings(max_examples=20 if NIGHTLY else 2, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_conversations(seed):
    rng = Random(seed)
    rows = rng.randint(2, 3)
    sizes = rng.choice([{}, {"max_chunk": 32}, {"num_blocks": 6}])
    turns, eos = Conversation(rows, rng, **sizes), None
    for _ in range(3):
        longest = rng.choice([4, 20, 60])
        turns.say([rng.randint(1, longest) for _ in range(rows)], rng.choice([0, 3]))
        given = {"prefill_chunk_size": rng.choice([None, 9, 50])}
        if rng.random() < 0.5:
            turns.pad_anew()
        elif rng.random() < 0.5:
            given["attention_mask"] = None
        answers = turns.answer(eos, **given)
        # if a text ended with PAD, no mask could be derived
        eos = rng.choice([one for one in answers[:, :3].flatten().tolist() if one != PAD])


@settings(max_examples=20 if NIGHTLY else 2, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_masks(seed):
    """Calls of the model have padding anywhere, over several steps of one cache."""
    rng = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    cache, texts, seen = new_cache(max_batch_size=2, max_cache_len=300), [[], []], [[], []]
    for _ in range(4):
        width = rng.choice([1, 2, 9, 70])
        ids = torch.randint(0, 256, (2, width), generator=generator)
        share = rng.choice([0.1, 0.5, 0.9])
        mask = (torch.rand(2, width, generator=generator) < share).long()
        logits = reference()(ids, attention_mask=mask, cache=cache).logits
        for row in (0, 1):
            texts[row] += ids[row, mask[row] > 0].tolist()
            seen[row].append(logits[row, mask[row] > 0])
    for words, found in zip(texts, seen, strict=True):
        if words:
            want = stock()(torch.tensor([words])).logits[0]
            torch.testing.assert_close(torch.cat(found), want, rtol=0, atol=CLOSE)
    assert cache.seq_lens.tolist() == [len(words) for words in texts]


def said_by_the_model(*counts, seed=8):
    """Return an id that is in the model's first answer, but in no prompt."""
    turns = begun(counts, seed)
    said = turns.answer()[:, :-1].flatten().tolist()
    return next(one for one in said if not (turns.ids == one)[:, :-NEW].any())


@pytest.mark.parametrize("counts", [(9, 4), *nightly("two rows", ((9,),))])
def test_a_text_that_holds_the_pad_id_goes_on_without_a_mask(counts):
    """Tokens that the cache stores never count as padding, even with the id of padding."""
    pad = said_by_the_model(*counts)
    turns = begun(counts, 8, pad=pad)
    turns.answer(attention_mask=None)
    assert ((turns.ids == pad) & (turns.mask > 0)).any()
    for new in (3, 5), (4, 1):
        turns.say(new[: len(counts)], padding=1 if len(counts) > 1 else 0)
        turns.answer(attention_mask=None)


def test_a_text_that_ended_early_and_holds_the_pad_id_goes_on_without_a_mask():
    pad = said_by_the_model(9, 9)
    turns = begun([9, 9], 8, pad=pad)
    answers = turns.answer()
    eos = next(int(one) for one in answers[0, 1:-1] if int(one) != pad)
    turns = begun([9, 9], 8, pad=pad)
    turns.answer(eos, attention_mask=None)
    assert turns.ended_early
    for new in (3, 6), (8, 2):
        turns.say(new)
        turns.answer(eos, attention_mask=None)


def test_a_text_that_ended_a_token_before_the_others_goes_on_without_a_mask():
    """The cache has as many tokens of the answer as Hugging Face's, and the text is padded."""
    turns = begun([9, 9], 1)
    eos = int(turns.answer()[0, NEW - 2])
    turns = begun([9, 9], 1)
    turns.answer(eos, attention_mask=None)
    assert turns.mask.sum(1).tolist() == [9 + NEW - 1, 9 + NEW]
    assert turns.cache.seq_lens.tolist() == [9 + NEW - 1] * 2
    turns.say([3, 6])
    turns.answer(eos, attention_mask=None)


def test_a_prompt_that_holds_the_pad_id():
    """Hugging Face takes this token for padding, so later turns do, too."""
    turns = begun([9], 9)
    turns.ids[0, 4] = PAD
    turns.mask[0, 4] = 0
    turns.answer(attention_mask=None)
    turns.say([3])
    turns.answer(attention_mask=None)


def test_a_prompt_in_a_cache_that_holds_the_pad_id():
    """Prompt caching: a call of the model stores the whole prompt."""
    turns = begun([9, 9], 10)
    turns.ids[0, 4] = turns.ids[1, 8] = PAD
    reference()(turns.ids, cache=turns.cache)
    turns.say([3, 3])
    turns.answer(attention_mask=None)


def test_what_may_be_padding_is_refused_without_a_mask():
    turns = begun([9, 4], 11)
    reference()(turns.ids, attention_mask=turns.mask, cache=turns.cache)
    turns.say([3, 3])
    lens = turns.cache.seq_lens.clone()
    with pytest.raises(ValueError, match=r"^generate: attention_mask must be given .*has an"):
        turns.answer(attention_mask=None)
    assert torch.equal(turns.cache.seq_lens, lens)
    turns.answer()
    turns.say([2, 5])
    turns.pad_anew()
    with pytest.raises(ValueError, match="attention_mask must be given"):
        turns.answer(attention_mask=None)
    turns.answer()


def test_prompts_longer_than_a_chunk_are_cut():
    begun([50, 33], 3, max_chunk=16).answer()
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    for settings_, most in (({}, 42), ({"prefill_chunk_size": 9}, 16)):
        out = reference().generate(
            ids, max_new_tokens=2, eos_token_id=None, pad_token_id=PAD, **RECORD, **settings_
        )
        assert getattr(out, cache_argument()).max_chunk == most


class Third(transformers.StoppingCriteria):
    """Ends the first request at its third token; no padding follows automatically."""

    def __call__(self, input_ids, scores, **rest):
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[0] = input_ids.shape[1] >= 12
        return done


def test_other_criteria_than_an_end():
    """Hugging Face pads after an end by other criteria only if there is an end token, too."""
    for eos in (None, 258):
        turns = begun([9, 9], 4)
        given = {"eos_token_id": eos, "max_new_tokens": NEW, "stopping_criteria": [Third()]}
        given |= {"pad_token_id": PAD, "cache": turns.cache}
        out = reference().generate(turns.ids, **given, **RECORD)
        assert (out.sequences[0, -1] == PAD) == (eos is not None)
        assert turns.cache.seq_lens.tolist() == [13 if eos is None else 12, 13]


def test_what_generate_refuses():
    turns = begun([9, 4], 5)
    model = reference()
    given = {"max_new_tokens": 2, "eos_token_id": None, "pad_token_id": PAD}
    right = {"attention_mask": turns.mask.flip(1), "cache": turns.cache}
    with pytest.raises(ValueError, match="attention_mask must be 1 in the last column"):
        model.generate(turns.ids.flip(1), **right, **given)
    assert turns.cache.seq_lens.tolist() == [0, 0]
    turns.answer()
    given["cache"] = turns.cache
    with pytest.raises(ValueError, match="must have more tokens than the cache in every row, got "):
        model.generate(turns.ids[:, :9], attention_mask=turns.mask[:, :9], **given)
    with pytest.raises(ValueError, match="must have more tokens than the cache in every row, got "):
        model.generate(torch.tensor([[1, 2], [3, 4]]), **given)
    mask = torch.ones(2, turns.ids.shape[1] + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="must count tokens before input_ids that the cache has"):
        model.generate(torch.tensor([[1], [3]]), attention_mask=mask, **given)


def test_a_turn_of_new_tokens_only_gets_pages_for_all():
    turns = begun([250], 6, num_blocks=2)
    turns.answer()
    turns.say([20])
    assert turns.cache.num_free_blocks == 1
    turns.answer(input_ids=turns.ids[:, -21:])
    assert turns.cache.num_free_blocks == 0
    turns.cache.tensors.tables.compressed[0, 1] = -1  # as if another request had taken the block
    turns.say([3])
    with pytest.raises(ValueError, match="cache must have blocks for all tokens"):
        turns.answer()


def test_generate_says_what_was_dropped():
    turns = begun([5], 7)
    turns.cache.tensors.dropped.fill_(3)
    with pytest.raises(RuntimeError, match="the cache must have stored all tokens of its steps"):
        turns.answer()
    turns.answer()
    assert isinstance(turns.cache, v4.PagedCache)

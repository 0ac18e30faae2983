"""Speculative decoding with a stub for the draft model: what it drafts does not change the text."""

import functools
import itertools

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

import dsv4_ops
from dsv4_ops.integrations import transformers as v4
from tests.helpers import i32
from tests.support.hf_models import new_cache, reference, text

PROMPTS = (120, 3, 61)
NEW = 20  # past position 128, and every position mod 4


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def prefilled(next_n):
    """A cache with the prompts, its rows, and the first token behind each prompt."""
    cache = new_cache(next_n=next_n)
    rows = [cache.add(index, num_tokens=size + NEW + 4) for index, size in enumerate(PROMPTS)]
    tokens = torch.cat([text()[index, :size] for index, size in enumerate(PROMPTS)])
    starts = [0, *itertools.accumulate(PROMPTS)]
    batch = v4.StepBatch(tokens, i32(starts), i32(PROMPTS), i32(rows))
    return cache.tensors, i32(rows), v4.prefill_step(reference(), batch, cache.tensors).argmax(-1)


@functools.lru_cache
def greedy():
    """Tokens of plain greedy decoding, [requests, NEW]."""
    cache, rows, token = prefilled(1)
    found = [token]
    for step in range(1, NEW):
        lens = i32([size + step for size in PROMPTS])
        batch = v4.StepBatch(found[-1], torch.arange(4).int(), lens, rows)
        found.append(v4.decode_step(reference(), batch, cache).argmax(-1))
    return torch.stack(found, 1)


def verify(model, tokens, seq_lens, rows, cache):
    """A step: a token and its drafts of each request; lengths stay on the device."""
    num_reqs, width = tokens.shape
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * width
    batch = v4.StepBatch(tokens.flatten(), starts, seq_lens + width, rows)
    logits = v4.decode_step(model, batch, cache, state_rings=False)
    verified = dsv4_ops.verify_draft(logits.view(num_reqs, width, -1), tokens[:, 1:])
    return *verified, seq_lens + verified.num_accepted + 1


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_speculative_is_greedy_decoding(num_drafts):
    """One graph, or eager. The stub errs where the request and the position say so."""
    torch._dynamo.reset()
    step = torch.compile(verify, backend="eager", fullgraph=True) if num_drafts == 1 else verify
    model = reference()
    cache, rows, token = prefilled(1 + num_drafts)
    seq_lens, found = i32(PROMPTS), [[int(first)] for first in token]
    counts = set()
    while min(map(len, found)) < NEW:
        drafts = torch.zeros(len(PROMPTS), num_drafts, dtype=torch.int64)
        for request, known in enumerate(found):
            for place in range(num_drafts):
                at = min(len(known) + place, NEW - 1)
                errs = (at * (request + 2)) % 5 < 2
                drafts[request, place] = (int(greedy()[request, at]) + errs) % 256
        last = torch.tensor([known[-1] for known in found])
        given = torch.cat([last[:, None], drafts], 1)
        tokens, accepted, grown = step(model, given, seq_lens, rows, cache)
        # a request that is done stays where it is, and computes its last step again
        moving = torch.tensor([len(known) < NEW for known in found])
        seq_lens = torch.where(moving, grown, seq_lens)
        for request, known in enumerate(found):
            if moving[request]:
                count = int(accepted[request])
                counts.add(count)
                known += tokens[request, : count + 1].tolist()
    assert torch.equal(torch.tensor([known[:NEW] for known in found]), greedy())
    assert counts == set(range(num_drafts + 1))
    torch._dynamo.reset()


def test_generate_names_the_draft_layers_that_it_has_not():
    with pytest.raises(NotImplementedError) as raised:
        reference().generate(text()[:1, :4], use_mtp=True)
    assert str(raised.value) == (
        "generate: use_mtp must be False with a patched model, got True. Pass num_draft_tokens; "
        "load_mtp loads the draft layer of a checkpoint."
    )

"""``generate(num_draft_tokens=)`` writes what ``generate`` does, or samples from the same model."""

import itertools

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
pytest.importorskip("accelerate", reason="Hugging Face dequantises with it")

import transformers

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from tests.oracles.mtp import float32_model

CONFIG = {**TINY, "vocab_size": 5, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
PAD, END = 4, 1


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("mtp"), CONFIG)


@pytest.fixture(scope="module")
def model(path):
    patched = v4.patch(float32_model(path), kv="fp32", precision="reference")
    return v4.load_mtp(patched, path)


def prompts(*sizes):
    """Prompts of random tokens, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 4, (len(sizes), max(sizes)), generator=generator)
    mask = torch.arange(max(sizes)) >= max(sizes) - torch.tensor(sizes)[:, None]
    return torch.where(mask, ids, PAD), mask.long()


SIZES = (1, 2, 3, 4, 119, 120, 121, 122, 126, 127, 128, 129)
BY_DEFAULT = {(3, 3), (121, 2), (128, 1)}
"""Sizes of prompts and drafts; test_mtp.py has steps of every number of drafts across 128."""


def greedy():
    nightly = pytest.mark.nightly("prompts of three sizes; the same steps across 128 in test_mtp")
    for size, num_drafts in itertools.product(SIZES, (1, 2, 3)):
        marks = [] if (size, num_drafts) in BY_DEFAULT else [nightly]
        yield pytest.param(size, num_drafts, marks=marks)


@pytest.mark.parametrize(("size", "num_drafts"), greedy())
def test_greedy_text_is_the_same(model, size, num_drafts):
    """Whichever position mod 4 and 128 the drafts begin at."""
    ids, _ = prompts(size)
    settings = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, num_draft_tokens=num_drafts, **settings), want)


def test_rows_of_several_lengths_that_end(model):
    ids, mask = prompts(7, 130, 30, 2)
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": [END, 2],
        "pad_token_id": PAD,
    }
    want = model.generate(ids, **settings)
    assert (want[:, 130:] == PAD).any()  # a row ended before the others
    assert torch.equal(model.generate(ids, num_draft_tokens=2, **settings), want)
    chunks = {"prefill_chunk_size": 32, "num_draft_tokens": 2}
    assert torch.equal(model.generate(ids, **chunks, **settings), want)


@pytest.mark.nightly("test_mtp.py compiles a step of drafts")
def test_a_compiled_step(model):
    torch._dynamo.reset()
    ids, _ = prompts(5)
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    compiled = transformers.CompileConfig(backend="eager", mode=None)
    found = model.generate(ids, num_draft_tokens=2, compile_config=compiled, **settings)
    assert torch.equal(found, model.generate(ids, **settings))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sampled_text_is_that_of_any_default_dtype(model, dtype):
    ids, _ = prompts(6)

    def sampled():
        torch.manual_seed(0)
        settings = {"max_new_tokens": 5, "do_sample": True, "eos_token_id": None}
        return model.generate(ids, num_draft_tokens=2, **settings)

    want = sampled()
    torch.set_default_dtype(dtype)
    try:
        found = sampled()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, want)


@pytest.mark.slow
@pytest.mark.nightly("hundreds of texts; verify_draft's own tests have what it samples")
def test_sampled_text_has_the_models_distribution(model):
    """Of three tokens, the first two of which drafts can stand for; four standard errors."""
    ids, _ = prompts(6)
    rows, settings = 240, {"temperature": 0.7, "top_k": 3, "top_p": 0.95}
    torch.manual_seed(0)
    found = torch.cat(
        [
            model.generate(
                ids.expand(120, -1),
                max_new_tokens=3,
                do_sample=True,
                eos_token_id=None,
                num_draft_tokens=2,
                **settings,
            )
            for _ in range(rows // 120)
        ]
    )[:, 6:]
    vocab = CONFIG["vocab_size"]
    each = torch.cartesian_prod(*[torch.arange(vocab)] * 3)
    text = torch.cat([ids.expand(len(each), -1), each], 1)
    logits = model(text, use_cache=False).logits[:, 5:8].float() / 0.7
    warpers = [transformers.TopKLogitsWarper(3), transformers.TopPLogitsWarper(0.95)]
    flat = logits.flatten(0, 1)
    for one in warpers:
        flat = one(None, flat)
    chance = flat.softmax(-1).view_as(logits).gather(2, each[..., None]).squeeze(-1).prod(1)
    code = found[:, 0] * vocab**2 + found[:, 1] * vocab + found[:, 2]
    share = torch.bincount(code, minlength=vocab**3) / rows
    error = (chance * (1 - chance) / rows).sqrt()
    assert ((share - chance).abs() <= 4 * error + 1e-6).all()
    assert (chance > 0.01).sum() > 5


def test_what_it_cannot_do_is_refused_by_name(model, path):
    ids, _ = prompts(5)
    plain = v4.patch(v4.load_quantized(path))
    processor = [transformers.RepetitionPenaltyLogitsProcessor(1.5)]
    for held, given, message in (
        (plain, {}, "num_draft_tokens must be None for a model without a draft layer, got 2. Call"),
        (model, {"streamer": object()}, "streamer must be None with num_draft_tokens, got another"),
        (
            model,
            {"logits_processor": processor},
            "logits_processor must hold nothing with num_draft_tokens, got RepetitionPenalty",
        ),
        (model, {"max_time": 9.0}, "stopping_criteria must hold MaxLengthCriteria or EosTokenCri"),
        (
            model,
            {"return_dict_in_generate": True},
            "return_dict_in_generate must be False with num_draft_tokens, got True",
        ),
        (model, {"num_draft_tokens": 0}, "num_draft_tokens must be at least 1, got 0"),
    ):
        arguments = {"num_draft_tokens": 2, "max_new_tokens": 3, "do_sample": False, **given}
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            held.generate(ids, **arguments)
        assert str(raised.value).startswith(f"generate: {message}")

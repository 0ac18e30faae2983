"""``generate(num_draft_tokens=)`` writes ``generate``'s text, or samples from the same model."""

import itertools

import pytest
import torch

pytest.importorskip("accelerate", reason="Hugging Face dequantises with it")

import transformers
from torch._dynamo.utils import counters

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.models import small_mla_model
from tests.fakes import graphs
from tests.oracles.mtp import float32_model

CONFIG = {**TINY, "vocab_size": 5, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
PAD, END = 4, 1


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("mtp"), CONFIG)


@pytest.fixture(scope="module")
def model(path):
    patched = v4.patch(float32_model(path), kv="fp32", precision="reference")
    return v4.load_mtp(patched, path)


def prompts(*sizes):
    """Return random prompts, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 4, (len(sizes), max(sizes)), generator=generator)
    mask = torch.arange(max(sizes)) >= max(sizes) - torch.tensor(sizes)[:, None]
    return torch.where(mask, ids, PAD), mask.long()


SIZES = (1, 2, 3, 4, 119, 120, 121, 122, 126, 127, 128, 129)
BY_DEFAULT = {(3, 3), (121, 2)}
"""Lengths of prompts and numbers of drafts; test_mtp.py runs all numbers across position 128."""


def greedy():
    nightly = pytest.mark.nightly("prompts of three sizes; the same steps across 128 in test_mtp")
    for size, num_drafts in itertools.product(SIZES, (1, 2, 3)):
        marks = [] if (size, num_drafts) in BY_DEFAULT else [nightly]
        yield pytest.param(size, num_drafts, marks=marks)


@pytest.mark.parametrize(("size", "num_drafts"), greedy())
def test_greedy_text_is_the_same(model, size, num_drafts):
    """Drafts begin at any position modulo 4 and 128."""
    ids, _ = prompts(size)
    settings = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, num_draft_tokens=num_drafts, **settings), want)


def test_rows_of_several_lengths_that_end(model):
    ids, mask = prompts(7, 130, 30, 2)
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    settings |= {"eos_token_id": [END, 2], "pad_token_id": PAD}
    want = model.generate(ids, **settings)
    assert (want[:, 130:] == PAD).any()  # a row ended before the others
    assert torch.equal(model.generate(ids, num_draft_tokens=2, **settings), want)
    chunks = {"prefill_chunk_size": 32, "num_draft_tokens": 2}
    assert torch.equal(model.generate(ids, **chunks, **settings), want)


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
    """Texts have three tokens, and drafts propose the first two. Shares are within four errors."""
    ids, _ = prompts(6)
    rows, settings = 240, {"temperature": 0.7, "top_k": 3, "top_p": 0.95, "do_sample": True}
    settings |= {"max_new_tokens": 3, "eos_token_id": None, "num_draft_tokens": 2}
    torch.manual_seed(0)
    some = [model.generate(ids.expand(120, -1), **settings) for _ in range(rows // 120)]
    found = torch.cat(some)[:, 6:]
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


def refused(held, message, *args, **given):
    arguments = {"num_draft_tokens": 2, "max_new_tokens": 3, "do_sample": False, **given}
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        held.generate(*args, **arguments)
    assert str(raised.value).startswith(f"generate: {message}")


def test_models_without_a_draft_layer_are_refused(path):
    plain = v4.patch(v4.load_quantized(path))
    message = "num_draft_tokens must be None for a model without a draft layer, got 2. Call load_m"
    refused(plain, message, prompts(5)[0])
    refused(v4.patch(small_mla_model()), message, prompts(5)[0])
    message = "num_draft_tokens must be at most 64, got 1000000"
    refused(plain, message, prompts(5)[0], num_draft_tokens=10**6)


REFUSED = {
    "num_draft_tokens": (0, "be at least 1, got 0"),
    **{name: (object(), "be None with num_draft_tokens, got an object")
     for name in ("streamer", "cache", "past_key_values", "assistant_model", "custom_generate",
     "inputs_embeds", "position_ids", "negative_prompt_ids", "prefix_allowed_tokens_fn",
     "output_router_logits")},
    "num_beams": (2, "be 1 with num_draft_tokens, got 2"),
    "use_cache": (False, "be True with num_draft_tokens, got False"),
    "cache_implementation": ("dynamic", "be None with num_draft_tokens, got dynamic"),
    "return_dict_in_generate": (True, "be False with num_draft_tokens, got True"),
    "output_hidden_states": (True, "be False with num_draft_tokens, got True"),
    "output_attentions": (True, "be False with num_draft_tokens, got True"),
    "prompt_lookup_num_tokens": (3, "be None with num_draft_tokens, got 3"),
    "penalty_alpha": (0.6, "be None with num_draft_tokens, got 0.6"),
    "dola_layers": ("low", "be None with num_draft_tokens, got low"),
    "stop_strings": ("a", "be None with num_draft_tokens, got a"),
    "token_healing": (True, "be False with num_draft_tokens, got True"),
    "use_mtp": (True, "be False with a patched model, got True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(model, name):
    """Settings come as arguments, in the call's configuration, or in the model's."""
    value, rule = REFUSED[name]
    ids, message = prompts(5)[0], f"{name} must {rule}. "
    refused(model, message, ids, **{name: value})
    if not hasattr(model.generation_config, name):
        return
    config = transformers.GenerationConfig()
    setattr(config, name, value)
    refused(model, message, ids, config)
    refused(model, message, ids, generation_config=config)
    own = getattr(model.generation_config, name)
    setattr(model.generation_config, name, value)
    try:
        refused(model, message, ids)
    finally:
        setattr(model.generation_config, name, own)


def test_processors_and_criteria_that_it_cannot_run_are_refused(model):
    ids, _ = prompts(5)
    processor = [transformers.RepetitionPenaltyLogitsProcessor(1.5)]
    message = "logits_processor must hold nothing with num_draft_tokens, got RepetitionPenalty"
    refused(model, message, ids, logits_processor=processor)
    refused(model, message, ids, None, processor)
    message = "stopping_criteria must hold MaxLengthCriteria or EosTokenCriteria with num_draft_to"
    refused(model, message, ids, max_time=9.0)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2], [3, 0]], [[1, 1], [0, 0]], "attention_mask must be 1 in the last column, which "),
        ([[1, 2], [3, 0]], [[1, 1], [1, 0]], "attention_mask must be 1 in the last column, which "),
        ([[1, 2]], [[1]], "attention_mask must have shape [1, 2 or more], got [1, 1]. Pass the "),
        ([[1, 2]], [[1, 1, 1]], "attention_mask must count tokens before input_ids that the cach"),
        ([[]], None, "input_ids must have a row and a token, got shape [1, 0]. Pass a prompt, or "),
    ],
    ids=["padding alone", "padded on the right", "short", "long", "empty"],
)
@pytest.mark.parametrize("num_drafts", [None, 2])
def test_prompts_are_checked_with_drafts_as_without(model, ids, mask, message, num_drafts):
    mask = None if mask is None else torch.tensor(mask)
    ids = torch.tensor(ids, dtype=torch.int64)
    refused(model, message, input_ids=ids, attention_mask=mask, num_draft_tokens=num_drafts)


@pytest.mark.parametrize("num_drafts", [None, 2])
def test_a_mask_of_one_row_is_of_all(model, num_drafts):
    ids, mask = prompts(5, 5)
    ids, mask = torch.cat([ids.new_full((2, 2), PAD), ids], 1), torch.tensor([[0, 0] + [1] * 5])
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, attention_mask=mask.expand(2, -1), **settings)
    got = model.generate(ids, attention_mask=mask, num_draft_tokens=num_drafts, **settings)
    assert torch.equal(got, want)


def test_one_compile_serves_all_sizes_and_drafts(tmp_path, monkeypatch):
    """Texts, prompts, drafts and settings vary. Captured steps, here with simulated CUDA graphs,
    return the same texts."""
    path = write_checkpoint(tmp_path, {**CONFIG, "num_hidden_layers": 1, "compress_ratios": [0, 0]})
    model = v4.patch(float32_model(path), kv="fp32", precision="reference")
    model = v4.load_mtp(model, path)
    made, first = graphs.install(monkeypatch, tmp_path / "parts"), None
    counters.clear()
    sampled = {"do_sample": True, "top_k": 3}
    calls = [((9, 4), 2, {}), ((30,), 3, {}), ((3, 1, 5), 1, {}), ((9, 2), 2, sampled)]
    for number, (sizes, num_drafts, more) in enumerate(calls):
        ids, mask = prompts(*sizes)
        settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, **more}
        settings |= {"num_draft_tokens": num_drafts, "attention_mask": mask}
        texts = []
        for setting in ({"compile_config": graphs.CONFIG}, {"disable_compile": True}):
            torch.manual_seed(5)
            texts.append(model.generate(ids, **settings, **setting))
        assert torch.equal(*texts)
        first = first or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == first > 0
        assert len(made) == number + 1
    assert len(list((tmp_path / "parts").rglob("*-*.0"))) == first


def test_ids_of_int32(model):
    ids, mask = prompts(5, 9)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    want = model.generate(ids.int(), eos_token_id=None, **settings)
    got = model.generate(ids.int(), num_draft_tokens=2, eos_token_id=None, **settings)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def test_ids_outside_the_vocabulary_are_refused(model):
    ids = torch.tensor([[1, 2, CONFIG["vocab_size"]]])
    for num_drafts in (None, 2):
        with pytest.raises(ValueError, match=r"in 0\.\.4, the vocabulary of the model, got 5"):
            model.generate(ids, num_draft_tokens=num_drafts, max_new_tokens=2, do_sample=False)


def test_no_prompt_begins_with_the_token_that_begins_a_text(model):
    settings = {"bos_token_id": 3, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    want = model.generate(**settings)
    assert want[0, 0] == 3
    assert torch.equal(model.generate(num_draft_tokens=2, **settings), want)

"""The draft layer of a checkpoint is loaded by name, and equals its formula."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter

pytest.importorskip("accelerate", reason="Hugging Face dequantises with it")

from dsv4_ops.checkpoint.headers import CONFIG as CONFIG_FILE, INDEX
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.loading.v4_draft import released_weights
from dsv4_ops.reference.experts import expert_values
from dsv4_ops.testing.checkpoint import TINY, tensors, write_checkpoint
from dsv4_ops.testing.models import small_mla_model
from tests.helpers import NIGHTLY, i32, nightly
from tests.oracles.mtp import MtpOracle, dequantised_model, float32_model

# a vocabulary of three tokens, so that random drafts are sometimes accepted
CONFIG = {**TINY, "vocab_size": 3, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
PROMPTS = (120, 3, 61)
NEW = 12  # past position 128, and at every position modulo 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("mtp"), CONFIG)


@pytest.fixture(scope="module")
def oracle(path, tmp_path_factory):
    return MtpOracle(path, tmp_path_factory.mktemp("oracle") / "block")


@pytest.fixture(scope="module")
def model(path):
    patched = v4.patch(float32_model(path), kv="fp32", precision="reference")
    return v4.load_mtp(patched, path)


@pytest.fixture(scope="module")
def text():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, CONFIG["vocab_size"], (len(PROMPTS), max(PROMPTS)), generator=generator)


def new_cache(model, num_drafts, **sizes):
    sizes = {"max_batch_size": len(PROMPTS), "max_cache_len": 160, **sizes}
    return v4.PagedCache.for_model(model, next_n=num_drafts + 1, **sizes)


def prompts(text, cache):
    rows = [cache.add(index, num_tokens=160) for index in range(len(PROMPTS))]
    tokens = torch.cat([text[index, :size] for index, size in enumerate(PROMPTS)])
    starts = torch.tensor([0, *PROMPTS]).cumsum(0).int()
    return v4.StepBatch(tokens, starts, i32(PROMPTS), i32(rows))


def greedy_text(model, text):
    """Return prompt and NEW + 1 greedy tokens of each request."""
    found = []
    for index, size in enumerate(PROMPTS):
        known = text[index : index + 1, :size]
        out = model.generate(known, max_new_tokens=NEW + 8, do_sample=False, eos_token_id=None)
        found.append(out[0])
    return found


def oracle_drafts(oracle, known, num_drafts):
    """Return the oracle's drafts after ``known``, whose last token the trunk has not seen."""
    streams = oracle.streams(known[None, :-1])
    following, drafts = known[None, 1:], []
    for _ in range(num_drafts):
        logits, out = oracle.draft(streams, following)
        drafts.append(logits[0, -1].argmax())
        # the next position reads the draft layer's own streams
        streams = torch.cat([streams, out[:, -1:]], 1)
        following = torch.cat([following, drafts[-1].view(1, 1)], 1)
    return torch.stack(drafts)


def speculate(model, text, num_drafts, step=v4.speculative_step):
    """Run until every request has NEW tokens; yield the tokens before each step, and the step."""
    cache = new_cache(model, num_drafts)
    found = v4.speculative_prefill(model, prompts(text, cache), cache, num_drafts=num_drafts)
    known = [torch.cat([text[n, :size], found.tokens[n, :1]]) for n, size in enumerate(PROMPTS)]
    assert cache.seq_lens.tolist() == list(PROMPTS)
    yield known, found
    while min(len(each) - size for each, size in zip(known, PROMPTS, strict=True)) < NEW:
        found = step(model, found.batch, cache.tensors)
        counts = found.num_accepted + 1
        rows = zip(known, found.tokens, counts, strict=True)
        known = [torch.cat([each, tokens[:count]]) for each, tokens, count in rows]
        # the last token is not stored, and rejected drafts are not counted
        assert cache.seq_lens.tolist() == [len(each) - 1 for each in known]
        yield known, found
    cache.raise_if_dropped()


@pytest.mark.parametrize("num_drafts", [2, *nightly("two drafts: none, one or both", 1, 3)])
def test_text_is_greedy_and_drafts_are_those_of_the_formula(model, oracle, text, num_drafts):
    want, counts = greedy_text(model, text), set()
    for index, (known, found) in enumerate(speculate(model, text, num_drafts)):
        drafts = found.batch.tokens.view(len(PROMPTS), -1)
        for request, each in enumerate(known):
            length = min(len(each), len(want[request]))
            assert torch.equal(each[:length], want[request][:length])
            assert int(drafts[request, 0]) == int(each[-1])
            if NIGHTLY or index % 4 == request:  # the oracle computes whole texts
                wanted = oracle_drafts(oracle, each, num_drafts)
                assert torch.equal(drafts[request, 1:], wanted)
            assert int(found.batch.seq_lens[request]) == len(each) + num_drafts
            if index:
                counts.add(int(found.num_accepted[request]))
    assert counts == set(range(num_drafts + 1))


@pytest.fixture
def changed(path, tmp_path):
    """Write a changed copy of the checkpoint."""

    def write(change=lambda held: None, **config):
        held = dict(tensors(path))
        change(held)
        save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((path / CONFIG_FILE).read_text()) | config
        (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
        index = {"metadata": {}, "weight_map": dict.fromkeys(held, "model.safetensors")}
        (tmp_path / INDEX).write_text(json.dumps(index))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def quantized(path):
    return v4.patch(v4.load_quantized(path))


def weights(module):
    """Return a module's parameters as values; codes are dequantised."""
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    for name in list(found):
        scale = found.get(f"{name}_scale_inv")
        if scale is not None:
            scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
            found[name] = expert_values(found[name], scale)
    return {name: value.float() for name, value in found.items() if "scale" not in name}


@pytest.mark.parametrize("family", ["instruct", "base"])
def test_weights_are_quantised_where_the_models_are(family, tmp_path, path, model):
    if family == "base":
        path = write_checkpoint(tmp_path, CONFIG, family=family)
        model = v4.patch(float32_model(path), kv="fp32", precision="reference")
        model = v4.load_mtp(model, path)
    held = v4.load_mtp(v4.patch(v4.load_quantized(path)), path)
    of_layer = dict(held.model.layers[2].named_modules())
    for name, module in held.mtp.layers[0].named_modules():
        if name in of_layer and module is not held.mtp.layers[0]:
            assert type(module) is type(of_layer[name]), name
            for part, weight in module.named_parameters(recurse=False):
                assert weight.dtype == of_layer[name].get_parameter(part).dtype, (name, part)
    assert type(held.mtp.h_proj) is type(of_layer["self_attn.q_a_proj"])
    want = weights(model.mtp)
    found = weights(held.mtp)
    assert want.keys() == {name for name in found if name in want}
    for name, weight in want.items():
        assert torch.equal(found[name], weight), name


def test_a_bf16_model_has_a_bf16_draft_layer(path):
    held = v4.load_mtp(v4.patch(dequantised_model(path)), path)
    assert held.mtp.e_proj.weight.dtype == held.model.layers[0].self_attn.q_a_proj.weight.dtype
    assert held.mtp.norm.weight.dtype == held.model.norm.weight.dtype
    cache = v4.PagedCache.for_model(held, max_batch_size=1, max_cache_len=64, next_n=2)
    batch = v4.StepBatch(torch.tensor([2, 1, 2]), i32([0, 3]), i32([3]), i32([cache.add("a", 64)]))
    found = v4.speculative_prefill(held, batch, cache, num_drafts=1)
    found = v4.speculative_step(held, found.batch, cache)
    assert int(found.batch.tokens.min()) >= 0


def test_unpatch_removes_the_layer(path):
    held = v4.load_mtp(v4.patch(v4.load_quantized(path)), path)
    names = set(held.state_dict())
    v4.unpatch(held)
    assert not any(name.startswith("mtp.") for name in held.state_dict())
    assert "forward" not in vars(held.model.layers[0].self_attn)
    assert set(v4.load_mtp(v4.patch(held), path).state_dict()) == names


def test_the_cache_has_keys_of_the_layer(quantized, model):
    sizes = {"max_batch_size": 2, "max_cache_len": 256}
    without, held = (v4.PagedCache.for_model(each, **sizes) for each in (quantized, model))
    assert "draft" not in repr(without)
    assert "; " in repr(held)
    assert held.memory()["draft"] == held.tensors.layers[0].swa.nbytes
    assert "draft " in repr(held)
    assert len(held) == len(without) == 3


E8M0, E4M3 = "mtp.0.ffn.experts.1.w3.scale", "mtp.0.attn.wq_b.weight"
WQ_A = "mtp.0.attn.wq_a.weight"


def _nan(name):
    return lambda held: held[name].view(torch.uint8)[3, 1].fill_(0xFF)


def _rename(before, after):
    def change(held):
        for name in [name for name in held if before in name]:
            held[name.replace(before, after)] = held.pop(name)

    return change


ABSENT = "path must hold {}, got no such tensor. Download the file again, or convert it from"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop("mtp.0.e_proj.scale"),
         ABSENT.format("mtp.0.e_proj.scale, F8_E8M0 [2, 2]")),
        (_rename("mtp.0.enorm", "mtp.0.engram"), ABSENT.format("mtp.0.enorm.weight, BF16 [256]")),
        (lambda held: held.update({WQ_A: held[WQ_A].mT.contiguous()}),
         "mtp.0.attn.wq_a.weight must be F8_E4M3 [128, 256], got F8_E4M3 [256, 128]. It is tran"),
        (_rename("mtp.0.e_proj", "mtp.0.main_proj"), "path must be of an MTP layer, got mtp.0.mai"),
        (lambda held: held.update({"mtp.0.engram.weight": torch.zeros(2)}),
         "path must hold no tensor that a draft layer has no place for, got mtp.0.engram.weight"),
        (_rename("mtp.0.", "mtp.1."), "path must hold one draft layer, mtp.0, got mtp.1.attn.att"),
        (lambda held: [held.pop(name) for name in [*held] if name.startswith("mtp.")],
         "path must hold a draft layer, mtp.0, got no tensor of it. Pass a check"),
        (None, "model_type must be 'deepseek_v4', got 'deepseek_v41'. Pass the model's own ch"),
        (_nan(E4M3),
         f"{E4M3} must hold codes of numbers, got NaN (0x7F or 0xFF). Download it agai"),
        (_nan(E8M0),
         f"{E8M0} must hold bytes of 0 to 254, as 255 is NaN, got 1 other values. Download"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_refused_by_name(quantized, changed, change, message):
    folder = changed(change) if change else changed(model_type="deepseek_v41")
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        v4.load_mtp(quantized, folder)
    assert str(raised.value).startswith(f"load_mtp: {message}")
    assert not hasattr(quantized, "mtp")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 0.75])
def test_float32_scales_that_bytes_cannot_hold_are_refused(tmp_path, value):
    """A model that dequantises is refused, too."""
    folder = write_checkpoint(tmp_path, CONFIG, family="base", shards=1)
    file = folder / "model-00001-of-00001.safetensors"
    held = dict(tensors(folder))
    held["mtp.0.attn.wq_b.scale"][0, 0] = value
    save_file(held, file, metadata={"format": "pt"})
    plain = v4.patch(float32_model(folder), kv="fp32", precision="reference")
    with pytest.raises(ValueError, match=r"^load_mtp: mtp.0.attn.wq_b.scale must hold powers of "):
        v4.load_mtp(plain, folder)
    assert not hasattr(plain, "mtp")


def test_models_that_cannot_have_it_are_refused(path, model, quantized, tmp_path):
    wide = write_checkpoint(tmp_path, CONFIG | {"n_routed_experts": 16})
    v3 = v4.patch(small_mla_model(), kv="fp32", precision="reference")
    for held, folder, message in (
        (model, path, "model must have no draft layer yet, got one that has. It is loaded already"),
        (quantized, wide, "path must have the model's n_routed_experts, 8, got 16. Pass the model"),
        (v3, path, "model_type must be 'deepseek_v3', got 'deepseek_v4'. Pass the model's own"),
        (torch.nn.Linear(2, 2), path, "model must be patched, got an unpatched Linear. Call patch"),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            v4.load_mtp(held, folder)
        assert str(raised.value).startswith(f"load_mtp: {message}")


def test_weights_by_their_names_in_the_files(path, model):
    held = {name: value for name, value in tensors(path) if name.startswith("mtp.")}
    found = released_weights(model.mtp)
    assert found.keys() == {name for name in held if not name.endswith(".scale")}
    for name, value in found.items():
        scale = held.get(name.removesuffix("weight") + "scale")
        want = held[name]
        if scale is not None:
            want = expert_values(want, scale.view(torch.uint8))
        assert torch.equal(value, want.to(value.dtype)), name


def test_a_step_is_one_graph(text, tmp_path):
    """The model has one layer and the draft layer."""
    path = write_checkpoint(tmp_path, {**CONFIG, "num_hidden_layers": 1, "compress_ratios": [0, 0]})
    patched = v4.patch(float32_model(path), kv="fp32", precision="reference")
    model = v4.load_mtp(patched, path)
    counter = CompileCounter()
    compiled = torch.compile(v4.speculative_step, backend=counter, fullgraph=True)
    pairs = zip(speculate(model, text, 1), speculate(model, text, 1, compiled), strict=True)
    for (_, want), (_, found) in itertools.islice(pairs, 4):
        assert torch.equal(found.tokens, want.tokens)
        assert torch.equal(found.batch.tokens, want.batch.tokens)
        assert torch.equal(found.batch.seq_lens, want.batch.seq_lens)
    assert counter.frame_count == 1


@pytest.mark.parametrize("chunk", [*nightly("longer chunks", 1), 50])
def test_prompts_in_chunks_draft_as_whole_ones(model, text, chunk):
    whole, cache = new_cache(model, 2), new_cache(model, 2)
    want = v4.speculative_prefill(model, prompts(text, whole), whole, num_drafts=2)
    row = i32([cache.add(0, num_tokens=160)])
    prompt = text[0, : PROMPTS[0]]
    for start in range(0, len(prompt), chunk):
        stop = min(start + chunk, len(prompt))
        behind = prompt[stop : stop + 1] if stop < len(prompt) else None
        batch = v4.StepBatch(prompt[start:stop], i32([0, stop - start]), i32([stop]), row)
        found = v4.speculative_prefill(model, batch, cache, num_drafts=2, following=behind)
    assert torch.equal(found.batch.tokens, want.batch.tokens[:3])
    keys = whole.tensors.draft[0].swa.view(len(PROMPTS), -1), cache.tensors.draft[0].swa.view(3, -1)
    torch.testing.assert_close(keys[1][0], keys[0][0], rtol=1e-4, atol=1e-4)


def test_the_draft_after_position_0_reads_the_streams_only(model):
    """Prompts that differ in their second token have the same draft key at position 0."""
    keys = []
    for second in (0, 1):
        cache = new_cache(model, 1, max_batch_size=1)
        row = i32([cache.add(0, num_tokens=160)])
        batch = v4.StepBatch(torch.tensor([2, second, 1]), i32([0, 3]), i32([3]), row)
        v4.speculative_prefill(model, batch, cache, num_drafts=1)
        block = int(cache.tensors.tables.swa[row, 0])
        keys.append(cache.tensors.draft[0].swa[block].flatten(1))
    torch.testing.assert_close(keys[0][0], keys[1][0], rtol=1e-5, atol=1e-5)
    assert (keys[0][1] - keys[1][1]).abs().max() > 0.1


def test_padding_requests_stay_empty(model, text):
    cache = new_cache(model, 1)
    found = v4.speculative_prefill(model, prompts(text, cache), cache, num_drafts=1)
    lens = found.batch.seq_lens * i32([1, 0, 1])
    stored = cache.tensors.draft[0].swa.view(len(PROMPTS), -1)[1].clone()
    found = v4.speculative_step(model, replace(found.batch, seq_lens=lens), cache)
    assert found.batch.seq_lens.tolist()[1] == 0
    assert torch.equal(cache.tensors.draft[0].swa.view(len(PROMPTS), -1)[1], stored)


def test_steps_that_cannot_run_are_refused(model, quantized, text):
    cache, small = new_cache(model, 1), new_cache(model, 0, max_cache_len=4096, max_chunk=64)
    batch = v4.speculative_prefill(model, prompts(text, cache), cache, num_drafts=1).batch
    sizes = {"max_batch_size": 3, "max_cache_len": 160, "next_n": 2}
    bare = v4.PagedCache(model.config, **sizes, kv="fp32", precision="reference")
    plain = v4.PagedCache.for_model(quantized, **sizes)
    v3 = v4.patch(small_mla_model(), kv="fp32", precision="reference")
    latents = v4.PagedCache.for_model(v3, max_batch_size=3, max_cache_len=200)
    for each in (bare, small, plain):
        prompts(text, each)
    for each in (bare, small, plain, cache, latents):
        each.seq_lens.fill_(160)
    before = cache.tensors.draft[0].swa.clone()
    ragged = replace(batch, query_start_loc=i32([0, 1, 4, 6]))
    short = replace(batch, tokens=batch.tokens[:3], query_start_loc=i32([0, 1, 2, 3]))
    wide = replace(
        batch,
        tokens=torch.zeros(3 * 20, dtype=torch.int64),
        query_start_loc=i32([0, 20, 40, 60]),
        seq_lens=batch.seq_lens + 30,
    )
    wrong = {"uniforms": torch.rand(3, 2), "temperature": 1.0}
    for held, given, into, rest, message in (
        (quantized, batch, plain, {}, r"model must have a draft layer, got none. Call load_mtp\("),
        (v3, batch, latents, {}, "model must have a draft layer, got none"),
        (model, batch, bare, {}, "cache must have the keys of a draft layer, got none. Make"),
        (model, ragged, cache, {}, "batch.query_start_loc must have as many tokens for every"),
        (model, short, cache, {}, "batch.tokens must have as many tokens for every request, at"),
        (model, wide, small, {}, "cache must be made with next_n of at least"),
        (model, batch, cache, wrong, "uniforms must have 3 col"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match="speculative_step: " + message):
            v4.speculative_step(held, given, into, **rest)
    assert torch.equal(cache.tensors.draft[0].swa, before)

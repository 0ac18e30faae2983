"""Caches and CUDA graphs that ``generate`` keeps for its next call, with simulated CUDA graphs."""

import gc
import re
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.generation.streamers import BaseStreamer

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.generation import kept, prefill
from dsv4_ops.integrations.transformers.steps.eager import EagerStep
from dsv4_ops.testing.models import small_mla_model, small_model
from tests.fakes import graphs
from tests.fakes.graphs import CONFIG

PROMPT = torch.tensor([[3, 5, 7, 11, 13, 17, 19], [2, 4, 6, 8, 10, 12, 14]])
TEXTS = torch.arange(140).reshape(20, 7)
SETTINGS = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of parts, which one test compiles and others load."""
    return tmp_path_factory.mktemp("parts")


@pytest.fixture
def all_captures(folder, monkeypatch):
    return graphs.install(monkeypatch, folder)


@pytest.fixture
def captures(all_captures, monkeypatch):
    """Record captures of decode steps only."""
    monkeypatch.setattr(kept, "MOST_TOKENS", 0)
    return all_captures


@pytest.fixture
def model():
    return v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")


def check(model, ids=PROMPT, **settings):
    """Check that a call with kept graphs returns the tokens of a call without them."""
    settings = SETTINGS | settings
    out = []
    for more in ({"compile_config": CONFIG}, {"disable_compile": True}):
        torch.manual_seed(7)
        out.append(model.generate(ids, **settings, **more))
    assert torch.equal(*out)
    return out[0]


def caches(model):
    return getattr(model, kept.STEPS).kept._caches


def test_later_calls_capture_nothing(model, captures):
    """Prompts, lengths and settings may differ; another number of texts needs one capture."""
    longer = torch.cat([PROMPT, PROMPT + 1, PROMPT.flip(0)], 1)
    check(model)
    assert captures == ["pool"]
    check(model, PROMPT + 1)
    check(model, longer, max_new_tokens=20)
    check(model, do_sample=True, temperature=0.7, top_k=9, repetition_penalty=1.3)
    check(model, eos_token_id=int(check(model)[0, 9]))
    assert captures == ["pool"]
    for _ in range(2):
        check(model, PROMPT[:1])
        check(model)
    assert len(captures) == 2
    assert len(caches(model)) == 1


def test_similar_numbers_of_texts_share_a_graph(model, captures):
    """9 texts run as 10, and 17 to 19 as 20; up to 8 run alone."""
    for count, graphs_made in ((10, 1), (9, 1), (17, 2), (20, 2), (19, 2), (8, 3), (7, 4)):
        check(model, TEXTS[:count])
        assert len(captures) == graphs_made
    assert [each.sizes[0] for each in caches(model)] == [20]


@pytest.mark.usefixtures("captures")
def test_a_cache_is_not_rounded_up_if_it_could_not_be_kept(model, monkeypatch):
    check(model, TEXTS[:9])
    most = caches(model)[0].nbytes - 1
    v4.empty_cache(model)
    monkeypatch.setattr(kept, "most_bytes", lambda device: most)
    check(model, TEXTS[:9])
    assert [each.sizes for each in caches(model)] == [(9, 14, 8)]


def test_similar_prefills_share_a_graph(model, all_captures):
    """60 tokens of 10 texts and 54 of 9 run as 64; the decode is captured first."""
    for count, graphs_made in ((10, 1), (10, 1), (9, 2), (10, 2), (9, 2)):
        check(model, TEXTS[:count, 1:])
        assert len(all_captures) == graphs_made


def test_graphs_follow_the_weights(model, captures):
    """New values need no capture; copies that ``patch`` made, and other addresses, need one."""
    first = check(model)
    layer = model.model.layers[0]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    changed = check(model)
    assert not torch.equal(first, changed)
    assert len(captures) == 1
    with torch.no_grad():
        layer.self_attn.kv_b_proj.weight.mul_(-1)
    assert not torch.equal(check(model), changed)
    assert len(captures) == 2
    held = model.lm_head.weight.data
    model.lm_head.weight.data = held.flip(0)
    check(model)
    assert len(captures) == 3
    layer.input_layernorm.weight = torch.nn.Parameter(-layer.input_layernorm.weight)
    check(model)
    assert len(captures) == 4
    layer.mlp.extra = 3
    check(model)
    assert len(captures) == 5
    check(model)
    assert len(captures) == 5


def test_what_hugging_face_changes_while_it_decodes(model, captures, monkeypatch):
    """On a GPU, Hugging Face switches the experts while it decodes; the graph has these experts."""

    @contextmanager
    def switched(self):
        self.config.switched = True
        yield
        del self.config.switched

    monkeypatch.setattr(type(model), "_optimize_model_for_decode", switched)
    for _ in range(3):
        check(model)
    assert len(captures) == 1


@pytest.mark.usefixtures("captures")
def test_users_get_no_kept_cache(model):
    cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64)
    settings = {**SETTINGS, "compile_config": CONFIG}
    out = model.generate(PROMPT, return_dict_in_generate=True, **settings)
    model.generate(PROMPT, cache=cache, **settings)
    handle = model.register_forward_hook(lambda *_: None)
    model.generate(PROMPT, **settings)
    handle.remove()
    model.generate(PROMPT, **SETTINGS, disable_compile=True)
    assert caches(model) == []
    assert torch.equal(out.sequences, check(model))
    assert len(caches(model)) == 1
    assert out[v4.cache.paged_cache.cache_argument()].seq_lens.tolist() == [13, 13]


class Calls(BaseStreamer):
    """Calls ``generate`` for each token, in a thread of its own."""

    def __init__(self, call):
        self.call, self.results = call, []

    def put(self, value):
        thread = threading.Thread(target=lambda: self.results.append(self.call()))
        thread.start()
        thread.join()

    def end(self):
        pass


def test_calls_at_the_same_time_have_caches_of_their_own(model, captures):
    want = check(model, PROMPT[:1])
    inner = Calls(lambda: check(model, PROMPT[:1]))
    found = model.generate(PROMPT[:1], streamer=inner, compile_config=CONFIG, **SETTINGS)
    assert all(torch.equal(each, want) for each in (found, *inner.results))
    assert len(inner.results) == 8  # the prompt and 7 tokens
    assert len(captures) == 2


def test_a_call_that_fails_gives_nothing_back(model, captures):
    class Fails(BaseStreamer):
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 5:
                raise RuntimeError("no more")

    check(model, PROMPT[:1])
    with pytest.raises(RuntimeError, match="no more"):
        model.generate(PROMPT[:1], streamer=Fails(), compile_config=CONFIG, **SETTINGS)
    assert caches(model) == []
    check(model, PROMPT[:1])
    assert len(captures) == 2


def test_caches_are_few_and_small(model, captures, monkeypatch):
    """A larger cache replaces smaller ones; the oldest is freed, or all if memory is short."""
    check(model, PROMPT[:1])
    check(model)  # more rows
    assert [each.sizes[:2] for each in caches(model)] == [(2, 64)]
    check(model, PROMPT[:1], max_new_tokens=90)
    check(model, PROMPT.repeat(2, 1), max_new_tokens=4)
    assert [each.sizes[:2] for each in caches(model)] == [(4, 64), (1, 128)]
    bytes_of = caches(model)[0].nbytes
    monkeypatch.setattr(kept, "most_bytes", lambda device: bytes_of)
    check(model, PROMPT.repeat(2, 1), max_new_tokens=4)
    assert [each.sizes[:2] for each in caches(model)] == [(4, 64)]
    monkeypatch.setattr(kept, "most_bytes", lambda device: bytes_of - 1)
    check(model)
    assert caches(model) == []


def test_memory_that_lacks_is_taken_from_kept_caches(model, captures, monkeypatch):
    check(model, PROMPT[:1])
    old, made, before = weakref.ref(caches(model)[0].cache), [], kept._cache

    def lacking(model, *sizes):
        made.append(sizes)
        if old() is not None:
            raise torch.OutOfMemoryError
        return before(model, *sizes)

    monkeypatch.setattr(kept, "_cache", lacking)
    gc.disable()  # a reference cycle would hold the memory
    try:
        check(model, TEXTS[:9])
    finally:
        gc.enable()
    assert [sizes[:2] for sizes in made] == [(10, 64), (9, 14)]


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("release", [v4.empty_cache, v4.unpatch])
def test_what_is_kept_is_freed(model, release):
    """The memory is free at once, also after a call that uses the graph."""
    check(model)
    ref = weakref.ref(caches(model)[0].cache)
    gc.disable()
    try:
        release(model)
        assert ref() is None
    finally:
        gc.enable()


def test_a_cache_is_for_its_model(model, captures):
    """A cache is for its settings, and for inference mode: other modes cannot write its tensors."""
    check(model)
    with torch.inference_mode():
        check(model)
    check(model)
    assert len(captures) == 3
    v4.unpatch(model)
    v4.patch(model, kv="bf16", precision="reference")
    check(model)
    assert caches(model)[0].cache.spec.kv == "bf16"
    with pytest.raises(ValueError, match=r"^empty_cache: model must be patched"):
        v4.empty_cache(small_mla_model(num_hidden_layers=1))


@pytest.mark.parametrize("make", [small_model, small_mla_model])
def test_a_captured_prefill_is_the_step(make, all_captures, monkeypatch):
    """Logits and bytes of caches are equal, in chunks of 32 tokens, with absent tokens, and at
    contexts that the capture had not seen."""
    monkeypatch.setattr(kept, "LEAST_TOKENS", 16)
    model = v4.patch(make(), kv="fp32", precision="reference")
    sizes = {"max_batch_size": 2, "max_cache_len": 128, "max_chunk": 32}
    cache, other = (v4.PagedCache.for_model(model, **sizes) for _ in range(2))
    mine = kept.KeptCache(cache, None, 0, EagerStep(model, v4.prefill_step))
    config = SimpleNamespace(prefill_chunk_size=None)
    # steps of 32, 35, 12 tokens; of 32, 39, 4, captured for 32, 48, 16; and of 32, 36, 52
    for longer, shorter, count in ((70, 9, 0), (70, 9, 0), (66, 9, 3), (90, 30, 3)):
        ids = torch.randint(3, 250, (2, longer), generator=torch.Generator().manual_seed(longer))
        mask = torch.ones_like(ids)
        mask[1, : longer - shorter] = 0
        for each in (cache, other):
            each.reset()
        with torch.no_grad():
            logits = prefill.prefilled(model, ids, config, {"attention_mask": mask}, mine)
        for batch, _ in prefill.chunks([ids[0], ids[1, -shorter:]], 32, cache.device):
            absent = prefill.bucket(len(batch.tokens)) - len(batch.tokens)
            tokens = torch.nn.functional.pad(batch.tokens, (0, absent))
            want = v4.prefill_step(model, replace(batch, tokens=tokens), other)
        assert torch.equal(logits, want)
        assert cache.seq_lens.tolist() == [longer, shorter]
        leaves = (pytree.tree_leaves(each.tensors) for each in (cache, other))
        assert all(torch.equal(*pair) for pair in zip(*leaves, strict=True))
        assert len(all_captures) == count


def test_later_prompts_replay_a_prefill(model, all_captures):
    """Later prompts have other lengths and padding; changed weights and hooks have effect."""
    prompt = PROMPT[:1]
    for count in (1, 1, 2, 2):
        check(model, prompt)
        assert len(all_captures) == count
    check(model, torch.cat([prompt, prompt, prompt.flip(1)], 1))
    first = check(model, prompt, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1]]))
    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
    assert not torch.equal(check(model, prompt)[:, 7:], first[:, 7:])
    assert len(all_captures) == 2
    with torch.no_grad():
        layer.self_attn.kv_b_proj.weight.mul_(-1)  # ``patch`` copied this weight
    for count in (3, 3, 3, 4):  # captures of the decode, then of the prompt
        check(model, prompt)
        assert len(all_captures) == count
    calls = []
    layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(4):
        before = len(calls)
        model.generate(prompt, compile_config=CONFIG, **SETTINGS | {"max_new_tokens": 1})
        assert len(calls) == before + 1


def test_a_capture_is_not_the_first_run_of_a_changed_model(model, all_captures):
    """A capture as the first run would compile and load kernels."""
    for extra, count in ((0, 1), (0, 1), (1, 2), (1, 2), (1, 3)):  # decodes, then the prompt
        model.model.layers[0].mlp.extra = extra
        check(model)
        assert len(all_captures) == count


def test_prompts_that_no_kept_step_takes(model, all_captures):
    """Prompts that no graph takes run, or raise, as they do without graphs."""
    positions = torch.arange(7).expand(2, 7)
    for _ in range(3):
        check(model, position_ids=positions)
    assert len(all_captures) == 2
    settings = {**SETTINGS, "compile_config": CONFIG}
    for ids, error, more in (
        (PROMPT + 9999, "model: input_ids must be in 0..259", {}),
        (PROMPT, "attention_mask must be 1 in the last", {"attention_mask": (PROMPT < 14).long()}),
        (PROMPT, "model: position_ids must follow", {"position_ids": positions + 1}),
    ):
        with pytest.raises(ValueError, match=re.escape(error)):
            model.generate(ids, **settings, **more)
    with pytest.raises(TypeError, match="position_ids must be torch"):
        model.generate(PROMPT, position_ids=positions.float(), **settings)


def test_a_prefill_graph_that_does_not_fit(model, all_captures, monkeypatch):
    """Prompts run without this graph, its pool is freed, and no later call captures it again."""
    tries, before = [], kept.captured

    def lacking(run, pool):
        if not isinstance(run.__self__._step, EagerStep):
            return before(run, pool)
        tries.append(weakref.ref(run.__self__))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kept, "captured", lacking)
    gc.disable()
    try:
        for count in (0, 0, 1, 1):
            check(model)
            assert len(tries) == count
    finally:
        gc.enable()
    assert tries[0]() is None
    assert caches(model)[0].steps.pools.keys() == {True}
    assert len(all_captures) == 1

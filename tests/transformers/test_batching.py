"""Hugging Face's ``generate_batch`` and its manager run a patched model from one ``PagedCache``:
each request gets the tokens of ``generate``."""

import copy
import functools
import random
import re
import sys

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from dsv4_ops.core.versions import release
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.batching import hooks
from dsv4_ops.integrations.transformers.generation import kept
from dsv4_ops.testing.models import SPARSE, small_mla_model, small_model
from tests.fakes import graphs
from tests.helpers import nightly

SERVES = release(transformers.__version__) >= hooks.OLDEST
pytestmark = [
    pytest.mark.skipif(not SERVES, reason="transformers is refused by name"),
    pytest.mark.usefixtures("frozen_heap"),
]

if SERVES:
    from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

    from dsv4_ops.integrations.transformers.batching import manager as batching

MAKERS = {
    "v4": functools.partial(small_model, layer_types=[SPARSE], mlp_layer_types=["moe"]),
    "v4, all kinds of layers": small_model,
    "v3": functools.partial(small_mla_model, num_hidden_layers=1),
}
LONGEST = {"v4": 253, "v3": 61}
"""Length of the longest prompts, so that answers begin another block."""
NEW = 6


@functools.cache
def patched(name):
    model = v4.patch(MAKERS[name](), kv="fp32", precision="reference")
    model.generation_config.eos_token_id = None
    return model


def prompts_of(count, longest=20, seed=0):
    """Make prompts, of which every eleventh has the length ``longest``."""
    rng = random.Random(seed)
    lengths = (20, 1, 9, 20, 1, longest, 9, 1, 5, 1, 9)
    return [[rng.randrange(3, 256) for _ in range(lengths[n % 11])] for n in range(count)]


PROMPT = prompts_of(1)[0]


def settings(new=NEW, **rest):
    return GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, **rest)


def expected(model, prompts, new=NEW):
    """Return the new tokens of ``generate`` for each prompt, by one call per length."""
    answers = {}
    for length in {len(prompt) for prompt in prompts}:
        some = [prompt for prompt in prompts if len(prompt) == length]
        ids = torch.tensor(some)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, generation_config=settings(new))
        answers |= {tuple(a): b[length:] for a, b in zip(some, out.tolist(), strict=True)}
    return [answers[tuple(prompt)] for prompt in prompts]


def sizes(**changed):
    small = {"max_batch_tokens": 64, "max_requests_per_batch": 4, "num_blocks": 8}
    return ContinuousBatchingConfig(**small | changed)


def manager_of(model, new=NEW, hints=None, generation=None, **config):
    generation = generation or settings(new)
    return model.init_continuous_batching(generation, sizes(**config), workload_hints=hints)


@pytest.fixture(autouse=True)
def stopped(monkeypatch):
    """Stop managers that a failed test leaves running; otherwise the process would not end."""
    made, before = [], batching.Manager.__init__

    def init(self, *args):
        before(self, *args)
        made.append(self)

    monkeypatch.setattr(batching.Manager, "__init__", init)
    yield
    for manager in made:
        if manager.is_running():
            manager.stop(hard_stop=True)


@pytest.fixture
def steps(monkeypatch):
    """Record every step: its number of tokens, and the number of free blocks."""
    sizes, before = [], batching.StepModel.__call__

    def called(self, **inputs):
        sizes.append((inputs["input_ids"].shape[1], inputs["cache"].paged.num_free_blocks))
        return before(self, **inputs)

    monkeypatch.setattr(batching.StepModel, "__call__", called)
    return sizes


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("v4", "fifo"),
        ("v3", "fifo"),
        ("v3", "prefill_first"),
        *nightly(
            "the same of V3, and of V4 with one scheduler", ("v4, all kinds of layers", "fifo")
        ),
    ],
)
def test_each_request_gets_the_tokens_of_generate(name, scheduler, steps, caches):
    """Blocks run out: a request gives its blocks to others, and starts again."""
    model, prompts = patched(name), prompts_of(12, LONGEST[name[:2]])
    config = sizes(num_blocks=3, scheduler_type=scheduler)
    results = model.generate_batch(prompts, settings(), config)
    (cache,) = caches
    assert [result.error for result in results.values()] == [None] * 12
    assert [result.prompt_ids for result in results.values()] == prompts
    assert [result.generated_tokens for result in results.values()] == expected(model, prompts)
    assert sum(tokens for tokens, _ in steps) > sum(len(prompt) + NEW - 1 for prompt in prompts)
    assert min(free for _, free in steps) == 0
    assert (cache.num_free_blocks, cache.requests) == (3, {})
    assert max(tokens for tokens, _ in steps) == 64


@pytest.mark.parametrize("count", [21, *nightly("the same of 21 requests", 200)])
def test_requests_come_go_and_stream(count, caches):
    """A third of the requests is cancelled after the first token; memory does not grow."""
    model, prompts = patched("v3"), prompts_of(count, seed=1)
    manager = manager_of(model)
    addresses = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(caches[0].tensors)]
    streams, finished, cancelled = {}, {}, set()
    manager.start()
    while len(finished) + len(cancelled) < len(prompts):
        while len(streams) < min(len(finished) + len(cancelled) + 6, len(prompts)):
            index = len(streams)
            manager.add_request(prompts[index], request_id=str(index), streaming=True)
            streams[index] = []
        result = manager.get_result(timeout=5)
        assert result is not None, manager.background_thread_status.fatal_error
        index = int(result.request_id)
        streams[index].append(list(result.generated_tokens))
        if index % 3 == 1:
            manager.cancel_request(result.request_id)
            cancelled.add(index)
        elif result.is_finished():
            finished[index] = result.generated_tokens
    manager.stop()
    (cache,) = caches
    want = expected(model, prompts)
    assert [finished[index] for index in sorted(finished)] == [
        tokens for index, tokens in enumerate(want) if index % 3 != 1
    ]
    for index, parts in streams.items():
        assert parts == [want[index][: n + 1] for n in range(len(parts))]
    assert (cache.num_free_blocks, cache.requests) == (8, {})
    leaves = torch.utils._pytree.tree_leaves(cache.tensors)
    assert [leaf.data_ptr() for leaf in leaves] == addresses


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("v3", 1),
        *nightly("decodes alone; compile_step's tests", ("v3", 20)),
        *nightly("the same of V3", ("v4", 20)),
    ],
)
def test_a_step_is_compiled_once(name, count):
    """Decodes share a graph, and all other steps share another. Prompts of one token are decodes,
    and sizes of 1 need no graph of their own."""
    model = v4.patch(MAKERS[name](), kv="fp32", precision="reference")
    prompts = [prompt[:count] for prompt in prompts_of(8)]
    counters.clear()
    want = expected(patched(name), prompts, 3)
    graphs = []
    for some in (prompts[1:3], prompts, prompts[:1]):
        config = sizes(varlen_compile_config=CompileConfig(backend="eager"))
        results = model.generate_batch(some, settings(3), config)
        tokens = [result.generated_tokens for result in results.values()]
        assert tokens == want[prompts.index(some[0]) :][: len(some)]
        graphs.append(counters["stats"]["unique_graphs"])
    steps = [step for step in model.dsv4_ops_decode_steps.values() if step.parts]
    assert len(steps) == 1 + (count > 1)
    assert graphs == [sum(len(step.parts) for step in steps)] * 3


def run(model, prompts, **config):
    """Return the new tokens of each prompt, from the manager that the model keeps."""
    config = sizes(num_blocks=6, **config)
    results = model.generate_batch(prompts, settings(9), config, persistent_manager=True)
    assert [result.error for result in results.values()] == [None] * len(prompts)
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize(("name", "compiled"), [("v4", False), ("v3", True)])
def test_graphs_replay_steps(name, compiled, monkeypatch, tmp_path):
    """Later sessions replay the graphs of 1, 2 and 4 decodes and of 64 tokens, unless the model
    changed. Eager steps with hooks of a user run without graphs."""
    model, prompts = copy.deepcopy(patched(name)), prompts_of(12, LONGEST[name])
    want, pools = expected(model, prompts, 9), graphs.install(monkeypatch, tmp_path)
    config = {"varlen_compile_config": graphs.CONFIG} if compiled else {}
    for _ in range(3):
        assert run(model, prompts, **config) == want
        assert 2 <= len(pools) <= 4
    captured, calls = len(pools), []
    if not compiled:
        handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        assert run(model, prompts) == want
        assert (len(pools), len(calls) > 20) == (captured, True)
        handle.remove()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0), requires_grad=False)
    changed = expected(model, prompts, 9)
    assert changed != want
    assert run(model, prompts, **config) == changed
    assert len(pools) > captured


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("setting", [None, False, (False, False)])
def test_steps_without_graphs(setting, error, monkeypatch, tmp_path):
    """Steps go on if a capture fails."""
    model, prompts = copy.deepcopy(patched("v3")), prompts_of(8)
    want, pools = expected(model, prompts, 9), graphs.install(monkeypatch, tmp_path)

    def captured(*_):
        pools.append("pool")
        raise error

    monkeypatch.setattr(kept, "captured", captured)
    assert run(model, prompts, use_cuda_graph=setting) == want
    assert len(pools) == (setting is None)
    assert not vars(model)[hooks.CACHED].steps.captures


def test_a_manager_starts_again_with_the_cache_that_it_has(caches):
    model, prompts = copy.deepcopy(patched("v3")), prompts_of(3)
    want = expected(model, prompts, 3)
    caches.clear()
    for _ in range(2):
        once = {"generation_config": settings(3), "persistent_manager": True}
        results = model.generate_batch(prompts, **once)
        assert [result.generated_tokens for result in results.values()] == want
    assert len(caches) == 1
    with pytest.raises(ValueError, match=r"workload_hints must have at most .* tokens with"):
        model.generate_batch([[5] * 80], generation_config=settings(3))
    v4.unpatch(model)
    assert not hasattr(model, hooks.CACHED)


def test_several_answers_to_a_prompt():
    model = patched("v3")
    prompts = [*prompts_of(3), [5], [9], [11]]
    config = settings(3)
    config.update(do_sample=True, top_k=1, num_return_sequences=3)
    results = model.generate_batch(prompts, generation_config=config)
    want = expected(model, prompts, 3)
    tokens = [result.generated_tokens for result in results.values()]
    assert tokens == [answer for answer in want for _ in range(3)]


def test_logprobs_and_ends_are_hugging_faces():
    model, prompt = patched("v3"), PROMPT
    (tokens,) = expected(model, [prompt], 4)
    ends = settings(4, eos_token_id=tokens[2])
    (result,) = model.generate_batch([prompt], ends, sizes(return_logprobs=True)).values()
    end = tokens.index(tokens[2]) + 1
    assert result.generated_tokens == tokens[:end]
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :]
    want = logits.log_softmax(-1)[range(end), tokens[:end]]
    torch.testing.assert_close(torch.tensor(result.logprobs), want, rtol=0, atol=1e-4)


def test_generate_with_a_paged_cache_of_hugging_faces():
    """``generate`` passes calls for a paged cache on to ``generate_batch``."""
    model, prompt = patched("v3"), PROMPT
    ids = torch.tensor([prompt])
    out = model.generate(ids, cache_implementation="paged", generation_config=settings(3))
    assert out[0, :, -3:].tolist() == expected(model, [prompt], 3)


def check_undisturbed(model):
    """Check that calls without a cache compute what they did: the attention has not changed."""
    ids = torch.tensor([PROMPT])
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(model(ids).logits, stock()(ids).logits, rtol=0, atol=1e-5)


@functools.cache
def stock():
    return MAKERS["v3"]()


def test_old_releases_are_refused_before_anything_changes(monkeypatch):
    model = patched("v3")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.18.2")
    rule = "transformers must be 5.19 or newer for continuous batching, got 5.18.2. Install a"
    for call in (
        lambda: model.generate_batch([[5]]),
        lambda: model.init_continuous_batching(),
        lambda: model.generate(torch.tensor([[5]]), cache_implementation="paged"),
    ):
        with pytest.raises(NotImplementedError, match=rule):
            call()
        check_undisturbed(model)


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, got 0"),
        ({"max_batch_tokens": -1}, ValueError, "max_batch_tokens must be at least 1, got -1"),
        ({"max_blocks_per_request": 1, "hints": (60, 6)}, ValueError,
         "workload_hints must have at most 65 tokens with the answer"),
        ({"num_blocks": 1, "hints": (60, 6)}, ValueError,
         "stores all but the last, got 60 + 6 tokens. Pass a"),
        ({"use_async_batching": True}, NotImplementedError, "use_async_batching must be False or"),
        ({"cpu_offload_space": 1.0}, NotImplementedError, "cpu_offload_space must be 0 with a"),
        ({"scheduler_type": "lifo"}, ValueError, "scheduler_type must be"),
    ],
)  # fmt: skip
def test_settings_that_a_patched_model_lacks(config, kind, message):
    model, config = patched("v3"), dict(config)
    hints = config.pop("hints", None)
    if hints is not None:
        hints = batching.api.WorkloadHints(*hints, num_requests=1)
    with pytest.raises(kind, match="init_continuous_batching: .*" + re.escape(message)):
        manager_of(model, hints=hints, **config)
    check_undisturbed(model)


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        (torch.tensor([[5]]), TypeError, "inputs must be a list of prompts, got a Tensor. Pass a"),
        ([[5], torch.tensor([5])], TypeError, "inputs[1] must be a list of token ids, got a T"),
        ([["a"]], TypeError, "inputs[0] must be a list of token ids, got a list with a str"),
        ([[5], []], ValueError, "inputs[1] must have at least one token, and ids of the"),
        ([[5, -1]], ValueError, "ids of the vocabulary, 0 to 259, got -1. Encode"),
        ([[260]], ValueError, "ids of the vocabulary, 0 to 259, got 260. Encode"),
    ],
)
def test_prompts_are_checked(inputs, kind, message):
    """Hugging Face would log the error of one prompt, and return the other results."""
    with pytest.raises(kind, match=re.escape("generate_batch: ") + ".*" + re.escape(message)):
        patched("v3").generate_batch(inputs)


def test_a_request_that_does_not_fit_is_refused_and_others_go_on():
    model, prompt = patched("v3"), PROMPT
    manager = manager_of(model, 3, num_blocks=1)
    manager.start()
    manager.add_request(prompt, request_id="one")
    for kind, message, call in (
        (ValueError, "input_ids must have at most 65 tokens with the", ([5] * 65,)),
        (ValueError, "got 20 + 46 tokens. Pass a shorter prompt", (prompt, None, 46)),
        (ValueError, "max_new_tokens must be at least 1, got 0", (prompt, None, 0)),
        (ValueError, "input_ids must have at least one token", ([],)),
        (TypeError, "input_ids must be a list of token ids", ("text",)),
    ):
        with pytest.raises(kind, match="add_request: .*" + re.escape(message)):
            manager.add_request(*call)
    manager.add_request(prompt, request_id="two", max_new_tokens=30)
    with pytest.raises(ValueError, match="request_id must be that of no running request"):
        manager.add_request(prompt, request_id="two", max_new_tokens=30)
    results = {name: manager.get_result(timeout=20) for name in ("one", "two")}
    assert results["one"].generated_tokens == expected(model, [prompt], 3)[0]
    assert results["two"].generated_tokens == expected(model, [prompt], 30)[0]
    manager.stop()


def test_an_answer_without_a_limit_ends_where_the_cache_does():
    model, prompt = patched("v3"), PROMPT
    config = settings()
    config.max_new_tokens = None
    manager = manager_of(model, generation=config, num_blocks=1)
    manager.start()
    manager.add_request(prompt)
    assert manager.get_result(timeout=20).generated_tokens == expected(model, [prompt], 45)[0]
    manager.stop()


def test_max_length_counts_the_prompt_as_generate_does():
    """``max_new_tokens`` has priority. Hugging Face's own method ignores ``max_length``."""
    model, prompts = patched("v3"), [[5, 6, 7], [5], [5, 6, 7, 8, 9, 10, 11, 12]]
    config = settings(None, max_length=9)
    results = model.generate_batch(prompts, generation_config=config)
    for prompt, result in zip(prompts, results.values(), strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert result.prompt_ids + result.generated_tokens == want[0].tolist()
        assert want.shape[1] == 9
    results = model.generate_batch(prompts, generation_config=config, max_new_tokens=3)
    assert [len(result.generated_tokens) for result in results.values()] == [3, 3, 3]
    with pytest.raises(ValueError, match=r"fewer tokens than max_length of .* = 9, got 9\. P"):
        model.generate_batch([[5], [6] * 9], generation_config=config)
    manager = manager_of(model, generation=settings(None, max_length=1000), num_blocks=1)
    assert manager.paged.max_cache_len == 64  # answers end at this length


def test_a_model_whose_attention_a_failed_try_has_changed_is_refused():
    """Hugging Face changes a model's attention before refusing it, so logits become wrong."""
    model = MAKERS["v4"]()
    with pytest.raises(ValueError, match="Invalid layer type"):
        model.generate_batch([[5]], generation_config=settings())
    assert model.config._attn_implementation == "paged|eager"
    with pytest.raises(ValueError, match=r"patch: model must have.*set_attn_implementation"):
        v4.patch(model)
    model.set_attn_implementation("eager")
    v4.patch(model)


class OnGpu:
    """A model that pretends to be on a GPU."""

    device = torch.device("cuda")

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)


def test_blocks_fill_the_free_memory_of_a_gpu(monkeypatch):
    """By default the blocks fill the free memory, unless all blocks of every row fit into it."""
    model, config = OnGpu(patched("v3")), ContinuousBatchingConfig(max_memory_percent=0.5)

    def blocks(free):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
        return batching.cache_sizes(model, config, None)["num_blocks"]

    sizes = {"max_batch_size": 64, "max_cache_len": 8192}
    caches = (v4.PagedCache.for_model(patched("v3"), num_blocks=n, **sizes) for n in (1, 2))
    fixed, two = (sum(cache.memory().values()) for cache in caches)
    block = two - fixed
    assert blocks(2 * (fixed + 9 * block)) == 10
    assert blocks(1 << 40) == 64 * 8192 // 64
    with pytest.raises(ValueError, match="max_requests_per_batch must be small enough for"):
        blocks(fixed)


def test_ranks_are_refused(monkeypatch):
    model = patched("v3")
    monkeypatch.setattr(model, "_device_mesh", object(), raising=False)
    with pytest.raises(NotImplementedError, match="model must be on one device, got one of sev"):
        manager_of(model)


LEFT_OUT = {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "max_time": 1.0}


@pytest.mark.parametrize(("name", "value"), [("min_new_tokens", 3), *LEFT_OUT.items()])
def test_settings_that_would_be_left_out_are_refused(name, value):
    """Hugging Face logs a line, or fails in its thread; ``generate`` supports these settings."""
    text = f"generation_config.{name} must be .* in continuous batching, got {value}"
    with pytest.raises(NotImplementedError, match=text):
        patched("v3").generate_batch([[5, 6]], generation_config=settings(**{name: value}))

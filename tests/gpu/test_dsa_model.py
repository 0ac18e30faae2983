"""Small V3.2 and GLM-5 models on a GPU, with FP8 caches of 656 and 132 bytes per token: captured
and packaged steps are as near to float32 as eager steps, and drafts keep the tokens."""

from functools import partial
from random import Random

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v32")

from torch._dynamo.utils import counters

from dsv4_ops.attention import MlaSpec
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.loading import draft
from dsv4_ops.testing.models import random_weight, small_dsa_model, small_mla_model
from tests.support.hf_models import LENGTH, REQUESTS, Engine, run_packaged, run_randomly, text

DEVICE = "cuda"
# dense layers: rounding selects no other experts; most tokens see more than the 64 selected rows
SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 3, "index_topk": 64}
FAMILIES, EXACT = ("V3.2", "GLM-5"), {"kv": "fp32", "precision": "reference"}


def cache_of(model, requests=REQUESTS):
    return v4.PagedCache.for_model(model, max_batch_size=requests, max_cache_len=LENGTH)


def started(model):
    """Return an engine whose requests are prefilled."""
    engine = Engine(model, cache_of(model), text())
    engine.prefill(dict.fromkeys(range(REQUESTS), 120))
    return engine


@torch._inductor.config.patch("triton.cudagraph_or_error", True)
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_decode(family):
    """One CUDA graph serves the steps of a changing batch, without a recompile."""
    want = small_dsa_model(family, device=DEVICE, **SIZES)(text().to(DEVICE)).logits
    model = v4.patch(small_dsa_model(family, device=DEVICE, dtype=torch.bfloat16, **SIZES))
    eager = started(model)
    for _ in range(20):
        eager.decode(dict.fromkeys(range(REQUESTS), 1))
    step = torch.compile(v4.decode_step, fullgraph=True, mode="reduce-overhead")
    engine, rng = started(model), Random(1)
    counters.clear()
    for _ in range(20):
        counts = {each: 1 for each in range(REQUESTS) if rng.random() < 0.8} or {0: 1}
        engine.decode(counts, padding=REQUESTS - len(counts), step=step)
    assert counters["stats"]["unique_graphs"] == 1
    errors = engine.rms(want), eager.rms(want)
    print(f"{family}: captured {errors[0]:.3f}, eager {errors[1]:.3f}")
    assert errors[0] < 1.5 * errors[1]
    assert errors[1] < 0.3  # logits have a standard deviation of one


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float32(family):
    """Prefills, chunks and decodes give Hugging Face's logits on the same GPU."""
    sizes = {**SIZES, "num_hidden_layers": 3}
    want = small_dsa_model(family, device=DEVICE, **sizes)(text().to(DEVICE)).logits.cpu()
    model = small_dsa_model(family, device=DEVICE, **sizes)
    model = v4.patch(model, **EXACT)
    engine = Engine(model, cache_of(model), text())
    assert run_randomly(engine, Random(0), 130).worst(want) < 1e-4


@pytest.mark.parametrize("family", ["V3", "V3.2"])
def test_first_chunks(family, monkeypatch):
    """Compiled steps without contexts are as near to float32 as steps with contexts."""
    monkeypatch.setattr(MlaSpec, "break_even", 0)
    made = partial(small_mla_model, 3, first_k_dense_replace=3)
    if family == "V3.2":
        made = partial(small_dsa_model, family, **SIZES)
    want = made(device=DEVICE)(text().to(DEVICE)).logits
    model = v4.patch(made(device=DEVICE, dtype=torch.bfloat16), kv="bf16")
    assert model.dsv4_ops_spec.skips_contexts(64, 1, 64)
    step = v4.compile_step(model, v4.prefill_step, mode="regional", dynamic=True)
    errors = []
    for has_context in (True, False):
        run = partial(step, has_context=has_context)
        engine = Engine(model, cache_of(model), text())
        for counts in ({0: 64, 1: 1}, {2: 33}):
            padding = REQUESTS - len(counts)
            engine.prefill(counts, padding=padding, step=lambda _, *given, run=run: run(*given))
        engine.prefill({0: 50, 1: 100})
        errors.append(engine.rms(want))
    print(f"{family}: with contexts {errors[0]:.4f}, without {errors[1]:.4f}")
    assert errors[1] < 1.2 * errors[0] < 0.3


def test_generate_skips_contexts(monkeypatch):
    """First chunks attend to expanded keys, and the texts are Hugging Face's."""
    monkeypatch.setattr(MlaSpec, "break_even", 0)
    model = small_dsa_model("V3.2", device=DEVICE, index_topk=64)

    def texts(ids):
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        return model.generate(ids, pad_token_id=0, attention_mask=torch.ones_like(ids), **settings)

    prompts = [text()[:rows, :length].to(DEVICE) for rows, length in ((1, 40), (3, 60), (2, 100))]
    want = [texts(ids) for ids in prompts]
    kind, seen = type(v4.patch(model, **EXACT).dsv4_ops_spec), []
    skips = kind.skips_contexts

    def noted(*sizes):
        seen.append(skips(*sizes))
        return seen[-1]

    monkeypatch.setattr(kind, "skips_contexts", noted)
    for _ in range(3):  # the third prefill of a size is captured
        for ids, expected in zip(prompts, want, strict=True):
            seen.clear()
            assert torch.equal(texts(ids), expected)
            assert seen
            assert all(each is (ids.shape[1] <= 64) for each in seen)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packaged_decode(family, exact, tmp_path):
    """A package decodes in a process without our Python; a token that sees 61 rows attends to 32.
    Exact packages have float32 weights and caches; the others bf16 and FP8."""
    dtype, most = (torch.float32, 1e-4) if exact else (torch.bfloat16, 0.3)
    sizes = {**SIZES, "index_topk": 32, "device": DEVICE}
    want = small_dsa_model(family, **sizes)(text().to(DEVICE)).logits
    model = v4.patch(small_dsa_model(family, dtype=dtype, **sizes), **(EXACT if exact else {}))
    assert run_packaged(model, cache_of(model, 2), text(), tmp_path).rms(want) < most


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts(family):
    """The step is one graph; in float32 the texts are those without drafts."""
    model = small_dsa_model(family, device=DEVICE, vocab_size=260, num_hidden_layers=2)
    model = v4.patch(model, **EXACT)
    layer = model.dsv4_ops_spec.draft_layer("test", model).to_empty(device=DEVICE)
    for name, weight in layer.state_dict().items():
        ranges = {"norm": (1.0, 0.5), "bias": (0.0, 0.4)}
        weight.copy_(random_weight(name, weight.shape, 1, ranges, 8))
    draft.attach(model, layer)
    ids = text()[:2, :60].to(DEVICE)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, num_draft_tokens=2, **settings), want)

"""``prefill_step(has_context=False)``: steps in which every request begins."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from dsv4_ops.attention import MlaSpec
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.steps import export
from dsv4_ops.testing.models import small_dsa_model, small_model
from tests.helpers import Called, i32
from tests.support.hf_models import Engine, text
from tests.transformers import test_deepseek_v32 as v32

FIRST = partial(v4.prefill_step, has_context=False)
WITH_CONTEXT = {"context_chunks", "mla_gather_kv", "mla_decode", "mla_sparse", "indexer_select"}


@pytest.fixture(autouse=True)
def _expands(monkeypatch):
    """Let prefills of any size expand keys and values."""
    monkeypatch.setattr(MlaSpec, "break_even", 0)


def compiled(model):
    """Return a step for all sizes, which knows that requests begin, but no number of tokens."""
    step = v4.compile_step(model, v4.prefill_step, mode="regional", dynamic=True, backend="eager")
    return lambda _, *given: step(*given, has_context=False)


@pytest.mark.parametrize("family", ["V3", *v32.FAMILIES])
def test_no_context_is_read(family):
    """Later steps find the keys of the indexer in the cache, and select among them."""
    model, called = v32.reference(family), Called()
    for step, calls in ((FIRST, called), (compiled(model), nullcontext())):
        engine = Engine(model, v32.new_cache(model), v32.tokens())
        with calls:
            engine.prefill({0: 12, 1: 1, 2: v32.TOPK}, padding=2, step=step)
        engine.prefill({0: 30, 2: 9})
        engine.decode({0: 1, 1: 2, 2: 1})
        assert engine.worst(v32.expected(family)) < v32.CLOSE
    assert "mla_prefill" in called.names
    assert WITH_CONTEXT.isdisjoint(called.names)


@pytest.mark.parametrize("family", ["V3", *v32.FAMILIES])
def test_hugging_faces_first_call_reads_no_context(family):
    model = v32.reference(family)
    for length, reads in ((v32.TOPK, False), (v32.TOPK + 1, family != "V3")):
        with Called() as called:
            got = model(v32.tokens()[:, :length], cache=v32.new_cache(model)).logits
        torch.testing.assert_close(got, v32.expected(family)[:, :length], rtol=0, atol=v32.CLOSE)
        assert WITH_CONTEXT.isdisjoint(called.names) != reads


def test_v4_runs_the_same_ops():
    model = v4.patch(small_model(), **v32.EXACT)
    found = []
    for step in (FIRST, v4.prefill_step):
        engine = Engine(model, v32.new_cache(model), text())
        engine.prefill({0: 40, 1: 9}, step=step)
        found.append(engine.logits)
    for request, place in ((0, 39), (1, 8)):
        assert torch.equal(found[0][request][place], found[1][request][place])


@pytest.mark.parametrize(
    ("family", "counts", "got"),
    [
        ("V3.2", {0: 3}, "3 new tokens of 15 in request 0"),
        ("V3.2", {1: 2, 2: v32.TOPK + 2}, "18 new tokens of 18 in request 1"),
        ("V3", {0: 3}, "3 new tokens of 15 in request 0"),
    ],
)
def test_tokens_that_need_a_context_are_refused_or_dropped(family, counts, got):
    """On a CPU, eager calls raise; graphs drop the tokens, and other tokens are not affected."""
    model = v32.reference(family)
    engine = Engine(model, v32.new_cache(model), v32.tokens())
    engine.prefill({0: 12}, step=FIRST)
    rows = engine.cache.tensors.layers[0].kv.clone()
    with pytest.raises(ValueError, match=f"^prefill_step: has_context must be True, .* got {got}"):
        engine.prefill(counts, step=FIRST)
    assert torch.equal(engine.cache.tensors.layers[0].kv, rows)
    engine.prefill(counts, step=torch.compile(FIRST, fullgraph=True, backend="eager"))
    # a dropped request keeps its length: no later step reads rows that this step did not write
    assert int(engine.cache.tensors.dropped) == (v32.TOPK + 2 if 2 in counts else 3)
    assert engine.cache.seq_lens.tolist() == [12, counts.get(1, 0), 0]
    if 1 in counts:
        got, want = engine.logits[1][1], v32.expected(family)[1, 1]
        torch.testing.assert_close(got, want, rtol=0, atol=v32.CLOSE)


@pytest.mark.parametrize(("length", "row"), [(20, -1), (0, 1), (40, -1)])
def test_padding_requests_may_own_tokens(length, row):
    model, ids = v32.reference("V3.2"), v32.tokens()[0, :25]
    cache = v32.new_cache(model)
    cache.add("a", 5)
    batch = v4.StepBatch(ids, i32([0, 5, 25]), i32([5, length]), i32([0, row]))
    got = FIRST(model, batch, cache)[0]
    torch.testing.assert_close(got, v32.expected("V3.2")[0, 4], rtol=0, atol=v32.CLOSE)
    assert int(cache.tensors.dropped) == 0


def test_invariant_steps_do_not_depend_on_other_contexts():
    """Whether the other row has a context decides nothing, so V3.2 selects rows in both calls."""
    model = small_dsa_model("V3.2", index_topk=64)
    v4.patch(model, kv="bf16", precision="reference", batch_invariant=True)
    found = []
    for context in (0, 8):
        cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=128)
        if context:
            mask = torch.tensor([[0] * context, [1] * context])
            model(text()[:2, 64 : 64 + context], cache=cache, attention_mask=mask)
        found.append(model(text()[:2, :64], cache=cache).logits[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["V3", "V3.2"])
def test_a_program_of_first_chunks(family):
    model, cache = v32.reference(family), v32.new_cache(v32.reference(family))
    inputs = v4.decode_inputs(export.padding_batch(cache, 2, 5), cache)
    program = torch.export.export(
        export.PrefillModule(model, cache, has_context=False), inputs,
        dynamic_shapes=export.prefill_shapes(inputs, 40), strict=False,
    ).module()  # fmt: skip
    engine = Engine(model, cache, v32.tokens())
    for counts in ({0: 12, 1: 3}, {2: 9}):
        engine.prefill(
            counts,
            padding=2 - len(counts),
            step=lambda _, batch, __: program(*v4.decode_inputs(batch, cache)),
        )
    assert engine.worst(v32.expected(family)) < v32.CLOSE


def test_has_context_is_a_bool():
    with pytest.raises(TypeError, match=r"^prefill_step: has_context must be a bool"):
        v4.prefill_step(v32.reference("V3"), None, None, has_context=1)
